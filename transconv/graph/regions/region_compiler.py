"""The kernels of a region of a graph: planned, written as texts, and weighed until nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import fx

from transconv.compute import Workload
from transconv.compute import kernels as kernels_of
from transconv.conv import ConvProblem, Prop, Surrounded, surrounded
from transconv.errors import TransconvError
from transconv.functional.calls.compiled_launch import deterministic, program
from transconv.graph.fusion.concat_views import slices
from transconv.graph.fusion.epilogue_reductions import weighed, why_again
from transconv.graph.fusion.fusion_cost import Price
from transconv.graph.fusion.group_text import GroupText, Writer
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import MovedView, Piece, RegionInput
from transconv.graph.fusion.inplace_maps import replacing
from transconv.graph.fusion.materialize import MaterializeReason, step
from transconv.graph.fusion.memory_order import memory_of
from transconv.graph.fusion.plan import FusionPlan, planned
from transconv.graph.fusion.written_factors import held, why_apart
from transconv.graph.fusion.written_factors import weighed as apart_or_not
from transconv.graph.lowerings import small_images
from transconv.graph.regions import saved_tensors
from transconv.graph.regions.partition import Region
from transconv.graph.regions.refusals import refusal
from transconv.graph.regions.region_calls import Handed, RegionLaunches
from transconv.graph.regions.region_kernel import RegionKernel, SizedTensor
from transconv.graph.sizes import Known, same
from transconv.graph.symbols import Symbols
from transconv.graph.translate import base_of
from transconv.runtime import PlanRequest, rank
from transconv.target import Target

STEPS = 2  # in which factors are written first: see fusion/plan.py


def launches(region: Region, device: torch.device, target: Target, rates: Price,
             symbols: Symbols | None = None, upsampling: str = "auto") -> RegionLaunches:
    """The launches of a region on a device, which is a target, decided by rates of one. ``upsampling``:
    see lowerings/small_images.py. Raises Refused where the text of a kernel cannot be read, which is a
    bug."""
    symbols = symbols or Symbols(fx.Graph())
    handed = [_handed(node, region, symbols) for node in region.outputs]
    ends = [h.piece for h in handed if not isinstance(h.piece, RegionInput)]
    free = _free(region, handed)
    apart: dict[Piece, tuple[MaterializeReason, ...]] = {}
    again: dict[Piece, str] = {}
    ranked: set[Workload] = set()
    while True:
        plan = planned(ends, rates, apart, again, free)
        kernels: list[RegionKernel] = []
        for group in plan.groups:
            try:
                kernels += _kernels(group, plan, symbols.known) if group.stores else []
            except TransconvError as error:
                raise refusal(group, plan, region, error) from error
        for _ in range(STEPS):  # what is estimated first tells what else has to be
            work = {w: None for k in kernels if k.group.product for w in (
                *weighed(k), *apart_or_not(k, plan, rates, ranked), *small_images.weighed(k))
                    if w not in ranked}
            rank(PlanRequest(w, target, deterministic()) for w in work)
            ranked |= work.keys()
        if less := {k.group.product: why for k in kernels if k.group.product
                    and (why := small_images.why_instead(k, plan, rates, upsampling))}:
            for product, why in less.items():
                assert product.instead is not None
                product.become(product.instead.product)
                apart[product] = (MaterializeReason(why),)
            continue
        late = {k.group.product: why for k in kernels if k.group.product
                and len(apart.get(k.group.product, ())) < STEPS
                and (why := why_apart(k, plan, target, rates))}
        read: dict[Piece, str] = {k.group.product: why for k in kernels if k.group.product
                                  and (why := why_again(k, rates))}
        again |= read
        if not late and not read:
            break
        for product, why in late.items():
            apart[product] = (*apart.get(product, ()), step(product, plan.stored, why))
    inputs = [(i, x, region.pieces[x]) for i, x in enumerate(region.inputs)
              if isinstance(region.pieces[x], RegionInput)]
    found = RegionLaunches(device, region, plan, kernels, inputs, handed)
    found.last, found.cut = _last(found), slices(plan)
    found.over = replacing(found.kernels, found.last, plan.places)
    found.lying = {node.name: plan.strides(h.piece) for node, h in zip(region.outputs, handed, strict=True)
                   if h.piece in free}
    return found


def _free(region: Region, handed: Sequence[Handed]) -> set[Piece]:
    """Results that lie as kernels like it: those that only the backward graph sees, through no view."""
    ends = [(h, bool(node.meta.get(saved_tensors.FREE)) and h.view is None)
            for node, h in zip(region.outputs, handed, strict=True)]
    return {h.piece for h, own in ends if own} - {h.piece for h, own in ends if not own}


def _kernels(group: FusionGroup, plan: FusionPlan, known: Known) -> list[RegionKernel]:
    """The kernels of a group: one, or where sizes are names one for each part of its result."""
    strides = held(group, plan)
    for piece in group.stores:
        group.strides[piece] = plan.strides(piece)
    tensors: dict[tuple[Piece, bool], str] = {}
    parts = (group, *group.siblings)
    relation = group.product.relation if group.product else None
    written = [Writer(part, strides, tensors=tensors if relation else {}, known=known).written()
               for part in parts]
    texts = tuple(w.text for w in written)
    if relation and (asked := _related(*relation, texts)):
        return [_kernel(group, texts, written[-1], asked)]
    return [_kernel(part, (w.text,), w, w.text) for part, w in zip(parts, written, strict=True)]


@lru_cache(maxsize=4096)  # blocks of a network repeat, and each decision has all kernels written anew
def _related(problem: ConvProblem, prop: Prop, texts: tuple[str, ...]) -> Surrounded | None:
    """The workload of the texts of a convolution's parts; None where one takes several kernels: a sum may
    be a row of the result."""
    computes = [program(t).compute for t in texts]
    return None if any(len(kernels_of(c)) > 1 for c in computes) else surrounded(problem, prop, computes)


def _kernel(
    group: FusionGroup, texts: tuple[str, ...], written: GroupText, asked: str | Surrounded
) -> RegionKernel:
    return RegionKernel(group, texts, written.given, written.stored,
                  tuple(SizedTensor(p.shape, group.strides[p], p.dtype) for p in written.stored), asked,
                  written.sized)


def _handed(node: fx.Node, region: Region, symbols: Symbols) -> Handed:
    """How a node's tensor comes from a piece in memory: through views that are the same memory."""
    piece: Piece = region.pieces[node]
    val = node.meta["val"]
    at = node
    while isinstance(piece, MovedView) and piece.alias and (base_node := base_of(at)) is not None:
        at, piece = base_node, piece.of
    if at is node:
        return Handed(piece, None)
    if at.meta.get(saved_tensors.MOVED):  # its views were traced of other memory
        return Handed(region.pieces[node], None)
    base = at.meta["val"]
    if not isinstance(piece, RegionInput) and not same(memory_of(piece), symbols.result(base).strides):
        return Handed(region.pieces[node], None)
    behind = symbols.length(val.storage_offset()) - symbols.length(base.storage_offset())
    own = symbols.result(val)
    return Handed(piece, (own.shape, own.strides, behind))


def _last(found: RegionLaunches) -> list[list[Piece]]:
    """Of each launch, the tensors that nothing needs behind it."""
    held = {h.piece for h in found.handed}
    seen = {*held}
    done: list[list[Piece]] = []
    for kernel in reversed(found.kernels):
        own = [p for p in dict.fromkeys((*kernel.given, *kernel.stored)) if p not in seen]
        seen |= {*own}
        done.append(own)
    return done[::-1]

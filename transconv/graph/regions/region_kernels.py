"""The kernels of a region: planned, written as texts, and weighed until nothing changes.

Estimates of the cost room decide, of the product as it is written and of the plain one, which may have
schedules, boxes and tuned rows that its factors or statistics rule out:

    why_apart      its factors are written by kernels before it, not computed or seen through views
    why_instead    another product is computed, such as one of an image before it was made larger
    why_again      its result is read again by reductions, which do not leave with it

A map may write its result over an operand that nothing needs behind it:

    z = silu(y * scale + shift)      an element of y is read by the program that writes that of z

A map reads all elements of a tile before it writes them, and no two tiles have one in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import inf

import torch
from torch import fx

from transconv.compute import Alone, Compute, Reduction, Workload, without_statistics
from transconv.compute import kernels as kernels_of
from transconv.conv import ConvProblem, ConvWorkload, Prop, Surrounded, surrounded
from transconv.functional.calls.compiled_launch import deterministic, program
from transconv.graph.fusion.group_text import GroupText, Writer
from transconv.graph.fusion.groups import FusionGroup, FusionPlan, Price, Statistic
from transconv.graph.fusion.index_ir import (
    ConstantValue,
    MovedView,
    Piece,
    PiecewiseIndex,
    ProductSum,
    RegionInput,
    aliased,
    features_last,
    instructions,
    memory_of,
    sources,
)
from transconv.graph.fusion.plan import planned
from transconv.graph.fusion.planner import MaterializeReason, step
from transconv.graph.regions.aot_graphs import FREE, MOVED
from transconv.graph.regions.region_kernel import (
    Handed,
    Region,
    RegionKernel,
    RegionPlan,
    SizedTensor,
    refusal,
)
from transconv.graph.regions.torch_region import base_of
from transconv.graph.sizes import Known, Length, SymbolicSize, dense_strides, like, same
from transconv.graph.symbols import Symbols
from transconv.ir import TRUE, Layout
from transconv.runtime import PlanRequest, estimated, rank
from transconv.selection import HELD, shortlist
from transconv.support import TransconvError
from transconv.target import Target

STEPS = 2  # in which factors are written first: see fusion/plan.py
UPSAMPLING = ("auto", "always", "never")
"""Whether convolutions of upsampled images may become transposed ones: where they round no more often than
torch, or even then, or not at all."""
FACTOR_REFUSED = "no schedule of the product computes its factor, too"
FACTOR_DEARER = "is seen through views by every tile: {:.3g} us, written and read in boxes {:.3g} us"
TAPS_CHEAPER = "its taps of one element are added up: {:.3g} us, of the large image {:.3g} us"
REFUSED = "no schedule of the product reduces it, too"
SUMMED = 2.0  # times as long as its bytes a kernel takes that adds up columns: 1.4 to 4.4 on an H200
DEARER = "leaves with the product: {:.3g} us, the product and a kernel that reads it again {:.3g} us"


def launches(
    region: Region,
    device: torch.device,
    target: Target,
    rates: Price,
    symbols: Symbols | None = None,
    upsampling: str = "auto",
) -> RegionPlan:
    """The kernels of a region on a device, which is a target, decided by rates of one. ``upsampling``: one
    of UPSAMPLING. Raises RefusedKernel where the text of a kernel cannot be read, which is a bug."""
    symbols = symbols or Symbols(fx.Graph())
    handed = [_handed(node, region, symbols) for node in region.outputs]
    ends = [h.piece for h in handed if not isinstance(h.piece, RegionInput)]
    free = _free(region, handed)
    apart: dict[Piece, tuple[MaterializeReason, ...]] = {}
    again: dict[Piece, str] = {}
    ranked: set[Workload] = set()
    while True:
        plan = planned(ends, rates, apart, again, free)
        products = _written((g for g in plan.groups if g.product), plan, region, symbols.known)
        deciding = {k: p for own in products.values() for k in own if (p := k.group.product)}
        for _ in range(STEPS):  # what is estimated first tells what else has to be
            work = {
                w: None for k in deciding for w in to_estimate(k, plan, rates, ranked) if w not in ranked
            }
            rank(PlanRequest(w, target, deterministic()) for w in work)
            ranked |= work.keys()
        if less := {
            p: why for k, p in deciding.items() if (why := why_instead(k, plan, rates, upsampling))
        }:
            for product, why in less.items():
                assert product.instead is not None
                product.become(product.instead.product)
                apart[product] = (MaterializeReason(why),)
            continue
        late = {
            p: step(p, _before(k, plan), why)
            for k, p in deciding.items()
            if len(apart.get(p, ())) < STEPS and (why := why_apart(k, plan, target, rates))
        }
        read: dict[Piece, str] = {p: why for k, p in deciding.items() if (why := why_again(k, rates))}
        again |= read
        if not late and not read:
            break
        for product, one in late.items():
            apart[product] = (*apart.get(product, ()), one)
    others = _written((g for g in plan.groups if not g.product), plan, region, symbols.known)
    kernels = [k for g in plan.groups for k in (products if g.product else others)[g]]
    inputs = [
        (i, x, region.pieces[x])
        for i, x in enumerate(region.inputs)
        if isinstance(region.pieces[x], RegionInput)
    ]
    last = _last(kernels, {h.piece for h in handed})
    lying = {
        node.name: plan.strides(h.piece)
        for node, h in zip(region.outputs, handed, strict=True)
        if h.piece in free
    }
    return RegionPlan(
        device, region, plan, kernels, inputs, handed, last, replacing(kernels, last, plan.places), lying
    )


def _free(region: Region, handed: Sequence[Handed]) -> set[Piece]:
    """Results that lie as kernels like it: those that only the backward graph sees, through no view."""
    ends = [
        (h, bool(node.meta.get(FREE)) and h.view is None)
        for node, h in zip(region.outputs, handed, strict=True)
    ]
    return {h.piece for h, own in ends if own} - {h.piece for h, own in ends if not own}


def _written(
    groups: Iterable[FusionGroup], plan: FusionPlan, region: Region, known: Known
) -> dict[FusionGroup, list[RegionKernel]]:
    """The kernels of groups. Only those of products decide what is planned next: others are written when
    all is decided."""
    found: dict[FusionGroup, list[RegionKernel]] = {}
    for group in groups:
        try:
            found[group] = _kernels(group, plan, known) if group.stores else []
        except TransconvError as error:
            raise refusal(group, plan, region, error) from error
    return found


def _kernels(group: FusionGroup, plan: FusionPlan, known: Known) -> list[RegionKernel]:
    """The kernels of a group: one, or where sizes are names one for each part of its result."""
    strides = held(group, plan)
    for piece in group.stores:
        group.strides[piece] = plan.strides(piece)
    tensors: dict[tuple[Piece, bool], str] = {}
    parts = (group, *group.siblings)
    relation = group.product.relation if group.product else None
    written = [
        Writer(part, strides, tensors=tensors if relation else {}, known=known).written() for part in parts
    ]
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
    memory = tuple(SizedTensor(p.shape, group.strides[p], p.dtype) for p in written.stored)
    return RegionKernel(group, texts, written.given, written.stored, memory, asked, written.sized)


def _handed(node: fx.Node, region: Region, symbols: Symbols) -> Handed:
    """How a node's tensor comes from a piece in memory: through views that are the same memory."""
    piece: Piece = region.pieces[node]
    val = node.meta["val"]
    at = node
    while isinstance(piece, MovedView) and piece.alias and (base_node := base_of(at)) is not None:
        at, piece = base_node, piece.of
    if at is node:
        return Handed(piece, None)
    if at.meta.get(MOVED):  # its views were traced of other memory
        return Handed(region.pieces[node], None)
    base = at.meta["val"]
    if not isinstance(piece, RegionInput) and not same(memory_of(piece), symbols.result(base).strides):
        return Handed(region.pieces[node], None)
    behind = symbols.length(val.storage_offset()) - symbols.length(base.storage_offset())
    own = symbols.result(val)
    return Handed(piece, (own.shape, own.strides, behind))


def _last(kernels: Sequence[RegionKernel], held: set[Piece]) -> list[list[Piece]]:
    """Of each launch, the tensors that nothing needs behind it; ``held``: what is handed out."""
    seen = {*held}
    done: list[list[Piece]] = []
    for kernel in reversed(kernels):
        own = [p for p in dict.fromkeys((*kernel.given, *kernel.stored)) if p not in seen]
        seen |= {*own}
        done.append(own)
    return done[::-1]


def held(group: FusionGroup, plan: FusionPlan) -> Callable[[Piece], tuple[Length, ...] | None]:
    """The strides of what is in memory for a group; None for what it computes."""

    def strides(piece: Piece) -> tuple[Length, ...] | None:
        if isinstance(piece, RegionInput):
            return piece.strides
        stored = plan.stored.get(piece)
        return None if stored is None or stored.number >= group.number else plan.strides(piece)

    return strides


# -- alternatives of a product -------------------------------------------------------------------------


def _microseconds(work: Workload, rates: Price) -> float:
    """The estimate of a workload; infinite for one without a schedule."""
    try:
        return estimated(work, rates.target)
    except TransconvError:
        return inf


def _before(kernel: RegionKernel, plan: FusionPlan) -> set[Piece]:
    """What is in memory for a kernel: what those before it store."""
    return {x for x, group in plan.stored.items() if group.number < kernel.group.number}


@lru_cache(maxsize=4096)  # so that its text is written once
def plain(work: Workload) -> Workload:
    """A product without what leaves with it, and without what that alone needs."""
    if not any(c.statistics for c in work.computations):
        return work
    made = tuple(map(without_statistics, work.computations))
    return replace(work, parts=made) if isinstance(work, Surrounded) else Alone(made[0])


def to_estimate(
    kernel: RegionKernel, plan: FusionPlan, rates: Price, known: AbstractSet[Workload]
) -> list[Workload]:
    """What the alternatives of a product are weighed by. Where it decides whether factors are written
    first, or whether its result is read again, the plain product only once the product itself is ``known``
    and a bound does not decide."""
    product, work = kernel.group.product, plain(kernel.workload)
    assert product is not None
    found = [kernel.workload] if kernel.group.statistics else []
    if found and kernel.workload in known and not _surely_leave(kernel, rates):
        found.append(work)
    if (seen := _seen(kernel, plan)) and _is_estimated(kernel, work):
        if work not in known:
            found.append(work)
        elif least_apart(kernel, plan, rates) < _microseconds(work, rates) < inf:
            with suppress(TransconvError):
                found.append(_written_apart(kernel, plan, seen))
    if product.instead is not None and isinstance(work, Surrounded):
        found.append(_small(product.instead.product, work.problem))
    return found


# -- factors that are written first --------------------------------------------------------------------


def why_apart(kernel: RegionKernel, plan: FusionPlan, target: Target, rates: Price) -> str:
    """Why the factors of a product's kernel should be written first; empty if they should not, or are."""
    work = plain(kernel.workload)
    if not _seen(kernel, plan):
        return ""
    if not _schedules(work, target):
        return FACTOR_REFUSED
    through = _microseconds(work, rates) if _is_estimated(kernel, work) else inf
    if through == inf or through <= least_apart(kernel, plan, rates):
        return ""
    written = written_first(kernel, plan, rates)
    return FACTOR_DEARER.format(through, written) if written < through else ""


def written_first(kernel: RegionKernel, plan: FusionPlan, rates: Price) -> float:
    """Microseconds of the plain product of a kernel, and of those that write its factors; infinite if it
    has no schedule."""
    seen = _seen(kernel, plan)
    try:
        found = _microseconds(_written_apart(kernel, plan, seen), rates)
    except TransconvError:
        return inf
    stored = _before(kernel, plan)
    return found + read_behind(kernel, plan, rates) + sum(written(x, stored, rates) for x in seen)


def least_apart(kernel: RegionKernel, plan: FusionPlan, rates: Price) -> float:
    """Microseconds below which ``written_first`` is not, without a look at schedules of the product."""
    assert kernel.group.product is not None
    stored = _before(kernel, plan)
    return (
        rates.least(kernel.group.product)
        + read_behind(kernel, plan, rates)
        + sum(written(x, stored, rates) for x in _seen(kernel, plan))
    )


def read_behind(kernel: RegionKernel, plan: FusionPlan, rates: Price) -> float:
    """Microseconds that a product's kernel takes for what its epilogue reads."""
    assert kernel.group.product is not None
    stored = _before(kernel, plan)
    own = {x for f in kernel.group.product.factors for x in sources(f.of, stored)}
    return rates.moved(sum(x.bytes for x in {*kernel.given} - own))


def _seen(kernel: RegionKernel, plan: FusionPlan) -> list[Piece]:
    """The factors of a product that its kernel computes or sees through views; a convolution through any,
    as its tensors keep their dims."""
    product = kernel.group.product
    if product is None:
        return []
    bases = [(f.of, f.of if product.relation else aliased(f.of)) for f in product.factors]
    stored = _before(kernel, plan)
    return [
        x for x, base in bases if base not in stored and not isinstance(base, (RegionInput, ConstantValue))
    ]


def _is_estimated(kernel: RegionKernel, work: Workload) -> bool:
    """Whether estimates decide: of a convolution they are of its layouts."""
    product = kernel.group.product
    return product is not None and (product.relation is None or isinstance(work, Surrounded))


def _written_apart(kernel: RegionKernel, plan: FusionPlan, seen: Sequence[Piece]) -> Workload:
    """The product alone, its factors in memory. Raises TransconvError."""
    product, work = kernel.group.product, plain(kernel.workload)
    assert product is not None
    if isinstance(work, Surrounded):
        factors = zip(work.prop.operands, product.factors, strict=True)
        last = _features_last(work.problem, [name for name, f in factors if f.of in seen])
        return ConvWorkload(last, work.prop)
    strides, laid = held(kernel.group, plan), features_last if product.prop else dense_strides
    sizes = [n for _, n in product.axes if isinstance(n, SymbolicSize)]
    found = Writer(
        kernel.group,
        lambda x: laid(x.shape) if x in seen else strides(x),
        known=sizes[0].known if sizes else Known(),
    ).written()
    return plain(Alone(program(found.text).compute))


def _features_last(problem: ConvProblem, names: Collection[str]) -> ConvProblem:
    """The problem with the features of some tensors last."""
    specs = problem.specs
    for name in names:
        shape = problem.shapes[name]
        order = (0, *range(2, len(shape)), 1)
        specs[name] = replace(specs[name], layout=Layout.dense(specs[name].dtype, shape, order))
    return replace(problem, src=specs["src"], wei=specs["wei"], dst=specs["dst"])


def written(piece: Piece, stored: set[Piece], rates: Price) -> float:
    """Microseconds of the kernel that writes a value; of a concatenation, of those that copy what no
    kernel stores there."""
    if isinstance(piece, PiecewiseIndex) and piece.along is not None:
        return sum(written(p.of, stored, rates) for p in piece.parts if p.of not in stored)
    read = sum(x.bytes for x in sources(piece, stored))
    return rates.kernel(read + piece.bytes, instructions(piece, stored) * like(piece.size), None)


def _schedules(work: Workload, target: Target) -> bool:
    """Whether a product whose factors are computed has a schedule: not every one has."""
    try:
        return all(not c.prologue or shortlist(1, c, target, work) for c in work.computations)
    except TransconvError:
        return False


# -- another product -----------------------------------------------------------------------------------


def why_instead(kernel: RegionKernel, plan: FusionPlan, rates: Price, allowed: str) -> str:
    """Why a product should be another one (lowerings/upsampling.py), of UPSAMPLING what is ``allowed``;
    empty if it should not, or if there is none."""
    product, work = kernel.group.product, plain(kernel.workload)
    if (
        product is None
        or product.instead is None
        or not isinstance(work, Surrounded)
        or (allowed == "never" or (allowed == "auto" and product.instead.rounds))
    ):
        return ""
    other = product.instead.product
    large = written_first(kernel, plan, rates)
    small = _microseconds(_small(other, work.problem), rates) + read_behind(kernel, plan, rates)
    if inf in (large, small):
        return ""
    large = min(large, _microseconds(work, rates))
    small += written_for(other, kernel, plan, rates)
    return TAPS_CHEAPER.format(small, large) if small < large else ""


def written_for(other: ProductSum, kernel: RegionKernel, plan: FusionPlan, rates: Price) -> float:
    """Microseconds that write the factors of another product which are not in memory, nor stored by the
    kernel that computes them."""

    def is_there(piece: Piece) -> bool:
        return (
            piece in plan.stored
            or isinstance(piece, (RegionInput, ConstantValue))
            or bool(
                piece.operands and all(x in plan.stored and x.shape == piece.shape for x in piece.operands)
            )
        )

    stored = _before(kernel, plan)
    return sum(written(f.of, stored, rates) for f in other.factors if not is_there(f.of))


def _small(product: ProductSum, problem: ConvProblem) -> ConvWorkload:
    """The other convolution, its image and weight with features last, its result as that one's."""
    assert product.relation is not None
    found, prop = product.relation
    return ConvWorkload(replace(_features_last(found, prop.operands), src=problem.specs["dst"]), prop)


# -- reductions of its result --------------------------------------------------------------------------


def why_again(kernel: RegionKernel, rates: Price) -> str:
    """Why the result of a product's kernel should be read again; empty if its statistics leave with it, or
    if it has none."""
    group = kernel.group
    if not group.statistics or group.product is None:
        return ""
    if (leaves := _microseconds(kernel.workload, rates)) == inf:
        return REFUSED
    if _surely_leave(kernel, rates):
        return ""
    apart = _microseconds(plain(kernel.workload), rates) + _reading(kernel, rates)
    return DEARER.format(leaves, apart) if apart < leaves else ""


def _surely_leave(kernel: RegionKernel, rates: Price) -> bool:
    """Whether a product with its statistics takes no longer than any plain one and a kernel that reads the
    result, without a look at schedules of the plain one."""
    product, leaves = kernel.group.product, _microseconds(kernel.workload, rates)
    return product is not None and leaves <= rates.least(product) + _reading(kernel, rates)


def _reading(kernel: RegionKernel, rates: Price) -> float:
    """Microseconds of a kernel that reads the result of a product again for its statistics; 0 where one
    does anyway."""
    found = kernel.group.statistics.items()
    ends = {s.of for p, s in found if not (s.applied and _is_held(p, s))}
    read = {t for x in ends for t in sources(x, {*kernel.stored, *kernel.given})}
    return rates.kernel(SUMMED * sum(t.bytes for t in read), 0.0, None) if read else 0.0


def _is_held(piece: Piece, found: Statistic) -> bool:
    """Whether registers hold what is reduced to one place: a kernel that applies it reads it once."""
    return bool(like(found.of.size) <= HELD * like(piece.size))


# -- results in the place of operands ------------------------------------------------------------------


def in_place(
    kernel: RegionKernel,
    done: Collection[Piece],
    memory: dict[Piece, SizedTensor],
    placed: Collection[Piece],
) -> dict[int, int]:
    """Of results, by their places among what is stored, the places of the operands that they replace,
    among what is given. ``done``: what nothing needs behind the kernel; ``memory``: how that lies of it
    which kernels have stored; ``placed``: what lies in another value's memory."""
    if kernel.group.kind != "map" or kernel.sized is not None or not isinstance(kernel.asked, str):
        return {}
    found = program(kernel.asked)
    if len(kernels_of(found.compute)) != 1 or any(isinstance(s, Reduction) for s in found.compute.steps):
        return {}
    places: dict[int, int] = {}
    for i, into in enumerate(found.stored):
        for j, (x, piece) in enumerate(zip(found.given, kernel.given, strict=True)):
            own = memory.get(piece)
            if (
                own == kernel.memory[i]
                and piece in done
                and not isinstance(piece, RegionInput)
                and piece not in placed
                and kernel.stored[i] not in placed
                and j not in places.values()
                and _alike(found.compute, x, into)
            ):
                places[i] = j
                break
    return places


def _alike(compute: Compute, read: str, stored: str) -> bool:
    """Whether a tensor is read where another one is stored, and nowhere else."""
    views = [*(r.view for r in compute.reads), *(w.view for w in compute.writes)]
    seen = [([d.coord for d in v.dims], v.mask()) for v in views if v.tensor.name in (read, stored)]
    return len(seen) == 2 and seen[0] == seen[1] and seen[0][1] is TRUE


def replacing(
    region: Sequence[RegionKernel], last: Sequence[Collection[Piece]], placed: Collection[Piece] = ()
) -> list[dict[int, int]]:
    """``in_place`` of each kernel of a region."""
    memory: dict[Piece, SizedTensor] = {}
    found = []
    for kernel, done in zip(region, last, strict=True):
        found.append(in_place(kernel, done, memory, placed))
        memory |= zip(kernel.stored, kernel.memory, strict=True)
    return found

"""Whether a product reads its factors through views and maps, or a kernel before it writes them.

The estimates of the cost room decide: of the product as it is written, and of the plain one, which may
have boxes and tuned rows that views rule out, with the time to write its factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from transconv.compute import Alone, Workload
from transconv.conv import ConvProblem, ConvWorkload, Surrounded
from transconv.functional.calls.compiled_launch import program
from transconv.graph.fusion import fusion_cost
from transconv.graph.fusion.epilogue_reductions import plain
from transconv.graph.fusion.fusion_cost import Price
from transconv.graph.fusion.group_text import Writer
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import (
    ConstantValue,
    Piece,
    PiecewiseIndex,
    ProductSum,
    RegionInput,
)
from transconv.graph.fusion.memory_order import aliased, memory_of
from transconv.graph.fusion.plan import FusionPlan
from transconv.graph.regions.region_kernel import RegionKernel
from transconv.graph.sizes import Length, like
from transconv.ir import Layout
from transconv.runtime import estimated
from transconv.selection import shortlist
from transconv.support import TransconvError
from transconv.target import Target

REFUSED = "no schedule of the product computes its factor, too"
DEARER = "is seen through views by every tile: {:.3g} us, written and read in boxes {:.3g} us"


def why_apart(kernel: RegionKernel, plan: FusionPlan, target: Target, rates: Price) -> str:
    """Why the factors of a product's kernel should be written first; empty if they should not, or are."""
    work, seen = plain(kernel.workload), _seen(kernel, plan)
    if not seen:
        return ""
    if not _schedules(work, target):
        return REFUSED
    if not _is_estimated(kernel, work):
        return ""
    try:
        through = estimated(work, rates.target)
        if through <= least_apart(kernel, plan, rates):
            return ""
        written = written_first(kernel, plan, rates)
    except TransconvError:
        return ""
    return DEARER.format(through, written) if written < through else ""


def written_first(kernel: RegionKernel, plan: FusionPlan, rates: Price) -> float:
    """Microseconds of the plain product of a kernel, and of those that write its factors. Raises
    TransconvError."""
    seen = _seen(kernel, plan)
    found = estimated(_written_apart(kernel, plan, seen), rates.target)
    stored = {*plan.stored} - {*kernel.group.stores}
    return found + read_behind(kernel, plan, rates) + sum(written(x, stored, rates) for x in seen)


def least_apart(kernel: RegionKernel, plan: FusionPlan, rates: Price) -> float:
    """Microseconds below which ``written_first`` is not, without a look at schedules of the product."""
    assert kernel.group.product is not None
    stored = {*plan.stored} - {*kernel.group.stores}
    return rates.least(kernel.group.product) + read_behind(kernel, plan, rates) + sum(
        written(x, stored, rates) for x in _seen(kernel, plan))


def read_behind(kernel: RegionKernel, plan: FusionPlan, rates: Price) -> float:
    """Microseconds that a product's kernel takes for what it reads behind the sum."""
    assert kernel.group.product is not None
    stored = {*plan.stored} - {*kernel.group.stores}
    own = {x for f in kernel.group.product.factors for x in fusion_cost.sources(f.of, stored)}
    return rates.moved(sum(x.bytes for x in {*kernel.given} - own))


def weighed(
    kernel: RegionKernel, plan: FusionPlan, rates: Price, known: Set[Workload]
) -> tuple[Workload, ...]:
    """What ``why_apart`` estimates: the product, and when this is ``known`` the plain one, where that may
    decide."""
    seen, work = _seen(kernel, plan), plain(kernel.workload)
    if not seen or not _is_estimated(kernel, work):
        return ()
    if work not in known:
        return (work,)
    try:
        if estimated(work, rates.target) <= least_apart(kernel, plan, rates):
            return ()
        return (_written_apart(kernel, plan, seen),)
    except TransconvError:
        return ()


def _seen(kernel: RegionKernel, plan: FusionPlan) -> list[Piece]:
    """The factors of a product that its kernel computes or sees through views; a convolution through any,
    as its tensors keep their dims."""
    product = kernel.group.product
    if product is None:
        return []
    bases = [(f.of, f.of if product.relation else aliased(f.of)) for f in product.factors]
    return [
        x
        for x, base in bases
        if base not in plan.stored and not isinstance(base, (RegionInput, ConstantValue))
    ]


def _is_estimated(kernel: RegionKernel, work: Workload) -> bool:
    """Whether estimates decide: they are of numbers, and of a convolution's layouts."""
    product = kernel.group.product
    return kernel.sized is None and product is not None and (
        product.relation is None or isinstance(work, Surrounded))


def held(group: FusionGroup, plan: FusionPlan) -> Callable[[Piece], tuple[Length, ...] | None]:
    """The strides of what is in memory for a group; None for what it computes."""
    def strides(piece: Piece) -> tuple[Length, ...] | None:
        if isinstance(piece, RegionInput):
            return piece.strides
        stored = plan.stored.get(piece)
        return None if stored is None or stored.number >= group.number else plan.strides(piece)

    return strides


def _written_apart(kernel: RegionKernel, plan: FusionPlan, seen: Sequence[Piece]) -> Workload:
    """The product alone, its factors in memory. Raises TransconvError."""
    product, work = kernel.group.product, plain(kernel.workload)
    assert product is not None
    if isinstance(work, Surrounded):
        return ConvWorkload(_features_last(work, product, seen), work.prop)
    strides = held(kernel.group, plan)
    found = Writer(kernel.group, lambda x: memory_of(x) if x in seen else strides(x)).written()
    return plain(Alone(program(found.text).compute))


def _features_last(work: Surrounded, product: ProductSum, seen: Sequence[Piece]) -> ConvProblem:
    """The problem, where factors that are written have their features last."""
    specs = work.problem.specs
    for name, factor in zip(work.prop.operands, product.factors, strict=True):
        shape = work.problem.shapes[name]
        if factor.of in seen:
            order = (0, *range(2, len(shape)), 1)
            specs[name] = replace(specs[name], layout=Layout.dense(specs[name].dtype, shape, order))
    return replace(work.problem, src=specs["src"], wei=specs["wei"], dst=specs["dst"])


def written(piece: Piece, stored: set[Piece], rates: Price) -> float:
    """Microseconds of the kernel that writes a value; of a concatenation, of those that copy what no
    kernel stores there."""
    if isinstance(piece, PiecewiseIndex) and piece.along is not None:
        return sum(written(p.of, stored, rates) for p in piece.parts if p.of not in stored)
    read = sum(x.bytes for x in fusion_cost.sources(piece, stored))
    return rates.kernel(read + piece.bytes, fusion_cost.work(piece, stored) * like(piece.size), None)


def _schedules(work: Workload, target: Target) -> bool:
    """Whether a product whose factors are computed has a schedule: not every one has."""
    try:
        return all(not c.prologue or shortlist(1, c, target, work) for c in work.computations)
    except TransconvError:
        return False

"""Whether a convolution of an upsampled image is computed as one of the small image
(lowerings/upsampling.py).

The estimates of the cost room decide: of the product that sees the large image through views, of the plain
one with the time to write that image, and of the transposed one with the time to add up its weight.
"""

from __future__ import annotations

from dataclasses import replace

from transconv.conv import ConvProblem, ConvWorkload, Surrounded
from transconv.graph.fusion.epilogue_reductions import plain
from transconv.graph.fusion.fusion_cost import Price
from transconv.graph.fusion.index_ir import ConstantValue, Piece, ProductSum, RegionInput
from transconv.graph.fusion.plan import FusionPlan
from transconv.graph.fusion.written_factors import read_behind, written, written_first
from transconv.graph.regions.region_kernel import RegionKernel
from transconv.ir import Layout
from transconv.runtime import estimated
from transconv.support import TransconvError

UPSAMPLING = ("auto", "always", "never")
"""Whether such convolutions may become transposed ones: where they round no more often than torch, or even
then, or not at all."""
CHEAPER = "its taps of one element are added up: {:.3g} us, of the large image {:.3g} us"


def why_instead(kernel: RegionKernel, plan: FusionPlan, rates: Price, allowed: str) -> str:
    """Why a product should be another one; empty if it should not, or if there is none."""
    product, work = kernel.group.product, plain(kernel.workload)
    if product is None or product.instead is None or not isinstance(work, Surrounded) or (
            allowed == "never" or allowed == "auto" and product.instead.rounds):
        return ""
    other = product.instead.product
    try:
        large = written_first(kernel, plan, rates)
        small = estimated(_plain(other, work.problem), rates.target) + read_behind(kernel, plan, rates)
    except TransconvError:
        return ""
    try:
        large = min(large, estimated(work, rates.target))
    except TransconvError:
        pass
    stored = {*plan.stored} - {*kernel.group.stores}
    small += sum(written(f.of, stored, rates) for f in other.factors if not _is_there(f.of, plan))
    return CHEAPER.format(small, large) if small < large else ""


def weighed(kernel: RegionKernel) -> tuple[ConvWorkload, ...]:
    """What ``why_instead`` estimates."""
    product, work = kernel.group.product, plain(kernel.workload)
    if product is None or product.instead is None or not isinstance(work, Surrounded):
        return ()
    return (_plain(product.instead.product, work.problem),)


def _is_there(piece: Piece, plan: FusionPlan) -> bool:
    """Whether a value is in memory, or is stored by the kernel that computes it."""
    return piece in plan.stored or isinstance(piece, (RegionInput, ConstantValue)) or bool(
        piece.operands and all(x in plan.stored and x.shape == piece.shape for x in piece.operands))


def _plain(product: ProductSum, problem: ConvProblem) -> ConvWorkload:
    """The other convolution, its image and weight with features last, its result as that one's."""
    assert product.relation is not None
    found, prop = product.relation
    specs = found.specs
    for name in prop.operands:
        shape = found.shapes[name]
        order = (0, *range(2, len(shape)), 1)
        specs[name] = replace(specs[name], layout=Layout.dense(specs[name].dtype, shape, order))
    return ConvWorkload(replace(found, src=problem.specs["dst"], wei=specs["wei"], dst=specs["dst"]), prop)

"""Whether a product reads its factors through views and maps, or a kernel before it writes them.

The estimates of the cost room decide: of the product as it is written, and of the plain one, which may
have boxes and tuned rows that views rule out, with the time to write its factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv.compute import Workload
from transconv.conv import ConvProblem, ConvWorkload, Surrounded
from transconv.errors import TransconvError
from transconv.graph import price
from transconv.graph.kernel import Kernel
from transconv.graph.leaving import plain
from transconv.graph.pieces import Chosen, Constant, Piece, Product, Source
from transconv.graph.plan import Plan
from transconv.graph.price import Price
from transconv.graph.sizes import like
from transconv.ir import Layout
from transconv.runtime import estimated
from transconv.selection import shortlist
from transconv.target import Target

REFUSED = "no schedule of the product computes its factor, too"
DEARER = "is seen through views by every tile: {:.3g} us, written and read in boxes {:.3g} us"


def why_apart(kernel: Kernel, plan: Plan, target: Target, rates: Price) -> str:
    """Why the factors of a product's kernel should be written first; empty if they should not, or are."""
    product, work = kernel.group.product, plain(kernel.workload)
    seen = _seen(kernel, plan)
    if product is None or not seen:
        return ""
    if not _schedules(work, target):
        return REFUSED
    if not isinstance(work, Surrounded):
        return ""
    try:
        through = estimated(work, rates.target)
        written = written_first(kernel, plan, rates)
    except TransconvError:
        return ""
    return DEARER.format(through, written) if written < through else ""


def written_first(kernel: Kernel, plan: Plan, rates: Price) -> float:
    """Microseconds of the plain convolution of a kernel, and of those that write its factors. Raises
    TransconvError."""
    product, work, seen = kernel.group.product, plain(kernel.workload), _seen(kernel, plan)
    assert product is not None and isinstance(work, Surrounded)
    found = estimated(ConvWorkload(_written_apart(work, product, seen), work.prop), rates.target)
    stored = {*plan.stored} - {*kernel.group.stores}
    return found + read_behind(kernel, plan, rates) + sum(written(x, stored, rates) for x in seen)


def read_behind(kernel: Kernel, plan: Plan, rates: Price) -> float:
    """Microseconds that a product's kernel takes for what it reads behind the sum."""
    assert kernel.group.product is not None
    stored = {*plan.stored} - {*kernel.group.stores}
    own = {x for f in kernel.group.product.factors for x in price.sources(f.of, stored)}
    return rates.moved(sum(x.bytes for x in {*kernel.given} - own))


def weighed(kernel: Kernel, plan: Plan) -> tuple[Workload, ...]:
    """What ``why_apart`` estimates."""
    product, work, seen = kernel.group.product, plain(kernel.workload), _seen(kernel, plan)
    if product is None or not seen or not isinstance(work, Surrounded):
        return ()
    try:
        return work, ConvWorkload(_written_apart(work, product, seen), work.prop)
    except TransconvError:
        return ()


def _seen(kernel: Kernel, plan: Plan) -> list[Piece]:
    """The factors of a product that its kernel computes or sees through views."""
    factors = kernel.group.product.factors if kernel.group.product else ()
    return [f.of for f in factors if f.of not in plan.stored and not isinstance(f.of, (Source, Constant))]


def _written_apart(work: Surrounded, product: Product, seen: Sequence[Piece]) -> ConvProblem:
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
    if isinstance(piece, Chosen) and piece.along is not None:
        return sum(written(p.of, stored, rates) for p in piece.parts if p.of not in stored)
    read = sum(x.bytes for x in price.sources(piece, stored))
    return rates.kernel(read + piece.bytes, price.work(piece, stored) * like(piece.size), None)


def _schedules(work: Workload, target: Target) -> bool:
    """Whether a product whose factors are computed has a schedule: not every one has."""
    try:
        return all(not c.prologue or shortlist(1, c, target, work) for c in work.computations)
    except TransconvError:
        return False

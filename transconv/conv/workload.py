"""ConvWorkload: one direction of a convolution, the subject of plans and tuned rows.

Rows of one group have the same order in memory. Problems have a distance if they have the same taps and
strides, are both dense, both grouped or both depthwise, and are both dilated or both not. The distance is
the weighted sum of |log2| of the ratios of their sizes.

What torch computes in place of a convolution's kernel, as lines of Python for files that check
themselves (``Workload.torch_text``). They use ``torch`` and its functional module as ``F``."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2, prod
from typing import TYPE_CHECKING

from transconv.compute import OPS, Compute, SampleOutcome, TorchText, Workload, nearest, why_not_any_size
from transconv.conv.compensation import SUMS, why_not_zeros
from transconv.conv.conv_problem import ConvProblem, Prop, TensorSpec
from transconv.conv.descriptor import why_not_multiplied, write_tags
from transconv.conv.epilogue import Epilogue
from transconv.conv.relation import any_size, any_tensors, computes, marked, spelled
from transconv.conv.spotcheck import examine
from transconv.ir import DType, Layout, Tensor, Values
from transconv.runtime import register_reader
from transconv.support import ProblemError, TransconvError, Unsupported

if TYPE_CHECKING:
    import torch


FEW = 16  # channels; problems with fewer are compared only if the number is equal
OTHER_TYPE = 0.25  # the distance of other element types, such as f16 and bf16
MEANS = {
    Prop.FWD: "the convolution",
    Prop.BWD_D: "the gradient of its input, or a transposed convolution",
    Prop.BWD_W: "the gradient of its weight",
}
LEAST = 0.01  # the smallest distance of different problems
LAST, FIRST = "axb", "abx"  # the place of features in memory


@dataclass(frozen=True)
class ConvWorkload(Workload):
    """One direction of a problem, with its epilogue. ``open``: the sizes that are arguments of kernels
    (mb, id, ih, iw); the problem's own sizes are the examples then."""

    problem: ConvProblem
    prop: Prop
    epilogue: Epilogue = Epilogue()
    open: frozenset[str] = frozenset()

    prefix = "conv_"

    @property
    def direction(self) -> str:
        return self.prop.value

    @property
    def options(self) -> tuple[str, ...]:
        return "--prop", self.direction

    @property
    def behind(self) -> str:
        return str(self.epilogue)

    @property
    def kind(self) -> str:
        return self.epilogue.kind

    @functools.cached_property
    def computations(self) -> tuple[Compute, ...]:
        if self.open:
            return any_size(self.problem, self.prop, self.open, self.epilogue)
        return computes(self.problem, self.prop, self.epilogue)

    @property
    def meaning(self) -> str:
        behind = f", then {self.epilogue}" if self.epilogue else ""
        return f"{self.result} is {MEANS[self.prop]}{behind}."

    @property
    def terms(self) -> int:
        """How many products one element of the result sums at most."""
        p = self.problem
        if self.prop is Prop.BWD_W:
            return p.mb * prod(p.o)
        return prod(p.k) * (p.icg if self.prop is Prop.FWD else p.ocg)

    @property
    def math(self) -> str:
        return self.problem.math

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        p, around = self.problem, self.problem.spatial
        dims = {
            "src": ("mb", "ic", *(f"i{n}" for n in around)),
            "wei": ("oc", "ic", *(f"k{n}" for n in around)),
            "dst": ("mb", "oc", *(f"o{n}" for n in around)),
        }
        made = {n: Tensor(n, dims[n], p.shapes[n], spec.layout) for n, spec in p.specs.items()}
        if self.open:
            made = any_tensors(p, self.open)
        zeros = self.epilogue.zeros.tensors(self.problem)
        return (*made.values(), *self.epilogue.tensors(made[self.result]), *zeros)

    @property
    def result(self) -> str:
        return self.prop.result

    def refuse(self) -> None:
        """Raise Unsupported for operands of types that are not multiplied by one another, ProblemError for
        a result whose elements overlap."""
        computable(self.problem, self.prop)
        if reason := why_not_zeros(self.epilogue.zeros, self.problem, self.prop, bool(self.open)):
            raise Unsupported("zero_points", reason)
        writable(self.problem, self.prop)
        for compute in self.computations if self.open else ():
            if reason := why_not_any_size(compute):
                raise Unsupported("sizes:refused", f"{compute.name}: {reason}")

    def of_any_batch(self) -> tuple[Workload, Values]:
        p = self.problem
        if self.open:
            return self, {}
        if self.epilogue.random:
            raise Unsupported(
                "invariant:form", f"{self.title}: it rounds at random, by an element's place in the batch"
            )
        if why := why_not_dense(p):
            raise Unsupported("invariant:layout", f"{self.title}: {why}")
        try:
            made = replace(self, problem=_outermost(p).at(2, p.i, p.o), open=frozenset({"mb"}))
            made = made.with_batch(nearest(made.computations, p.mb))
            made.refuse()
        except ProblemError as error:
            raise Unsupported("invariant:refused", str(error)) from None
        return made, {"MB": p.mb}

    def with_batch(self, count: int) -> ConvWorkload:
        p = self.problem
        return replace(self, problem=p.at(count, p.i, p.o))

    @property
    def shape_text(self) -> str:
        return self.problem.shape_text

    @property
    def title(self) -> str:
        return f"{self} {self.prop} {self.epilogue}".rstrip()

    def __str__(self) -> str:
        return spelled(self.problem, self.open) if self.open else str(self.problem)

    # -- tuned rows ------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return str(replace(self, problem=replace(self.problem, name="")) if self.problem.name else self)

    def group(self, machine: str) -> str:
        """Rows are about given sizes, also where sizes are arguments."""
        return _group(usual(self.problem), self.direction, machine)

    def like(self, text: str) -> ConvWorkload | None:
        found = _problem(text)
        return None if found is None else replace(self, problem=found[0], open=found[1])

    def distance(self, other: Workload) -> float | None:
        if not isinstance(other, ConvWorkload) or _bridged(other.problem) != _bridged(self.problem):
            return None
        one, two = usual(self.problem), usual(other.problem)
        return 0.0 if one == two and self.open == other.open else max(_distance(one, two), LEAST)

    def innermost(self) -> ConvWorkload | None:
        if self.open:
            return None
        twin = self.problem.with_layout("axb")
        return None if twin == usual(self.problem) else replace(self, problem=twin)

    # -- results ---------------------------------------------------------------------------------

    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> SampleOutcome:
        problem = self.of_call(tensors) if self.open else self.problem
        return examine(problem, self.prop, self.epilogue, tensors, result)

    def prepares(self, compute: Compute) -> bool:
        return SUMS in compute.c.tensor.name

    def of_call(self, tensors: dict[str, torch.Tensor]) -> ConvProblem:
        """The problem of a call, where sizes are arguments."""
        shapes = {n: tuple(tensors[n].shape) for n in self.problem.specs}
        return self.problem.at(shapes["src"][0], shapes["src"][2:], shapes["dst"][2:])

    @property
    def torch_text(self) -> TorchText:
        p = self.problem
        return TorchText(
            self.prop.operands,
            self.terms,
            2.0 ** -(23 if p.acc.bits == 32 else 52),
            tuple(program(p, self.prop)),
            tuple(continued(self.epilogue, p.ndims)),
        )

    def part_of(self, at: Sequence[int]) -> tuple[int, ...]:
        """The stride phase of an element of src."""
        return tuple(x % s for x, s in zip(at[2:], self.problem.stride, strict=True))


def why_not_dense(problem: ConvProblem) -> str:
    """Why a problem of other images has tensors that lie otherwise: they have gaps, or blocks; else
    empty."""
    dense = problem.at(problem.mb, problem.i, problem.o).specs
    for name, spec in problem.specs.items():
        shape, strides = problem.shapes[name], spec.layout.strides()
        wanted = dense[name].layout.strides()
        if strides is None or wanted is None or spec.layout.offset:
            return f"{name} lies as {spec.layout}; expected a dense tensor"
        if any(n > 1 and own != of for n, own, of in zip(shape, strides, wanted, strict=True)):
            return f"{name} has gaps between its elements; expected a dense tensor"
    return ""


def _outermost(problem: ConvProblem) -> ConvProblem:
    """The problem of one image with the images outermost, as those of several have it, whatever stride
    torch says of a dim of one; others as they are."""
    if problem.mb > 1:
        return problem

    def moved(spec: TensorSpec) -> TensorSpec:
        blocks = sorted(spec.layout.blocks, key=lambda b: b.dim != 0)
        return replace(spec, layout=replace(spec.layout, blocks=tuple(blocks)))

    return replace(problem, src=moved(problem.src), dst=moved(problem.dst))


def computable(problem: ConvProblem, prop: Prop) -> None:
    """Raise Unsupported for operands of types that no kernel multiplies."""
    a, b = (problem.specs[name].dtype for name in prop.operands)
    if reason := why_not_multiplied(a, b):
        raise Unsupported(f"dtype:{a}:{b}", f"{' and '.join(prop.operands)}: {reason}")
    result = problem.specs[prop.result].dtype
    if a.kind != b.kind and result.kind == "int":
        raise Unsupported(
            f"dtype:{a}:{b}:{result}",
            f"{prop.result}: sums of floats by integers are floats, not {result}",
        )


def writable(problem: ConvProblem, prop: Prop) -> None:
    """Raise ProblemError for a result of which two elements share an offset. Operands may overlap."""
    layout = getattr(problem, prop.result).layout
    if layout.overlaps:
        dense = Layout.dense(layout.dtype, problem.shapes[prop.result]).strides() or ()
        raise ProblemError(
            f"problem '{problem}': {prop} computes {prop.result}, elements of which share a place in the "
            f"layout {layout}; expected a place for each, such as strides({','.join(map(str, dense))})"
        )


@functools.lru_cache(maxsize=4096)
@functools.lru_cache(maxsize=4096)  # of rows, with which each choice compares
def usual(p: ConvProblem) -> ConvProblem:
    """The problem as tuned rows have it. A dim of one element moves nothing, and torch says any stride of
    it: tensors that lie with features last but for such strides do so here, all of them or else each, and
    so do contiguous ones."""
    each = [(spec, p.shapes[name]) for name, spec in p.specs.items()]
    orders = [[d for d in (LAST, FIRST) if _lies(spec.layout, shape, d)] for spec, shape in each]
    shared = [d for d in (LAST, FIRST) if all(d in own for own in orders)]
    src, wei, dst = (
        replace(spec, layout=_dense(spec.layout, shape, (shared or own)[0])) if own else spec
        for (spec, shape), own in zip(each, orders, strict=True)
    )
    return replace(p, src=src, wei=wei, dst=dst)


def _lies(layout: Layout, shape: Sequence[int], order: str) -> bool:
    """Whether elements lie as in a dense tensor in an order."""
    strides, dense = layout.strides(), _dense(layout, shape, order).strides()
    if strides is None or dense is None or layout.offset:
        return False
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, dense, strict=True))


def _dense(layout: Layout, shape: Sequence[int], order: str) -> Layout:
    last = (0, *range(2, len(shape)), 1)
    return Layout.dense(layout.dtype, shape, last if order == LAST else None)


def _group(problem: ConvProblem, direction: str, machine: str) -> str:
    """The name of a group: machine, number of dims, direction, and a digest that also has the memory
    order, the kinds and bits of the types, and the precision of f32."""
    tags = write_tags([s.layout for s in problem.specs.values()], tuple(problem.shapes.values()))
    sizes = ":".join(f"{t.kind}{t.bits}" for t in problem.dtypes)
    math = problem.math if "float32" in sizes else ""
    text = f"{problem.ndims}d {direction} {sizes} {tags or 'nchw'} {math}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", f"{machine}_{problem.ndims}d_{direction}")
    return f"{plain[:80]}_{digest}"


def _bridged(p: ConvProblem) -> tuple[object, ...]:
    """Properties that must be equal for two problems to have a distance."""
    groups = "dense" if p.g == 1 else "depthwise" if p.icg == p.ocg == 1 else "grouped"
    spread = tuple(d > 1 for d in p.dilation)
    return p.k, p.stride, spread, groups, min(p.icg, FEW), min(p.ocg, FEW)


def _distance(one: ConvProblem, other: ConvProblem) -> float:
    """The distance of two comparable problems. Images and positions weigh half as much as channels and
    groups, because a tile covers a small part of all positions."""

    def sizes(p: ConvProblem) -> tuple[float, ...]:
        return p.mb * prod(p.o), p.o[-1], p.icg, p.ocg, p.g

    weights = (0.5, 0.5, 1.0, 1.0, 1.0)
    pairs = zip(sizes(one), sizes(other), weights, strict=True)
    found = sum(w * abs(log2(max(a, 1) / max(b, 1))) for a, b, w in pairs)
    return found + (OTHER_TYPE if one.dtypes != other.dtypes else 0.0)


@register_reader
def _read(text: str, direction: str, behind: str) -> Workload | None:
    """The workload of a row of the database; None if the text is not that of a convolution."""
    found = _problem(text)
    try:
        return found and ConvWorkload(found[0], Prop(direction), Epilogue.parse(behind), found[1])
    except (TransconvError, ValueError, OverflowError):
        return None


@functools.lru_cache(maxsize=4096)  # each layer looks for its neighbours among the same rows
def _problem(text: str) -> tuple[ConvProblem, frozenset[str]] | None:
    """The problem of a text, and the sizes in it that are arguments; None if it cannot be read."""
    try:
        plain, names = marked(text)
        return ConvProblem.parse(plain), names
    except (TransconvError, ValueError, OverflowError):
        return None


def program(p: ConvProblem, prop: Prop) -> Iterator[str]:
    """The definitions of ``product(a, b)``, in f64, and of what it calls."""
    yield "def product(a, b):"
    yield '    """What torch computes in f64."""'
    if prop is Prop.FWD:
        yield "    return convolved(a, b)"
    else:
        given = ("{0}", "b") if prop is Prop.BWD_D else ("a", "{0}")
        grad = "a" if prop is Prop.BWD_D else "b"
        made = prop.result
        yield (
            f"    {made} = torch.zeros({p.shapes[made]}, dtype=torch.float64, device=a.device, "
            "requires_grad=True)"
        )
        yield (
            f"    return torch.autograd.grad(convolved({', '.join(given).format(made)}), {made}, "
            f"{grad})[0]"
        )
    pads = [n for low, high in reversed(list(zip(p.pad_lo, p.pad_hi, strict=True))) for n in (low, high)]
    yield ""
    yield ""
    yield "def convolved(src, wei):"
    yield (
        f"    src = F.pad(src, {pads})  # low and high of each axis, the last one first; below 0: left out"
    )
    yield (
        f"    return F.conv{p.ndims}d(src, wei, stride={p.stride}, dilation={p.dilation}, groups={p.g})"
    )


def continued(epilogue: Epilogue, ndims: int) -> Iterator[str]:
    """The lines that continue ``want`` and ``bound`` with what follows on the sums. Raises Unsupported for
    a registered operation whose function of torch has no name, and for results rounded at random."""
    if not epilogue:
        return
    if epilogue.random:
        raise Unsupported(
            "export:rounding",
            "results that are rounded at random: files that check themselves round to nearest",
        )
    yield "acc = want, bound"
    for name in dict.fromkeys(o.name for o in epilogue.operands):
        shaped = f".view({(-1, *[1] * ndims)})" if name == "bia" else ""
        yield f"{name} = {name}.double(){shaped}, 0.0"
    for i, step in enumerate(epilogue.function.steps):
        row = OPS[step.op]
        if not isinstance(row.torch, str):
            raise Unsupported(
                "export:operation",
                f"the operation '{step.op}' has a function of torch without a name, which a file could "
                "not import; register it by its dotted name",
            )
        numbers = (*step.numbers, *row.defaults[len(step.numbers) :])
        given = "".join([*(f", {n!r}" for n in numbers), *(f", {k}={v!r}" for k, v in row.options)])
        names = ", ".join("xyz"[: row.arity])
        yield (
            f"value_{i} = applied(lambda {names}: {row.torch}({names}{given}), "
            f"{4 if row.exact else 32} * eps, {', '.join(map(_said, step.values))})"
        )
    yield f"want, bound = {_said(epilogue.function.result)}"


def _said(ref: str | float) -> str:
    """An argument: a pair of a value and of what it may be off."""
    if isinstance(ref, float):
        return f"(torch.full_like(want, {ref!r}), 0.0)".replace("inf", "torch.inf")
    return ref if isinstance(ref, str) else f"value_{ref}"


def bias_sums(dst: TensorSpec, shape: Sequence[int], result: DType) -> str:
    """The computation of a bias' gradient (oc,) of type ``result``: the sums of dst's gradient, of this
    shape (mb, oc, *o), over images and positions."""
    sides = [f"p{i}" for i in range(len(shape) - 2)]
    summed = " ".join(f"{a}={n}" for a, n in zip(("n", *sides), (shape[0], *shape[2:]), strict=True))
    return "\n".join(
        [
            "compute bias_gradient",
            f"    tensor G {dst.dtype} [{', '.join(map(str, shape))}] {dst.layout}",
            f"    tensor B {result} [{shape[1]}]",
            f"    axes   c={shape[1]} | {summed}",
            f"    read   g = G[{', '.join(['n', 'c', *sides])}]",
            f"    store  B[c] = sum(g; {' '.join(['n', *sides])})",
        ]
    )

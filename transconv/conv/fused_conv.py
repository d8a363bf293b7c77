"""A direction of a convolution with what stands before its product and in its epilogue.

Whole graphs write a convolution's relation over other tensors: operands that are read through views or
computed, results that are finished and stored several times. What remains is the product, and with it the
tuned rows of the direction, the roles of its axes and its stride phases, which no text has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from transconv.compute import (
    Alone,
    Compute,
    SampleOutcome,
    Workload,
    axis_steps,
    axis_strides,
    examine,
    kernels,
    nearest,
    of_any_batch,
    one_line,
    parse,
    samples,
    why_not_any_size,
    why_not_lowered,
    with_samples,
)
from transconv.conv.conv_problem import ConvProblem, Prop, TensorSpec
from transconv.conv.relation import computes
from transconv.conv.workload import ConvWorkload
from transconv.ir import Layout, Tensor, Values, View
from transconv.runtime import register_reader
from transconv.support import ScheduleError, TransconvError, Unsupported

if TYPE_CHECKING:
    import torch

NEWLINE = "\n"


@dataclass(frozen=True)
class TuningDirection(ConvWorkload):
    """The direction under whose rows a computation is tuned: with the name that the relation gives it,
    the class of what stands in its epilogue, and the axes of one position that it leaves out."""

    relation: str = ""
    finish: str = ""
    left_out: frozenset[str] = frozenset()

    by_user = False

    @property
    def kind(self) -> str:
        return self.finish

    @property
    def lacks(self) -> frozenset[str]:
        return self.left_out

    def named(self, name: str) -> Compute | None:
        return ConvWorkload.named(self, self.relation)


@dataclass(frozen=True, eq=True)
class Surrounded(Workload):
    """Computations whose products are those of a direction: one, or one for each stride phase. Their
    tensors have the same names."""

    problem: ConvProblem
    prop: Prop
    parts: tuple[Compute, ...]

    by_user = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.problem, self.prop, self.parts))

    @property
    def direction(self) -> str:
        return self.prop.value

    @property
    def computations(self) -> tuple[Compute, ...]:
        return self.parts

    @property
    def math(self) -> str:
        return self.parts[0].math

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        read = [r.view.tensor for c in self.parts for r in c.reads]
        return tuple(dict.fromkeys([*read, *(w.view.tensor for w in self.parts[0].writes)]))

    @property
    def result(self) -> str:
        return self.results[0]

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.view.tensor.name for w in self.parts[0].writes))

    def refuse(self) -> None:
        for compute in self.parts:
            if reason := why_not_lowered(compute):
                raise ScheduleError(f"{compute.name}: {reason}")
            if (several := len(kernels(compute))) > 1:
                raise ScheduleError(f"{compute.name}: it takes {several} kernels; expected one product")

    def of_any_batch(self) -> tuple[Workload, Values]:
        sizes, parts = samples(self.parts[0]), tuple(map(of_any_batch, self.parts))
        made = replace(self, parts=parts).with_batch(nearest(parts, sum(sizes.values())))
        for part in made.parts:
            if reason := why_not_any_size(part):
                raise Unsupported("invariant:refused", f"{part.name}: {reason}")
        return made, sizes

    def with_batch(self, count: int) -> Surrounded:
        p, parts = self.problem, tuple([with_samples(part, count) for part in self.parts])
        return replace(self, problem=p.at(count, p.i, p.o), parts=parts)

    @property
    def shape_text(self) -> str:
        return self.problem.shape_text

    @property
    def title(self) -> str:
        return self.parts[0].name

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(line for c in self.parts for line in str(c).splitlines())

    @cached_property
    def text(self) -> str:
        """The problem and the computations, each as one line."""
        problem = replace(self.problem, name="")
        return "\n".join([str(problem), *(one_line(str(c)) for c in self.parts)])

    def __str__(self) -> str:
        return f"{self.problem} {self.text.partition(NEWLINE)[2]}"

    # -- tuned rows ------------------------------------------------------------------------------

    def about(self, compute: Compute) -> Workload:
        """The direction, whose rows its computations share; itself for copies and sums of parts. What
        combines the parts of statistics is tuned by itself."""
        if compute not in self.parts:
            return Alone(compute) if compute.streams else self
        relation = computes(self.problem, self.prop)[self.parts.index(compute)]
        kind = "" if not compute.finishes else "res" if compute.reads_results else "point"
        known = {x.name for x in compute.axes}
        gone = frozenset(x.name for x in relation.axes if x.name not in known)
        return TuningDirection(self.problem, self.prop, relation=relation.name, finish=kind, left_out=gone)

    def group(self, machine: str) -> str:
        return self._plain.group(machine)

    def innermost(self) -> ConvWorkload | None:
        return self._plain.innermost()

    @property
    def _plain(self) -> ConvWorkload:
        return ConvWorkload(self.problem, self.prop)

    # -- results ---------------------------------------------------------------------------------

    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> SampleOutcome:
        """The phases one after another: the first that is wrong, else all of them."""
        found = [examine(c, tensors) for c in self.parts]
        if wrong := next((f for f in found if f.reason), None):
            return wrong
        return SampleOutcome(
            sum(f.checked for f in found),
            sum(f.telling for f in found),
            all(f.varied for f in found),
            (),
            "",
        )


def surrounded(problem: ConvProblem, prop: Prop, parts: Sequence[Compute]) -> Surrounded:
    """The workload of computations that were written from the relation of a direction, in its order, with
    its axes but perhaps those of one position. The problem's layouts are those of the tensors that are
    read and stored, as far as they have the problem's dims."""
    made, relations = [], computes(problem, prop)
    for compute, relation in zip(parts, relations, strict=True):
        name = compute.name + "".join(f"_{r}" for r in relation.part or ())
        made.append(replace(_of_relation(compute, relation), name=name))
    return Surrounded(_laid_out(problem, prop, made[0], relations[0]), prop, tuple(made))


def _of_relation(compute: Compute, relation: Compute) -> Compute:
    """The computation with what no text has: the roles of its axes, and the stride phase."""
    roles = {x.name: x.role for x in relation.axes}
    axes = tuple(replace(x, role=roles[x.name]) for x in compute.axes)
    return replace(compute, axes=axes, part=relation.part)


@register_reader
def _read(text: str, direction: str, behind: str) -> Workload | None:
    """The workload of a text that another process was handed; None if it is that of another one."""
    problem, *lines = text.split(NEWLINE)
    if not lines or behind:
        return None
    try:
        found, prop = ConvProblem.parse(problem), Prop(direction)
        parts = zip(map(parse, lines), computes(found, prop), strict=True)
        return Surrounded(found, prop, tuple(_of_relation(*pair) for pair in parts))
    except (TransconvError, ValueError, KeyError, OverflowError):
        return None


def _laid_out(problem: ConvProblem, prop: Prop, compute: Compute, relation: Compute) -> ConvProblem:
    """The problem with the layouts of a computation's tensors."""
    specs = problem.specs
    views = zip((compute.a, compute.b, compute.c), (relation.a, relation.b, relation.c), strict=True)
    for name, (view, own) in zip(prop.roles, views, strict=True):
        if view is not None and own is not None:
            strides = _strides(view, compute, own, relation)
            specs[name] = _spec(view.tensor, specs[name], problem.shapes[name], strides)
    return replace(problem, src=specs["src"], wei=specs["wei"], dst=specs["dst"])


def _strides(view: View, compute: Compute, own: View, relation: Compute) -> list[int] | None:
    """How far a view's memory moves with each dim of the problem's tensor, by the axes that the relation
    reads along it; 0 for dims of one position. None where some dim does not move it evenly."""
    far, found = axis_strides(view, compute), []
    for dim, size in zip(own.dims, own.tensor.shape, strict=True):
        steps = {a: n for a, n in axis_steps(dim, relation).items() if n and relation.size(a) > 1}
        each = {far.get(a, 0) / n for a, n in steps.items()} or {0.0}
        if len(each) > 1 or (size > 1 and not min(each) >= 1):
            return None
        found.append(int(each.pop()))
    return found


def _spec(
    tensor: Tensor, known: TensorSpec, shape: tuple[int, ...], moves: Sequence[int] | None
) -> TensorSpec:
    """The layout of a tensor, or a dense one in its order where it has other dims."""
    strides = tensor.layout.strides()
    if strides is not None and tensor.shape == shape:
        return TensorSpec(known.dtype, Layout.from_strides(known.dtype, shape, strides))
    far = moves or strides
    if far is None or len(far) != len(shape):
        return known
    order = sorted(range(len(shape)), key=lambda d: (-far[d], d))
    return TensorSpec(known.dtype, Layout.dense(known.dtype, shape, order))

"""Workload: the computations that one plan computes, with the names of their problem and direction.

Front ends, such as that of convolutions, describe their problems as workloads. The packages that choose
schedules and make plans use only this interface and know no front end. A single computation is a workload,
too.

Common forms of computations are built by functions: a sum of products of two views, a sum of one view, a
copy, and the same computation of several examples, over one axis more.

    read  x = X[m, k]                     read  x = X[example, m, k]
    read  w = W[k]                        read  w = W[k]                   the same for all examples
    store Y[m] = sum(x*w; k)        ->    store Y[example, m] = sum(x*w; k)
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transconv import ir
from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.batch import of_any_batch, samples, with_reference, with_samples
from transconv.compute.compute import Compute
from transconv.compute.kernel_split import kernels, why_not_lowered
from transconv.compute.parser import parse
from transconv.compute.sampled_points import SampleOutcome, examine
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write, fresh, needed, used
from transconv.compute.symbolic_compute import why_not_any_size
from transconv.support import ComputeError, ScheduleError, Unsupported

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TorchText:
    """What torch computes in a workload's place, as lines of Python for files that check themselves.

    ``program`` defines ``product(a, b)``: the sums of products in f64, of tensors named ``factors``, each
    of at most ``terms`` products. ``behind`` continues ``want``, the sums, and ``bound``, what rounding
    explains of their errors, with what follows on them; ``eps`` is the spacing of the sums' type."""

    factors: tuple[str, str]
    terms: int
    eps: float
    program: tuple[str, ...]
    behind: tuple[str, ...] = ()


COMPUTE = "compute_"
"""The prefix of the groups of tuned rows of computations."""


class Workload(ABC):
    """What a plan computes; equal workloads have the same plan. ``str`` of it is used in messages and in
    the digests in kernel names."""

    prefix = ""  # of the names of its kernels

    @property
    def direction(self) -> str:
        """One word that distinguishes the workloads of one text, such as a direction; may be empty."""
        return ""

    @property
    def options(self) -> tuple[str, ...]:
        """The words of a command line that name the workload, beside its text."""
        return ()

    @property
    def behind(self) -> str:
        """The operations on sums before they are stored, as a text that its front end parses."""
        return ""

    @property
    def kind(self) -> str:
        """The class of operations on sums before they are stored. Empty: none; ``point``: arithmetic on
        each element; ``res``: also reads a tensor of the result's shape."""
        return ""

    # -- computations ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def computations(self) -> tuple[Compute, ...]:
        """The computations whose stores together are the result."""

    @property
    @abstractmethod
    def math(self) -> str:
        """The precision of products of f32: tf32, tf32x3 or ieee."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[ir.Tensor, ...]:
        """The tensors of a call, in order."""

    @property
    @abstractmethod
    def result(self) -> str:
        """The name of the first tensor that is stored."""

    @property
    def results(self) -> tuple[str, ...]:
        """The names of all tensors that are stored."""
        return (self.result,)

    @abstractmethod
    def refuse(self) -> None:
        """Raise Unsupported, ProblemError or ScheduleError if there can be no plan."""

    def named(self, name: str) -> Compute | None:
        """The computation of this name, or None."""
        return next((a for a in self.computations if a.name == name), None)

    def prepares(self, compute: Compute) -> bool:
        """Whether a computation stores what a later one reads, instead of a part of the result. Schedules
        that callers give are not for it."""
        return False

    def of_any_batch(self) -> tuple[Workload, ir.Values]:
        """The workload with the number of samples as a name, one of few examples of it (``in_bands``), and
        that number by its name; the number of none where there are no samples. Raises Unsupported where
        one kernel cannot have it as an argument."""
        raise Unsupported("invariant:workload", f"{self.title}: it has no form for any number of samples")

    def with_batch(self, count: int) -> Workload:
        """The workload of so many samples, or with so many as the example of their number; itself where
        there are none. Raises as ``of_any_batch``."""
        raise Unsupported("invariant:workload", f"{self.title}: it has no form for any number of samples")

    # -- names -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def shape_text(self) -> str:
        """Its sizes, in short, for the names of kernels."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A name for messages about tensors."""

    @property
    def meaning(self) -> str:
        """What it computes, as a sentence; empty if its computation's text says it."""
        return ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The comment lines above the text of each kernel; by default, its computation and workload."""
        return ()

    # -- tuned rows ------------------------------------------------------------------------------

    by_user = True  # whether TRANSCONV_SCHEDULE applies to it

    def about(self, compute: Compute) -> Workload:
        """The workload under which one of its computations is tuned."""
        return self

    @property
    @abstractmethod
    def text(self) -> str:
        """The key of its rows, with direction and kind."""

    def group(self, machine: str) -> str:
        """The name of the group of rows whose workloads can be compared, usable as a file's name; empty if
        such workloads have no rows."""
        return ""

    def like(self, text: str) -> Workload | None:
        """The workload of another text, with this direction and kind; None if it cannot be parsed."""
        return None

    def distance(self, other: Workload) -> float | None:
        """The distance of two workloads; 0: the same text, None: they cannot be compared."""
        return None

    @property
    def lacks(self) -> frozenset[str]:
        """The axes of one position that schedules of its rows may name, and its computation does not
        have."""
        return frozenset()

    def innermost(self) -> Workload | None:
        """The workload with features innermost in all tensors, as in copies; None if they already are."""
        return None

    # -- results ---------------------------------------------------------------------------------

    @abstractmethod
    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> SampleOutcome:
        """Compare elements of a result with their f64 values."""

    @property
    def torch_text(self) -> TorchText | None:
        """What torch computes in its place; None if only the text of a computation says what it means."""
        return None

    def part_of(self, at: Sequence[int]) -> tuple[int, ...]:
        """The part of the result to which an element belongs (see ``Compute.part``)."""
        return ()


@dataclass(frozen=True, slots=True)
class Alone(Workload):
    """A single computation."""

    compute: Compute

    by_user = False

    @property
    def computations(self) -> tuple[Compute, ...]:
        made = kernels(self.compute)
        return (self.compute,) if made == (self.compute,) else made

    @property
    def math(self) -> str:
        return self.compute.math

    @property
    def tensors(self) -> tuple[ir.Tensor, ...]:
        return self.compute.tensors

    @property
    def result(self) -> str:
        return self.compute.c.tensor.name

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.view.tensor.name for w in self.compute.writes))

    def refuse(self) -> None:
        kept = {w.view.tensor for c in self.computations for w in c.writes} - {*self.compute.tensors}
        if self.compute.named and kept:
            raise ScheduleError(
                f"{self.compute.name}: sizes that are arguments: it takes {len(self.computations)} "
                f"kernels, and memory between them ({min(t.name for t in kept)}); expected what needs none"
            )
        for compute in self.computations:
            if reason := why_not_lowered(compute) or why_not_any_size(compute):
                raise ScheduleError(f"{compute.name}: {reason}")

    def of_any_batch(self) -> tuple[Workload, ir.Values]:
        made, sizes = of_any_batch(self.compute), samples(self.compute)
        for name, count in sizes.items():
            made = with_reference(made, name, count)
        try:
            Alone(made).refuse()
        except ScheduleError as error:
            raise Unsupported("invariant:refused", str(error)) from None
        return Alone(made), sizes

    def with_batch(self, count: int) -> Workload:
        return Alone(with_samples(self.compute, count))

    @property
    def shape_text(self) -> str:
        return "".join(f"{x.name}{x.size if x.extent is None else ''}" for x in self.compute.axes)

    @property
    def title(self) -> str:
        return self.compute.name

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(str(self.compute).splitlines())

    @property
    def text(self) -> str:
        return str(self.compute)

    def about(self, compute: Compute) -> Workload:
        """Each of its kernels is tuned separately."""
        return self if compute == self.compute else Alone(compute)

    def group(self, machine: str) -> str:
        """A group of its own, because rows of other computations do not apply."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()
        return f"{re.sub('[^A-Za-z0-9_]+', '-', machine)}_{COMPUTE}{digest}"

    def like(self, text: str) -> Workload | None:
        return self if text == self.text else None

    def distance(self, other: Workload) -> float | None:
        return 0.0 if other == self else None

    def __str__(self) -> str:
        return " ".join(" ".join(str(self.compute).split()).split())

    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> SampleOutcome:
        told = ir.sizes_told((t, tensors[t.name].shape) for t in self.compute.tensors)
        return examine(self.compute.at(**told), tensors)


ACC = "acc"
"""The name of the reduction in ``product``."""


def product(
    name: str,
    axes: tuple[Axis, ...],
    a: ir.View,
    b: ir.View,
    c: ir.View,
    acc: ir.DType,
    behind: tuple[tuple[Step, ...], str] | None = None,
    math: str = "tf32",
) -> Compute:
    """``c = sum(a * b)`` over the axes that c does not mention. ``behind``: the steps from the sum, named
    ``acc``, to the store, and a name for them; by default the sum is cast and stored."""
    left, right = Read("a", a), Read("b", b)

    def made(before: tuple[Value, ...], factors: tuple[ir.Var, ir.Var]) -> Compute:
        term = ir.Cast(factors[0], acc) * ir.Cast(factors[1], acc)
        total = Reduction(ACC, "sum", term, _summed(axes, c))
        after, word = behind or ((_stored(c, total),), "")
        return Compute(name, axes, (left, right, *before, total, *after), math, behind=word)

    plain = made((), (left.var, right.var))
    if a.tensor.dtype.kind == b.tensor.dtype.kind:
        return plain
    of_one = made(*_of_one_kind(left, right))
    return of_one if of_one.factors else plain


def _of_one_kind(left: Read, right: Read) -> tuple[tuple[Value, ...], tuple[ir.Var, ir.Var]]:
    """An integer beside a float, cast to its type, in which matrix units multiply both. It is f32 on the
    way: Triton's interpreter has no cast of integers to bf16."""
    kinds = left.view.tensor.dtype, right.view.tensor.dtype
    if kinds[0].kind == "int":
        value = Value("near_a", ir.Cast(ir.Cast(left.var, ir.f32), kinds[1]))
        return (value,), (value.var, right.var)
    value = Value("near_b", ir.Cast(ir.Cast(right.var, ir.f32), kinds[0]))
    return (value,), (left.var, value.var)


def total(name: str, axes: tuple[Axis, ...], a: ir.View, c: ir.View, like: Compute) -> Compute:
    """``c = sum(a)`` over the axes that c does not mention, with the reduction of ``like``, the steps
    after it, and what these use of the steps before it, such as a bias that is read first."""
    assert like.sum is not None
    before = like.steps[: like.steps.index(like.sum)]
    kept = needed(before, (v for s in like.after for v in used(s)))
    part = Read(fresh("a", [s.name for s in (*kept, *like.after) if not isinstance(s, Write)]), a)
    made = Reduction(like.sum.name, like.sum.op, ir.Cast(part.var, like.acc), _summed(axes, c))
    return Compute(
        name,
        axes,
        (part, made, *kept, *like.after),
        like.math,
        behind=like.behind,
        part=like.part,
        does="add",
    )


def moved(name: str, axes: tuple[Axis, ...], a: ir.View, c: ir.View, math: str) -> Compute:
    """``c = a``, rounded to the type of c."""
    given = Read("a", a)
    steps: tuple[Step, ...] = (given, Write(c, given.var))
    if c.tensor.dtype is not a.tensor.dtype:
        rounded = Value("near", ir.Cast(given.var, c.tensor.dtype))
        steps = (given, rounded, Write(c, rounded.var))
    return Compute(name, axes, steps, math)


def _summed(axes: tuple[Axis, ...], c: ir.View) -> tuple[str, ...]:
    seen = {v.name for d in c.dims for e in (d.coord, d.mask) for v in ir.free_vars(e)}
    return tuple(x.name for x in axes if x.name not in seen)


def _stored(c: ir.View, total: Reduction) -> Write:
    return Write(c, ir.Cast(total.var, c.tensor.dtype))


def of_examples(compute: Compute, count: int, given: Collection[str]) -> Compute:
    """The computation of ``count`` examples: the tensors ``given`` and all that is stored have them at a
    first dim, one behind the other. Raises ComputeError where sizes are arguments."""
    if compute.named is not None:
        raise ComputeError(
            f"sizes that are arguments ({compute.named}) have no examples; expected numbers"
        )
    taken = {*compute.names.all, *(t.name for t in compute.tensors)}
    axis = Axis(fresh("example", taken), count, "")
    stored = {w.view.tensor.name for w in compute.writes}

    def seen(view: ir.View) -> ir.View:
        tensor = view.tensor
        if tensor.name not in stored and tensor.name not in given:
            return view
        return ir.View(several(tensor, axis.name, count), (ir.ViewDim(axis.var), *view.dims))

    made = compute.over(seen)
    name = compute.name.removesuffix("_examples")
    made = replace(made, axes=(axis, *compute.axes), name=f"{name}_examples")
    return parse(str(with_roles(made)))


def several(tensor: ir.Tensor, dim: str, count: int) -> ir.Tensor:
    """A tensor of a first dim more, along which tensors like this one lie."""
    old = tensor.layout
    step = 1 + sum((b.size - 1) * b.stride for b in old.blocks)
    blocks = (ir.LayoutBlock(0, count, step), *(replace(b, dim=b.dim + 1) for b in old.blocks))
    return ir.Tensor(
        tensor.name,
        (dim, *tensor.dims),
        (count, *tensor.shape),
        ir.Layout(old.dtype, old.ndims + 1, blocks, old.offset),
    )

"""What is computed: a straight-line program over axes.

    compute rows
        axes  m=64 k=256
        read  x = X[m, k]                  a view: coordinates, and a fill where they leave the tensor
        let   s = sum(x*x; k)              a reduction: sum, prod, max or min over axes
        store Y[m] = s / 256               several stores are allowed

Convolutions, matrix products, pools and chains of elementwise operations all have this form. The matrix
unit can compute a sum of products of two reads, ``sum(a*b; k)``; the kind of each axis, B, M, N or K,
follows from which of the reads and stores mention it. The compiler uses a computation's properties (``a``,
``b``, ``c``, ``sum``); parser.py parses its text, evaluation.py executes it in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from transconv import ir
from transconv.compute.steps import (
    Axis,
    ComputeNames,
    Read,
    Reduction,
    Step,
    Sweeps,
    Value,
    Write,
    line,
    sweeps,
)
from transconv.ir import f32, f64, readable, substitute, value_at
from transconv.support import ComputeError


@dataclass(frozen=True, eq=True)
class Compute:
    """Axes and the steps over them. ``math``: the precision of products of f32 (tf32, tf32x3 or ieee);
    ``merge``: how many adjacent groups are merged (see schedule/tiles/merging.py); ``behind``: a name for
    the operations on the sum; ``part``: the stride phase, if several computations make one result;
    ``named``: the sizes that are arguments of its kernels, and their requirements. ``does``: ``compute``;
    ``add`` for the sum of partial sums; ``pack`` and ``unpack`` for copies of an operand and of a
    result."""

    name: str
    axes: tuple[Axis, ...]
    steps: tuple[Step, ...]
    math: str = "tf32"
    merge: int = 1
    behind: str = ""
    part: tuple[int, ...] | None = None
    does: str = "compute"
    named: ir.Sizes | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(
            (
                self.name,
                self.axes,
                self.steps,
                self.math,
                self.merge,
                self.behind,
                self.part,
                self.does,
                self.named,
            )
        )

    @staticmethod
    def parse(text: str) -> Compute:
        """Read the text form (see parser.py). Raises ComputeError, with a message of one line."""
        from transconv.compute import parse

        return parse(text)

    def at(self, /, **sizes: int) -> Compute:
        """The computation with these numbers for the sizes that are arguments. Raises ComputeError for
        sizes that do not meet its requirements."""
        if self.named is None:
            return self
        if reason := self.named.why_not(sizes):
            raise ComputeError(f"{self.name}: {reason}; it requires {self.named}")
        consts: dict[ir.Expr, ir.Expr] = {ir.Var(n): ir.Const(sizes[n]) for n in self.named.names}

        def step(of: Step) -> Step:
            if isinstance(of, (Read, Write)):
                tensor = of.view.tensor.at(sizes)
                of = replace(of, view=ir.View(tensor, substitute(of.view, consts).dims))
            return of if isinstance(of, Read) else replace(of, value=substitute(of.value, consts))

        axes = tuple(
            x if x.extent is None else Axis(x.name, value_at(x.extent, sizes), x.role) for x in self.axes
        )
        return replace(self, axes=axes, steps=tuple(map(step, self.steps)), named=None)

    # -- the parts -------------------------------------------------------------------------------

    @cached_property
    def sum(self) -> Reduction | None:
        """The first reduction; None if nothing is reduced."""
        return next((s for s in self.steps if isinstance(s, Reduction)), None)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """Its reads, in the order of the text."""
        return tuple(s for s in self.steps if isinstance(s, Read))

    @cached_property
    def writes(self) -> tuple[Write, ...]:
        """Its stores, in the order of the text."""
        return tuple(s for s in self.steps if isinstance(s, Write))

    @cached_property
    def added(self) -> tuple[ir.View, ...]:
        """The views of stores that add to elements (``+=``)."""
        return tuple(w.view for w in self.writes if w.op == "add")

    @cached_property
    def statistics(self) -> tuple[Write, ...]:
        """The stores that reduce (see analysis/statistics.py)."""
        return tuple(w for w in self.writes if w.op not in ("", "add"))

    @cached_property
    def reduced(self) -> tuple[str, ...]:
        """The axes that reductions name."""
        return tuple(dict.fromkeys(a for s in self.steps if isinstance(s, Reduction) for a in s.axes))

    @cached_property
    def sweeps(self) -> Sweeps:
        """The sweeps over the reduced axes ."""
        return sweeps(self.steps, self.reduced)

    @property
    def again(self) -> bool:
        """Whether elements of a row are used more than once: in several sweeps, or by reductions."""
        ends = [s for sweep in self.sweeps.each for s in sweep.steps if isinstance(s, (Reduction, Write))]
        return len(ends) > 1

    @cached_property
    def streams(self) -> bool:
        """Whether this is a map or a reduction: no product, and no copy or sum that belongs to one."""
        return self.factors is None and self.does == "compute"

    @cached_property
    def factors(self) -> tuple[Read | Value, Read | Value] | None:
        """The two factors of the product that is summed, if that is the only reduction: reads, values that
        a ``where`` chooses from reads, or computed values (a prologue). Otherwise None."""
        total, names = self.sum, self.names
        named = total.factors if total is not None and total.op == "sum" and not self.again else None
        if total is None or named is None:
            return None
        moved = (
            all(v in names.chosen for v in named)
            and isinstance(total.value, ir.Mul)
            and all(isinstance(e, ir.Cast) for e in (total.value.a, total.value.b))
        )
        if not moved and not self._contracts(*named):
            return None
        first, second = (
            next(s for s in self.steps if isinstance(s, (Read, Value)) and s.var is v) for v in named
        )
        return first, second

    def _contracts(self, a: ir.Var, b: ir.Var) -> bool:
        """Whether two computed values of one type are factors of a matrix product: each varies along an
        axis of the result that the other lacks, both along a summed one, and each has a read that varies
        along all axes of the value."""
        if a.type is not b.type or any(self.names.main(v) is None for v in (a, b)):
            return False
        in_a, in_b, in_c = self.roots(a), self.roots(b), self.seen_by(self.c)
        return bool((in_a - in_b) & in_c and (in_b - in_a) & in_c and in_a & in_b - in_c)

    @cached_property
    def prologue(self) -> tuple[Value, ...]:
        """The factors of a product that are computed from reads."""
        return tuple(
            f for f in self.factors or () if isinstance(f, Value) and f.var not in self.names.chosen
        )

    @property
    def nonzero(self) -> tuple[Value, ...]:
        """Those of the prologue that 0 times is not 0 beyond the end of a sum: floats other than casts."""
        return tuple(v for v in self.prologue if not v.casts and self.acc.kind == "float")

    @cached_property
    def operands(self) -> tuple[Read, ...]:
        """The main read of each factor of a product; without a product, the first read."""
        if self.factors is None:
            return self.reads[:1]
        names = self.names
        found = (names.chosen.get(f.var, (names.main(f.var),))[0] for f in self.factors)
        return tuple(r for r in found if r is not None)

    @cached_property
    def a(self) -> ir.View:
        """The view of the left factor of a product, else of the first read; ``c`` if nothing is read."""
        return self.operands[0].view if self.operands else self.c

    @cached_property
    def b(self) -> ir.View | None:
        """The view of the right factor of a product, or None."""
        return self.operands[1].view if self.factors else None

    @cached_property
    def c(self) -> ir.View:
        """The view of the first store."""
        return self.writes[0].view

    @cached_property
    def acc(self) -> ir.DType:
        """The accumulator's type: that of the reduced value; f32 if nothing is reduced."""
        return self.sum.value.dtype if self.sum else f32

    @cached_property
    def after(self) -> tuple[Step, ...]:
        """The steps after the first reduction, such as an epilogue's; all steps if there is none."""
        at = self.steps.index(self.sum) + 1 if self.sum else 0
        return self.steps[at:]

    @cached_property
    def tensors(self) -> tuple[ir.Tensor, ...]:
        """The kernel's parameters in the order of the call: tensors that are read, then those written."""
        views = [*(r.view for r in self.reads), *(w.view for w in self.writes)]
        return tuple(dict.fromkeys(v.tensor for v in views))

    @property
    def finishes(self) -> bool:
        """Whether the steps after the sum do more than cast it and store it once."""
        return self.sum is not None and not (
            len(self.after) == 1 and self.writes[0].value is ir.Cast(self.sum.var, self.c.tensor.dtype)
        )

    @property
    def stores_all(self) -> bool:
        """Whether all elements of the result are stored: by this computation, or together with the other
        stride phases; also for merged groups."""
        points = prod(x.size for x in self.axes if self.kinds[x.name] != "K")
        whole = self.c.mask() is ir.TRUE and points >= prod(self.c.tensor.shape)
        return (whole or self.phase or self.merge > 1) and not self.added

    @cached_property
    def reads_results(self) -> bool:
        """Whether a step after the sum reads at the coordinates of the result, like a residual."""
        return any(isinstance(s, Read) and s.view.dims == self.c.dims for s in self.after)

    @cached_property
    def adds_zeros(self) -> bool:
        """Whether the reduction is a sum to which elements beyond the end of an axis add 0."""
        if self.sum is None or self.sum.op != "sum" or self.prologue:
            return False
        value = self.sum.value
        factors = [value.a, value.b] if isinstance(value, ir.Mul) else [value]
        named = {v for v, reads in self.names.chosen.items() if not any(r.fill for r in reads)}
        return any(isinstance(f, ir.Cast) and f.x in named for f in factors)

    def fill_of(self, view: ir.View) -> float:
        """The value of a read where its view's mask is false."""
        return next((r.fill for r in self.reads if r.view is view), 0.0)

    @cached_property
    def moves(self) -> bool:
        """Whether this has one read, one store and no reduction."""
        return self.sum is None and len(self.reads) == len(self.writes) == 1

    # -- axes ------------------------------------------------------------------------------------

    def kind(self, axis: str) -> str:
        """The kind of an axis (see ``kinds``)."""
        return self.kinds[axis]

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of every axis, by name: B, M, N or K, from membership. M is shared by A and C, N by B
        and C, K by A and B, and B by all three. An axis that only C mentions is an M axis, one that only
        A has is a K axis."""
        if self.factors is None:
            return {x.name: "K" if x.name in self.reduced else "M" for x in self.axes}
        in_a, in_b = (self.roots(f.var) for f in self.factors)
        in_c = self.seen_by(self.c)
        return {
            x.name: "K"
            if x.name not in in_c
            else "M"
            if x.name not in in_b
            else "B"
            if x.name in in_a
            else "N"
            for x in self.axes
        }

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, by name."""
        return {x.name: x.size for x in self.axes}

    def size(self, axis: str) -> int:
        """The size of an axis. KeyError for one that it does not have."""
        return self.sizes[axis]

    def axis(self, name: str) -> Axis:
        """The axis of a name that it has."""
        return next(x for x in self.axes if x.name == name)

    def axes_of(self, kind: str) -> tuple[Axis, ...]:
        """The axes of one kind, in their order."""
        return self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> dict[str, tuple[Axis, ...]]:
        return {k: tuple(x for x in self.axes if self.kinds[x.name] == k) for k in "BMNK"}

    # -- names that coordinates mention ----------------------------------------------------------

    @cached_property
    def names(self) -> ComputeNames:
        """The dependencies of the names of axes and steps."""
        return ComputeNames(self.axes, self.steps, self.named.names if self.named else ())

    @cached_property
    def stand_ins(self) -> dict[ir.Expr, ir.Expr]:
        """Expressions that replace values in coordinates, and sizes that are arguments, in estimates of
        strides and bytes, where they are not known."""
        sizes = self.named.like if self.named else {}
        found: dict[ir.Expr, ir.Expr] = {ir.Var(n): ir.Const(size) for n, size in sizes.items()}
        return {**found, **{v: e for v, e in self.names.stand_ins.items()}}

    def roots(self, e: ir.Expr) -> frozenset[str]:
        """The axes that an expression depends on, directly or through values."""
        return self.names.roots(e)

    def seen_by(self, view: ir.View) -> frozenset[str]:
        """The axes on which the coordinates or masks of a view depend. Masks count because both operands
        of a product depend on the stride phase if it sums a part of the window."""
        return frozenset(a for d in view.dims for e in (d.coord, d.mask) for a in self.roots(e))

    def why_not_plain(self, view: ir.View | None) -> str | None:
        """None if an operand or result is exactly the elements of its view, so that it can be a box or be
        copied; else why not."""
        if view is None:
            return None
        if view in self.added:
            return f"several points add to one place in {view.tensor.name}"
        if told := self.names.told(view):
            return (
                f"places in {view.tensor.name} are told by the values of "
                f"{' '.join(sorted(v.name for v in told))}"
            )
        for factor in self.factors or ():
            if factor in self.prologue and any(r.view is view for r in self.names.made_of[factor.var]):
                return f"{factor.name} is computed from it before it is multiplied"
            chosen = self.names.chosen.get(factor.var, ())
            if isinstance(factor, Value) and any(r.view is view for r in chosen):
                return f"{factor.name} is chosen from several tensors"
        return None

    @property
    def phase(self) -> bool:
        """Whether this computes one of several stride phases of a result."""
        return self.part is not None and self.does == "compute"

    @cached_property
    def sums_positions(self) -> bool:
        """Whether the sum runs over positions."""
        return any(x.role == "position" for x in self.axes_of("K"))

    # -- the same computation, seen otherwise ----------------------------------------------------

    def through(
        self, a: ir.View | None = None, b: ir.View | None = None, c: ir.View | None = None
    ) -> Compute:
        """The computation with other views of the operands or of the result. A read after the sum at the
        coordinates of the result (a residual) gets the new coordinates."""
        operands = self.operands if self.factors else self.reads[:2]
        seen = {r.name: v for r, v in zip(operands, (a, b), strict=False) if v is not None}
        behind = self.after if self.sum else ()
        steps: list[Step] = []
        retyped: dict[ir.Expr, ir.Expr] = {}  # reads whose new tensor has another type
        for step in self.steps:
            if not isinstance(step, Read) and retyped:
                step = replace(step, value=substitute(step.value, retyped))
            if isinstance(step, Read) and step.name in seen:
                old, step = step.var, replace(step, view=seen[step.name])
                if step.var is not old:
                    retyped[old] = step.var
            elif c is not None and isinstance(step, Write) and step.view is self.c:
                step = replace(step, view=c)
            elif (
                c is not None
                and isinstance(step, Read)
                and step in behind
                and (step.view.dims == self.c.dims)
            ):
                step = replace(step, view=ir.View(step.view.tensor, c.dims))
            steps.append(step)
        return replace(self, steps=tuple(steps))

    def over(self, seen: Callable[[ir.View], ir.View]) -> Compute:
        """The computation with a function applied to each view."""
        return replace(
            self,
            steps=tuple(
                replace(s, view=seen(s.view)) if isinstance(s, (Read, Write)) else s for s in self.steps
            ),
        )

    def views(self) -> Iterator[ir.View]:
        """Every view, reads first."""
        yield from (r.view for r in self.reads)
        yield from (w.view for w in self.writes)

    @property
    def type(self) -> ir.DType:
        """The type of arithmetic: f64 if a tensor is f64, else f32."""
        return f64 if any(t.dtype is f64 for t in self.tensors) else f32

    def __str__(self) -> str:
        """The text; ``parse(str(c)) == c`` for one that was parsed."""
        return self._text

    @cached_property
    def _text(self) -> str:
        said = "".join(
            f" {k}={v}"
            for k, v, usual in (("math", self.math, "tf32"), ("merge", self.merge, 1))
            if v != usual
        )
        lines = [f"compute {self.name}{said}", *([f"    sizes  {self.named}"] if self.named else [])]
        lines += [f"    tensor {_declared(t)}" for t in self.tensors]
        summed = {x.name for x in self.axes_of("K")}
        groups = [
            " ".join(
                f"{x.name}={x.size if x.extent is None else _short(x.extent)}"
                for x in self.axes
                if (x.name in summed) is inside
            )
            for inside in (False, True)
        ]
        lines.append(f"    axes   {' | '.join(filter(None, groups))}")
        return "\n".join([*lines, *(f"    {line(s, self.type)}" for s in self.steps)])


def _declared(t: ir.Tensor) -> str:
    sizes = ", ".join(f"{d}={_short(n)}" for d, n in zip(t.dims, t.bounds, strict=True))
    dense = t.layout is ir.Layout.dense(t.dtype, t.shape)
    order = t.layout.tag() if t.extents else t.layout
    if t.pitches:
        order = f"strides({','.join(map(_short, t.pitches))})"
    return f"{t.name} {t.dtype} [{sizes}]" + ("" if dense else f" {order}")


def _short(e: ir.Expr) -> str:
    return readable(e).replace(" ", "")

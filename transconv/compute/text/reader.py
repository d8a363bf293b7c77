"""Parses the lines of a computation's text; text/format.py describes the format."""

from __future__ import annotations

import re

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.analysis.prologues import with_prologues
from transconv.compute.compute import Compute
from transconv.compute.steps import Axis, Step
from transconv.compute.symbolic_sizes import of_sizes, sizes_of
from transconv.compute.text.expressions import ComputeScope, shortened
from transconv.compute.text.step_reader import StepReader, named
from transconv.errors import ComputeError, LayoutError, nearest
from transconv.ir import (
    DTYPES,
    ELSEWHERE,
    LAUNCH,
    Const,
    Div,
    DType,
    Expr,
    Layout,
    Sizes,
    Tensor,
    f32,
    f64,
    find,
    free_vars,
    index,
    type_named,
    value_at,
)
from transconv.simplify import simplify


class Reader:
    """Collects the lines of a text; ``made`` builds the computation."""

    def __init__(self) -> None:
        self.name, self.math = "", "tf32"
        self.named: Sizes | None = None
        self.axes: dict[str, int] = {}
        self.extents: dict[str, Expr] = {}  # of axes whose sizes are arguments
        self.tensors: dict[str, Tensor] = {}
        self.number = 1  # of the line
        self.steps: list[tuple[str, str, int]] = []  # parsed after all tensors are known

    def line_compute(self, rest: str) -> None:
        if self.name:
            raise ComputeError("a second 'compute'; expected one computation")
        name, *words = rest.split() or [""]
        self.name = named(name, "a computation")
        for word in words:
            key, _, value = word.partition("=")
            if key != "math" or value not in ("ieee", "tf32", "tf32x3"):
                raise ComputeError(f"'{word}' is unknown; expected math=ieee, tf32 or tf32x3")
            self.math = value

    def line_sizes(self, rest: str) -> None:
        if self.named or self.axes or self.tensors:
            raise ComputeError("sizes stand in one line, before tensors and axes")
        self.named = sizes_of(rest)
        for name in self.named.names:
            if named(name, "a size") in LAUNCH:  # sizes are parameters, and keep their names
                raise ComputeError(f"'{name}' is a word of Triton's launches; expected another name for a "
                                   "size")

    def extent(self, text: str) -> tuple[int, Expr]:
        """A size as a number (the example if it has names) and as an expression of names."""
        if text.isdigit() or self.named is None:
            return int(text), Const(int(text))
        made = simplify(of_sizes(text, self.named))
        if made.dtype is not index or find(made, Div):
            raise ComputeError(f"size '{text}'; expected whole numbers and names of sizes")
        return value_at(made, self.named.like), made

    def line_axes(self, rest: str) -> None:
        for word in rest.replace("|", " ").split():
            name, _, size = word.partition("=")
            if not size.isdigit() and (self.named is None or not size):
                raise ComputeError(f"axis '{word}'; expected name=size, such as n=32")
            if name in self.axes:
                raise ComputeError(f"axis '{name}' is named twice; expected it once")
            if self.named and name in self.named.names:
                raise ComputeError(f"'{name}' is a size already; expected another name for an axis")
            self.axes[named(name, "an axis")], extent = self.extent(size)
            if free_vars(extent):
                self.extents[name] = extent

    def line_tensor(self, rest: str) -> None:
        found = re.fullmatch(r"(\w+)\s+(\w+)\s+\[(.*?)\]\s*(.*)", rest)
        if found is not None and found[2] not in _types():
            raise ComputeError(f"'{found[2]}' is no type; expected one of {' '.join(_types())}"
                               f"{nearest(found[2], _types(), ELSEWHERE)}")
        if found is None:
            raise ComputeError(f"tensor '{rest}'; expected a name, a type and sizes, such as "
                               "x f16 [n=8, c=64] (types: " + " ".join(_types()) + ")")
        sizes = [word.rpartition("=") for word in found[3].replace(" ", "").split(",") if word]
        if not all(size.isdigit() or self.named and size for _, _, size in sizes):
            raise ComputeError(f"sizes [{found[3]}] of tensor '{found[1]}'; expected whole numbers")
        extents = tuple(self.extent(size) for _, _, size in sizes)
        shape = tuple(n for n, _ in extents)
        dims = tuple(name or f"{found[1]}_{i}" for i, (name, _, _) in enumerate(sizes))
        dtype = type_named(found[2])
        try:
            layout = Layout.parse(found[4], dtype, shape) if found[4] else Layout.dense(dtype, shape)
        except LayoutError as error:
            raise ComputeError(f"tensor '{found[1]}': {error}") from None
        sized = tuple(e for _, e in extents) if any(free_vars(e) for _, e in extents) else ()
        if sized and (not layout.is_packed or layout.strides() is None or layout.offset):
            raise ComputeError(f"tensor '{found[1]}' has sizes that are arguments and the layout "
                               f"{found[4]}; expected a dense one, without blocks")
        self.tensors[named(found[1], "a tensor")] = Tensor(found[1], dims, shape, layout, extents=sized)

    def line_read(self, rest: str) -> None:
        self.steps.append(("read", rest, self.number))

    def line_let(self, rest: str) -> None:
        self.steps.append(("let", rest, self.number))

    def line_store(self, rest: str) -> None:
        self.steps.append(("store", rest, self.number))

    # -- the whole -------------------------------------------------------------------------------

    def made(self) -> Compute:
        """The computation. Raises ComputeError."""
        if not self.axes:
            raise ComputeError("there are no axes; expected a line such as: axes m=64 n=32 | k=128")
        if not any(word == "store" for word, _, _ in self.steps):
            raise ComputeError("nothing is stored; expected a line such as: store y[m, n] = s")
        given = frozenset(rest.partition("=")[0].strip() for word, rest, _ in self.steps
                          if word != "store")
        scope = ComputeScope(self.axes, self._type(), given=given, extents=self.extents, named=self.named)
        steps, reader = list[Step](), StepReader(scope, self.tensors)
        for word, rest, number in self.steps:
            try:
                steps += getattr(reader, word)(rest)
            except ComputeError as error:
                raise ComputeError(f"line {number}: {word} {shortened(rest)}: {error}") from None
        axes = tuple(Axis(n, size, "", self.extents.get(n)) for n, size in self.axes.items())
        return with_roles(with_prologues(
            Compute(self.name, axes, tuple(steps), self.math, named=self.named)))

    def _type(self) -> DType:
        """The type of arithmetic: f64 if a declared tensor is f64, else f32."""
        return f64 if any(t.dtype is f64 for t in self.tensors.values()) else f32


def _types() -> list[str]:
    known = [t for t in DTYPES.values() if t.torch and not t.within]
    return [*(t.name for t in known), *(name for t in known for name in t.aliases)]

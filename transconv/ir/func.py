"""Functions that a statement can call for their effect. The verifier checks their arguments, the
interpreter executes them and the emitters spell them."""

from __future__ import annotations

from dataclasses import dataclass

from transconv.ir.node import Node, node


@node
class Func(Node):
    """A function to call; ``attrs`` are settings such as the precision of a dot."""

    name: str
    attrs: tuple[tuple[str, str], ...] = ()

    def attr(self, key: str, default: str = "") -> str:
        """The setting ``key``, or the default."""
        return dict(self.attrs).get(key, default)

    @property
    def multiplies(self) -> bool:
        """Whether this is a matrix product, which adds to its first argument."""
        return self.name in ("dot", "dot_async")

    @property
    def leaves(self) -> bool:
        """Whether this leaves a part of what is reduced."""
        return self.name == "partial"

    def __str__(self) -> str:
        words = ", ".join(f"{k}={v}" for k, v in self.attrs)
        return f"{self.name}[{words}]" if words else self.name


@dataclass(frozen=True, slots=True)
class FuncSpec:
    """A function's parameters, and what it does."""

    params: tuple[str, ...]
    meaning: str


FUNCS = {
    "dot": FuncSpec(
        ("acc", "a", "b"),
        "acc[..m, n] += sum over k of a[..m, k] * b[..k, n], summed in the type of acc",
    ),
    "atomic_add": FuncSpec(
        ("tensor", "offset", "value", "mask"),
        "tensor.data[offset] += value where mask holds, as one indivisible step per element",
    ),
    "partial": FuncSpec(
        ("tensor", "offset", "value", "mask", "count"),
        "tensor.data[offset] = the reduction of the values of a tile where mask holds, of which there are "
        "count, along the lanes that offset lacks; there are none yet, and the tile is all points around",
    ),
    "assume": FuncSpec(
        ("condition",), "the condition holds; it may be relied on, and is checked when interpreted",
    ),
    "wait": FuncSpec(
        ("barrier", "slot", "phase"), "go on once the barrier's phase of that parity has completed",
    ),
    "expect": FuncSpec(
        ("barrier", "slot", "bytes"), "announce that so many bytes will land, and arrive",
    ),
    "arrive": FuncSpec(("barrier", "slot", "when"), "arrive at the barrier where the condition holds"),
    "dot_async": FuncSpec(
        ("acc", "a", "b"), "start acc += a * b; acc and the pieces a and b stay in use until a dot_wait",
    ),
    "dot_wait": FuncSpec(("pending",), "go on when at most so many products are still running"),
    "part_wait": FuncSpec(
        ("pending", "acc", "total"), "go on when at most so many products are still running; acc may be "
        "read then, and what was added to total before is in it"),
    "fence": FuncSpec((), "what was put into shared memory is visible to the copy engine"),
    "send_wait": FuncSpec(("pending",), "go on when at most so many sends still read shared memory"),
}
"""Functions that statements call, by name."""


def dot(precision: str) -> Func:
    """A matrix-unit product; ``precision`` is ``tf32``, ``tf32x3`` or ``ieee`` for f32 operands. With tf32
    the unit truncates significands to 10 fraction bits; operands that need rounding are rounded before."""
    return Func("dot", (("precision", precision),))


def partial(op: str) -> Func:
    """Leaves the reduction of a tile: its ``sum``, ``max``, ``min``, or the ``squares`` of its deviations
    from its mean, whose sum comes before."""
    return Func("partial", (("op", op),))


ATOMIC_ADD = Func("atomic_add")
"""Adds to memory in one indivisible step."""
ASSUME = Func("assume")
"""States a condition that may be relied on."""
WAIT = Func("wait")
"""Waits until a barrier's phase has completed."""
EXPECT = Func("expect")
"""Announces bytes that will land, and arrives."""
ARRIVE = Func("arrive")
"""Arrives at a barrier."""
DOT_ASYNC = Func("dot_async")
"""Starts a product."""
DOT_WAIT = Func("dot_wait")
"""Waits until few enough products are running."""
PART_WAIT = Func("part_wait")
"""Waits until a part of a sum is complete."""
FENCE = Func("fence")
"""Makes what was put into shared memory visible to the copy engine."""
SEND_WAIT = Func("send_wait")
"""Waits until few enough sends read shared memory."""

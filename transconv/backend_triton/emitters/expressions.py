"""The text of expressions of a lanewise kernel: beside arithmetic, tiles that are loaded, reduced, and
seen in another shape.
"""

from __future__ import annotations

from transconv.backend_triton.emitters.arithmetic import ATOM, LEVEL, POSTFIX, ArithmeticSpeller
from transconv.backend_triton.emitters.parameters import box_name
from transconv.ir import (
    REDUCERS,
    TRUE,
    Add,
    BoxLoad,
    BoxStore,
    Const,
    DType,
    Expr,
    Lane,
    Load,
    Mul,
    Ne,
    Reduce,
    Renamed,
    Spread,
    Tensor,
    wrapped,
)


def is_lost(dtype: DType, fill: float) -> bool:
    """Whether Triton 3.6 loads another number where a mask of several elements does not hold. It puts a
    constant of 8 or 16 bits several times into a word, extended with its sign: four of 128 become
    0xffffff80, which is 128 and three times 255. Numbers whose sign bit is 0 are right, and those of ones
    alone."""
    if dtype.kind != "int" or dtype.bits >= 32:
        return False
    ones = (1 << dtype.bits) - 1
    bits = int(fill) & ones
    return bits >> dtype.bits - 1 == 1 and bits != ones


def _times(x: Const, value: float) -> Const:
    """A sum or a product of equal constants, which wraps around."""
    return Const(value if isinstance(value, float) else wrapped(int(value), x.type), x.type)


class ExprSpeller(ArithmeticSpeller):
    """Spells all expressions."""

    def spell_Reduce(self, e: Reduce) -> tuple[str, int]:
        lanes = self.lanes(e.x)
        if e.lane not in lanes:  # nothing varies along the lane: the sum is a product
            if REDUCERS[e.op].node is Add and isinstance(e.x, Const):
                return self.spell(self.typed(_times(e.x, e.x.value * e.lane.extent)))
            if REDUCERS[e.op].node is Add and e.dtype.kind == "int":
                times = Const(wrapped(e.lane.extent, e.dtype), e.dtype)
                return f"{self.fit(e.x, lanes, LEVEL[Mul] + 1)} * {self.text(times)}", LEVEL[Mul]
            if REDUCERS[e.op].node is Add:
                return f"{self.fit(e.x, lanes, LEVEL[Mul] + 1)} * {e.lane.extent}", LEVEL[Mul]
            if REDUCERS[e.op].node is not Mul:
                return self.fit(self.typed(e.x), lanes, POSTFIX), POSTFIX
            if isinstance(e.x, Const):
                return self.spell(self.typed(_times(e.x, e.x.value**e.lane.extent)))
            every = tuple(sorted((*lanes, e.lane), key=lambda x: (x.axis, x.name)))
            return self.spell(Reduce(e.op, Spread(e.x, every), e.lane))
        text = self.text(self.not_a_dot(e.x, lanes))
        if REDUCERS[e.op].helper:  # a function of the module's own
            return f"{self.space}.reduce({text}, {lanes.index(e.lane)}, {e.op}_of)", POSTFIX
        return f"{self.space}.{e.op}({text}, axis={lanes.index(e.lane)})", POSTFIX

    def not_a_dot(self, x: Expr, lanes: tuple[Lane, ...]) -> Expr:
        """The same product, rows after columns: Triton (3.6) takes the sum of ``a[:, :, None] *
        b[None, :, :]`` for a matrix product in tf32, also where it is too short along K for the
        matrix unit, which then is wrong. It does not with the factors exchanged."""
        if isinstance(x, Mul) and lanes[-1] not in self.lanes(x.a) and lanes[0] not in self.lanes(x.b):
            return Mul(x.b, x.a)
        return x

    def spell_Spread(self, e: Spread) -> tuple[str, int]:
        if self.lanes(e.x) == e.lanes:
            return self.spell(e.x)
        shape = ", ".join(str(x.extent) for x in e.lanes)
        if isinstance(e.x, Const):  # a number of Python has no shape to broadcast
            return f"{self.space}.full(({shape}, ), {self.text(e.x)}, {self.type(e.dtype)})", POSTFIX
        return f"{self.space}.broadcast_to({self.fit(e.x, e.lanes)}, ({shape}))", POSTFIX

    def spell_Renamed(self, e: Renamed) -> tuple[str, int]:
        """The same text, unless the new lanes come in another order."""
        before = self.lanes(e.x)
        order = [before.index(x) for lane in self.lanes(e) for x in before if e.of(x) is lane]
        if order == sorted(order):
            return self.spell(e.x)
        return f"{self.space}.permute({self.text(e.x)}, ({', '.join(map(str, order))}))", POSTFIX

    def spell_Load(self, e: Load) -> tuple[str, int]:
        if e.tensor.number:
            return e.tensor.name, ATOM
        lanes = self.lanes(e)
        address = self.address(e.tensor, e.offset, lanes)
        if e.mask is TRUE:
            return f"{self.space}.load({address})", POSTFIX
        fill = e.fill if e.dtype.kind == "float" else int(e.fill)
        other = self.text(self.typed(Const(fill, e.dtype)))
        mask = self.condition(e.mask, lanes)
        if lanes and is_lost(e.dtype, fill):
            loaded = f"{self.space}.load({address}, mask={mask}, other=0)"
            return f"{self.space}.where({mask}, {loaded}, {other})", POSTFIX
        return f"{self.space}.load({address}, mask={mask}, other={other})", POSTFIX

    def condition(self, mask: Expr, lanes: tuple[Lane, ...]) -> str:
        """A mask that is not always true. One that never is becomes a tensor, as Triton asks for."""
        if not isinstance(mask, Const):
            return self.fit(mask, lanes)
        return f"{self.space}.full(({'1, ' * len(lanes)}), False, {self.space}.int1)"

    def spell_BoxLoad(self, e: BoxLoad) -> tuple[str, int]:
        """A descriptor loads the box in the order of memory; it is permuted to the order of its lanes."""
        lanes, memory = self.lanes(e), self.memory_lanes(e)
        text = f"{box_name(e.tensor.name)}.load([{self.corner(e)}])"
        if len(e.extents) != len(memory):
            text += f".reshape({', '.join(str(x.extent) for x in memory)})"
        text += ".T" if list(lanes) != memory else ""
        return self.unboxed(text, e.tensor.dtype)

    @staticmethod
    def unboxed(text: str, of: DType) -> tuple[str, int]:
        """What was moved in a box, as its own type."""
        return (text, POSTFIX) if of.boxed is of else (f"{text} != 0", LEVEL[Ne])

    def memory_lanes(self, box: BoxLoad | BoxStore) -> list[Lane]:
        return list(dict.fromkeys(x for w in box.within for x in self.lanes(w)))

    def corner(self, box: BoxLoad | BoxStore) -> str:
        return ", ".join(self.text(c) for c in box.corner)

    def address(self, tensor: Tensor, offset: Expr, lanes: tuple[Lane, ...]) -> str:
        """``tensor + offset``, with every lane of ``lanes`` even if the offset does not vary along it."""
        own = self.lanes(offset)
        text = f"{tensor.name} + {self.fit(offset, lanes, LEVEL[Add if isinstance(offset, Add) else Mul])}"
        if own != lanes:
            shape = ", ".join(str(x.extent) for x in lanes)
            text += f" + tl.zeros(({shape},), tl.int32)"
        return text

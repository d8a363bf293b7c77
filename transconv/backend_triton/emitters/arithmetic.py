"""The text of arithmetic on lanes, with no more parentheses than Python needs, and ``[:, None]`` where an
operand lacks lanes of the other operand."""

from __future__ import annotations

from collections.abc import Callable
from math import copysign, isinf, isnan

from transconv import ir

# Python's precedence, weakest first. `&` binds tighter than `<`, so comparisons get parentheses.
PRECEDENCE = (
    (ir.Lt, ir.Le, ir.Eq, ir.Ne),
    (ir.Or,),
    (ir.Xor,),
    (ir.And,),
    (ir.Shl, ir.Shr),
    (ir.Add, ir.Sub),
    (ir.Mul, ir.Div, ir.FloorDiv, ir.Mod),
)
LEVEL: dict[type[ir.Binary], int] = {
    kind: level for level, kinds in enumerate(PRECEDENCE, 1) for kind in kinds
}
ATOM, POSTFIX, PREFIX = 10, 9, 8


def is_narrow(dtype: ir.DType) -> bool:
    """Whether these are integers of less than the 32 bits that Triton gives numbers."""
    return dtype.kind == "int" and dtype.bits < 32


def is_written(c: ir.Const) -> bool:
    """Whether a number of Python in the text becomes this constant beside a tile of its type. Triton 3.6
    writes one of bf16 with six digits behind the point (1e-7 is 0 there), makes none of 8-bit floats,
    takes the sign of -0.0 away, and makes f64 of what is no normal number of f32."""
    if c.type.kind != "float" or isinf(c.value) or isnan(c.value):
        return c.type is not ir.bf16 and not c.type.is_short
    if not c.value:
        return copysign(1.0, c.value) > 0
    normal = c.type is not ir.f32 or 2.0**-126 <= abs(c.value) < 2.0**128
    return normal and c.type is not ir.bf16 and not c.type.is_short


class ArithmeticSpeller:
    """The speller of arithmetic: of an expression (text, precedence level), in an expression's own lanes.
    ``scope`` holds the lanes of every variable in scope; ``space`` is the name of Triton's module in the
    text."""

    space = "tl"

    def __init__(self) -> None:
        self.scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.counting: dict[ir.Var, str] = {}  # names whose lanes count up, see ``counts``
        self.numbers: set[ir.Var] = set()  # loop counters, and lets computed from them alone
        self.products: set[ir.Var] = set()  # sums of the matrix unit

    def name(self, s: ir.Let) -> None:
        """Record the lanes of a let, and how its value counts."""
        self.scope[s.var] = self.lanes(s.value)
        self.counting[s.var] = self.counts(s.value)
        if self.is_number(s.value):
            self.numbers.add(s.var)

    def is_number(self, e: ir.Expr) -> bool:
        """Whether Triton's interpreter holds it as a Python number, which has no ``.to``."""
        return all(
            is_written(x)
            if isinstance(x, ir.Const)
            else isinstance(x, (ir.Neg, ir.Not)) or type(x) in LEVEL or x in self.numbers
            for x in ir.walk(e)
        )

    def typed(self, e: ir.Expr) -> ir.Expr:
        """The same where no tile beside it gives a number its type: of a lone one Triton makes 32 bits.
        What is stored or loaded is converted then, which takes digits from f64 alone."""
        return ir.Cast(e, e.dtype) if e.dtype is ir.f64 and self.is_number(e) else e

    def spell(self, e: ir.Expr) -> tuple[str, int]:
        name = f"spell_{type(e).__name__}"
        method: Callable[[ir.Expr], tuple[str, int]] | None = getattr(self, name, None)
        if method is not None:
            return method(e)
        assert isinstance(e, ir.Binary) and type(e) in LEVEL, f"no spelling for {type(e).__name__}"
        if isinstance(e, ir.Add) and isinstance(e.a, ir.Neg) and e.dtype.is_integer:
            return self.binary(ir.Sub(e.b, e.a.x))  # -th + oh_m reads oh_m - th
        return self.binary(e)

    def binary(self, e: ir.Binary) -> tuple[str, int]:
        """Numbers are typed where Python would compute with them, which neither rounds nor wraps around,
        and where Triton compares with them: it takes them for f32."""
        level, lanes = LEVEL[type(e)], self.lanes(e)
        a, b = (self.typed(e.a), self.typed(e.b)) if level == 1 else (e.a, e.b)
        if a.dtype.kind in ("int", "float") and self.is_number(a) and self.is_number(b):
            a = ir.Cast(a, a.dtype)
        left = self.fit(a, lanes, level + (1 if level == 1 else 0))
        if isinstance(e, ir.Sub) and self.may_count_up(e.b):
            return f"{left} + {self.negated(e.b, lanes)}", level
        if isinstance(e, ir.Sub) and isinstance(b, ir.Const) and 2**31 <= b.value < 2**32:
            return f"{left} + -{b.value}", level  # it would be u32, whose negative wraps beside a pointer
        right = self.fit(b, lanes, level + 1)
        return f"{left} {ir.INFIX[type(e)]} {right}", level

    def lanes(self, e: ir.Expr) -> tuple[ir.Lane, ...]:
        return ir.lanes_of(e, self.scope)

    def fit(self, e: ir.Expr, lanes: tuple[ir.Lane, ...], level: int = 0) -> str:
        """The text of ``e`` where dimensions are ``lanes``, in parentheses if it binds weaker."""
        return self.fitted(*self.spell(e), self.lanes(e), lanes, level)

    def fitted(
        self,
        text: str,
        strength: int,
        own: tuple[ir.Lane, ...],
        lanes: tuple[ir.Lane, ...],
        level: int = 0,
    ) -> str:
        """Such a text, of an expression in its ``own`` lanes."""
        if own and own != lanes:
            if strength < POSTFIX:
                text = f"({text})"
            index = ", ".join(":" if x in own else "None" for x in lanes)
            return f"{text}[{index}]"
        return f"({text})" if strength < level else text

    def text(self, e: ir.Expr) -> str:
        return self.spell(e)[0]

    def spell_Const(self, e: ir.Const) -> tuple[str, int]:
        return self.number_text(e) if is_written(e) else self.number(e, e.type)

    def number_text(self, e: ir.Const) -> tuple[str, int]:
        """A constant as a number of Python."""
        if isinstance(e.value, float) and (isinf(e.value) or isnan(e.value)):
            return f'float("{e.value}")', ATOM
        negative = not isinstance(e.value, bool) and e.value < 0
        return repr(e.value), PREFIX if negative else ATOM

    def type(self, t: ir.DType) -> str:
        return f"{self.space}.{t.triton}"

    def spell_Var(self, e: ir.Var) -> tuple[str, int]:
        return e.name, ATOM

    def spell_Lane(self, e: ir.Lane) -> tuple[str, int]:
        return e.name, ATOM

    def may_count_up(self, e: ir.Expr) -> bool:
        """Whether neighbouring lanes may hold neighbouring integers. Where these are subtracted, Triton
        3.6 assumes for every lane what holds only for the first (a divisor of 4, say), and reuses one
        lane's comparison for its neighbour (bench/results/h200_subtracted_lanes.csv)."""
        scaled = isinstance(e, ir.Mul) and isinstance(e.b, ir.Const)
        return e.dtype.is_integer and bool(self.lanes(e)) and not scaled

    def negated(self, e: ir.Expr, lanes: tuple[ir.Lane, ...]) -> str:
        """-x as ``~x + 1``: Triton assumes nothing of bit operations. It makes subtractions of products
        with -1 that are added (a fault on an H100). It has no sign and its interpreter no ``~`` of numbers
        without a sign: there it is ``(x ^ 255) + 1``."""
        own = self.lanes(e)
        flipped = f"~{self.fit(e, own, PREFIX)}"
        if e.dtype.kind == "int" and not e.dtype.limits[0]:
            flipped = f"({self.fit(e, own, LEVEL[ir.Xor] + 1)} ^ {e.dtype.limits[1]})"
        return self.fitted(f"{flipped} + 1", LEVEL[ir.Add], own, lanes)

    def spell_Mul(self, e: ir.Mul) -> tuple[str, int]:
        minus = isinstance(e.b, ir.Const) and e.b.value == -1
        return self.spell_Neg(ir.Neg(e.a)) if minus and self.may_count_up(e.a) else self.binary(e)

    def spell_Neg(self, e: ir.Neg) -> tuple[str, int]:
        if self.may_count_up(e.x) or (e.dtype.kind == "int" and not e.dtype.limits[0]):
            return self.negated(e.x, self.lanes(e)), LEVEL[ir.Add]
        if e.dtype.kind == "float":  # Triton's -x is 0 - x, which takes the sign of -0 away
            minus = ir.Const(-1.0, e.dtype)
            return self.spell(ir.Const(-e.x.value, e.dtype) if isinstance(e.x, ir.Const) else e.x * minus)
        return f"-{self.fit(e.x, self.lanes(e), PREFIX)}", PREFIX

    def counts(self, e: ir.Expr) -> str:
        """How the lanes of an integer count: ``up`` from the first to the last, ``again`` from the start
        every so often (``m % 8``), or "" if that is not known."""
        match e:
            case ir.Lane():
                return "up"
            case ir.Var():
                return self.counting.get(e, "")
            case ir.Cast(x, _):
                return self.counts(x)
            case ir.Add(a, b) | ir.Sub(a, b) if not self.lanes(b):
                return self.counts(a)
            case ir.Add(a, b) if not self.lanes(a):
                return self.counts(b)
            case ir.Mod(a, ir.Const()) if self.counts(a) == "up":
                return "again"
        return ""

    def spell_Mod(self, e: ir.Mod) -> tuple[str, int]:
        """Where lanes start again, Triton 3.6 ignores that the remainders count up and assumes the first
        one's divisor for each: loads of pairs then begin at odd addresses (a fault on an H200). It
        assumes nothing of bit operations: x & 7 is x % 8, and x % 28 & 31 is x % 28."""
        if self.counts(e.a) != "again" or not isinstance(e.b, ir.Const) or e.b.value < 1:
            return self.binary(e)
        bits = (1 << (int(e.b.value) - 1).bit_length()) - 1
        kept = e.a if bits == e.b.value - 1 else e
        text = self.fit(e.a, self.lanes(e), LEVEL[ir.And]) if kept is e.a else self.binary(e)[0]
        return f"{text} & {bits}", LEVEL[ir.And]

    def spell_Not(self, e: ir.Not) -> tuple[str, int]:
        """Python's ``~`` makes -1 and -2 of its own truth values, both of which Triton takes for true."""
        if isinstance(e.x, ir.Const):
            return repr(not e.x.value), ATOM
        if self.is_number(e.x):
            return f"{self.fit(e.x, self.lanes(e), LEVEL[ir.Xor])} ^ True", LEVEL[ir.Xor]
        return f"~{self.fit(e.x, self.lanes(e), PREFIX)}", PREFIX

    def spell_Min(self, e: ir.Min) -> tuple[str, int]:
        return self.extremum("minimum", e)

    def spell_Max(self, e: ir.Max) -> tuple[str, int]:
        return self.extremum("maximum", e)

    def extremum(self, name: str, e: ir.Min | ir.Max) -> tuple[str, int]:
        """A NaN operand makes the result NaN, as in torch; Triton does so only on request. It makes f32 of
        a number beside 16 or 64 bits here, and i32 of one beside 8, so that nothing would wrap around."""
        asked = e.dtype in (ir.f16, ir.bf16, ir.f64) or is_narrow(e.dtype)
        typed = tuple(ir.Cast(x, e.dtype) if asked and self.is_number(x) else x for x in (e.a, e.b))
        text, level = self.function(name, typed, e)
        if e.dtype.kind == "float":
            text = f"{text[:-1]}, propagate_nan=tl.PropagateNan.ALL)"
        return text, level

    def spell_Select(self, e: ir.Select) -> tuple[str, int]:
        """Between 0 and a sum of the matrix unit that begins with 0, ptxas takes 0 (see miscompiles.py),
        but not where an addition made one of them. Of two numbers Triton makes f32 or i32."""
        yes, no = (
            ir.Add(x, other)
            if x in self.products
            and isinstance(other, ir.Const)
            and other.value == 0.0
            and x.dtype.kind == "float"
            else x
            for x, other in ((e.yes, e.no), (e.no, e.yes))
        )
        typed = e.dtype.bits != 32 and e.dtype.kind in ("int", "float")
        if typed and self.is_number(yes) and self.is_number(no):
            yes = ir.Cast(yes, e.dtype)  # the other then is of its type
        return self.function("where", (e.cond, yes, no), e)

    def spell_Call(self, e: ir.Call) -> tuple[str, int]:
        callee = ir.CALLS.get(e.name)
        assert callee is not None, f"no spelling for {e.name}"
        spelling, lanes = callee.triton if self.space == "tl" else callee.gluon, self.lanes(e)
        if "{" in spelling:
            return spelling.format(*(self.fit(a, lanes, POSTFIX) for a in e.args)), LEVEL[ir.Div]
        taken, numbers = e.taken, all(map(self.is_number, e.args)) and bool(callee.helper)
        lone = taken is ir.f64 or (numbers and taken.kind == "float")
        args = tuple(ir.Cast(a, taken) if lone and self.is_number(a) else a for a in e.args)
        if callee.helper:  # a function of the module's own
            return f"{spelling}({', '.join(self.fit(a, lanes) for a in args)})", POSTFIX
        return self.function(spelling, args, e)

    def spell_Cast(self, e: ir.Cast) -> tuple[str, int]:
        if e.x.dtype.within is e.type:  # it is of that type there
            return self.spell(e.x)
        if e.type.rounding is not None:
            memory = e.x if e.x.dtype is e.type.memory else ir.Cast(e.x, e.type.memory)
            return f"{e.type.rounding.name}({self.fit(memory, self.lanes(e))})", POSTFIX
        if isinstance(e.x, ir.Const) or self.is_number(e.x):
            return self.number(e.x, e.type)
        return f"{self.fit(e.x, self.lanes(e), POSTFIX)}.to({self.type(e.type)})", POSTFIX

    def number(self, x: ir.Expr, to: ir.DType) -> tuple[str, int]:
        """A number as a tensor of a type. Triton makes one of integers that the type holds, and of floats;
        8-bit floats, and integers of floats, are made of a tensor as at run time."""
        own = x.dtype
        x = ir.Const(ir.held_constant(x.value, own), own) if isinstance(x, ir.Const) else x
        value, _ = self.number_text(x) if isinstance(x, ir.Const) else self.spell(x)
        whole = own.kind != "float"
        if to.kind == "float" and value == "-0.0":  # Triton has no such number
            return self.spell(
                ir.Cast(ir.Mul(ir.Cast(ir.Const(0.0, ir.f32), ir.f32), ir.Const(-1.0, ir.f32)), to)
            )
        if isinstance(x, ir.Const) and (to.kind == "bool" or (whole and to.kind == "int")):
            value = repr(bool(x.value) if to.kind == "bool" else ir.wrapped(int(x.value), to))
        elif to.kind == "float" and (to is ir.bf16 or to.is_short):
            return f"{self.space}.full((), {value}, {self.type(ir.f32)}).to({self.type(to)})", POSTFIX
        elif to.kind != "float" and (not whole or to.kind == "bool" or to.bits < own.bits):
            through = own.memory if whole or own.bits >= 32 else ir.f32
            return f"{self.space}.full((), {value}, {self.type(through)}).to({self.type(to)})", POSTFIX
        return f"{self.space}.full((), {value}, {self.type(to)})", ATOM

    def function(self, name: str, args: tuple[ir.Expr, ...], e: ir.Expr) -> tuple[str, int]:
        lanes = self.lanes(e)
        return f"{self.space}.{name}({', '.join(self.fit(a, lanes) for a in args)})", POSTFIX

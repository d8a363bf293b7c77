"""Expressions as text for people: parentheses only where precedence needs them.

``text/printer.py`` shows every node, and its text parses back; here ``((qh * 2) + 0) + 1`` is ``qh*2 +
1``. The spelling is Python's, with ``and`` and ``or`` instead of ``&`` and ``|``.
"""

from __future__ import annotations

from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir.dtype import f32
from transconv.ir.node import Node
from transconv.ir.operations import Reduce, Spread
from transconv.ir.text.printer import PREFIX, ExprPrinter, Printer

# Precedence, weakest first: that of Python's `or`, `and`, comparisons, `^`, shifts, sums and products.
LEVEL = {ex.Or: 1, ex.And: 2, ex.Lt: 4, ex.Le: 4, ex.Eq: 4, ex.Ne: 4, ex.Xor: 5, ex.Shl: 6,
         ex.Shr: 6, ex.Add: 7, ex.Sub: 7, ex.Mul: 8, ex.Div: 8, ex.FloorDiv: 8, ex.Mod: 8}
SIGN = {ex.Or: " or ", ex.And: " and ", ex.Lt: " < ", ex.Le: " <= ", ex.Eq: " == ", ex.Ne: " != ",
        ex.Xor: " ^ ", ex.Shl: " << ", ex.Shr: " >> ", ex.Add: " + ", ex.Sub: " - ", ex.Mul: "*",
        ex.Div: " / ", ex.FloorDiv: " // ", ex.Mod: " % "}
UNARY, ATOM = 9, 10
WIDTH = 70  # characters of a statement, without indentation


class Reading(ExprPrinter):
    """Prints one expression, without additions of 0 and multiplications by 1."""

    def text(self, e: Node, top: bool = False) -> str:
        assert isinstance(e, ex.Expr)
        return self.spell(e)[0]

    def spell(self, e: ex.Expr) -> tuple[str, int]:
        """The text and its precedence."""
        e = _without_neutral(e)
        if isinstance(e, Spread):
            return self.spell(e.x)
        if isinstance(e, ex.Binary) and type(e) in LEVEL:
            return self.binary(e)
        if isinstance(e, ex.Unary) and type(e) in PREFIX:
            return f"{PREFIX[type(e)]}{self.inside(e.x, UNARY)}", UNARY
        if isinstance(e, ex.Const):
            return repr(e.value), UNARY if not isinstance(e.value, bool) and e.value < 0 else ATOM
        return super().text(e), ATOM

    def text_Reduce(self, e: Reduce) -> str:
        return f"{e.op}({self.text(e.x)}, over={e.lane.name})"

    def binary(self, e: ex.Binary) -> tuple[str, int]:
        level = LEVEL[type(e)]
        a, b = e.a, e.b
        if isinstance(e, ex.Add):
            positive = _negated(b)
            if positive is not None:  # print a + -3 as a - 3
                return f"{self.inside(a, level)} - {self.inside(positive, level + 1)}", level
            if (positive := _negated(a)) is not None and _negated(b) is None:
                return f"{self.inside(b, level)} - {self.inside(positive, level + 1)}", level
        tight = level + (1 if not isinstance(e, (ex.And, ex.Or, ex.Add)) else 0)
        # Python takes x % 2*64 as (x % 2)*64, but readers may not.
        apart = isinstance(e, ex.Mul) and isinstance(a, (ex.Div, ex.FloorDiv, ex.Mod))
        left = self.inside(a, level + (1 if apart or isinstance(e, ex.Compare) else 0))
        return f"{left}{SIGN[type(e)]}{self.inside(b, tight)}", level

    def inside(self, e: ex.Expr, level: int) -> str:
        text, strength = self.spell(e)
        return f"({text})" if strength < level else text


def _without_neutral(e: ex.Expr) -> ex.Expr:
    """``x + 0``, ``x + 0*3`` and ``x*1`` as ``x``, ``x + 1 + 1`` as ``x + 2``. Such terms come from views
    whose coefficients are 0 or 1."""
    while True:
        match e:
            case ex.Add(ex.Add(x, ex.Const(a, t)), ex.Const(b)) if t.is_integer:
                e = ex.Add(x, ex.Const(a + b, t))
            case ex.Add(x, b) | ex.Sub(x, b) if _is_zero(b):
                e = x
            case ex.Add(a, x) if _is_zero(a):
                e = x
            case ex.Mul(x, ex.Const(1)) | ex.Mul(ex.Const(1), x):
                e = x
            case _:
                return e


def _is_zero(e: ex.Expr) -> bool:
    match e:
        case ex.Const(value):
            return value == 0 and not isinstance(value, bool)
        case ex.Mul(a, b):
            return e.dtype.is_integer and (_is_zero(a) or _is_zero(b))
    return False


def _negated(e: ex.Expr) -> ex.Expr | None:
    """``x`` for ``-x``, ``x*-1``, ``x*-4`` (as ``x*4``) and negative constants, else None."""
    match e:
        case ex.Neg(x):
            return x
        case ex.Const(value) if not isinstance(value, bool) and value < 0:
            return ex.Const(-value, e.type)
        case ex.Mul(x, ex.Const(value) as c) if not isinstance(value, bool) and value < 0:
            return x if value == -1 else ex.Mul(x, ex.Const(-value, c.type))
    return None


class ReadingStatements(Reading, Printer):
    """Prints statements and kernels, with their expressions printed by ``Reading``."""

    def lines(self, s: Node) -> list[str]:
        return [part for line in super().lines(s) for part in _folded(line)]

    def detail(self, text: str) -> str:
        return ""

    def lines_Seq(self, s: st.Seq) -> list[str]:
        return [line for part in s.stmts for line in self.lines(part)]

    def lines_Roles(self, s: xp.Roles) -> list[str]:
        return [line for role in s.roles for line in self.lines(role)]

    def lines_Comment(self, s: st.Comment) -> list[str]:
        return [f"# {line}" for line in s.text.splitlines()]

    def lines_Kernel(self, s: st.Kernel) -> list[str]:
        params = ", ".join(f"{p.name}: {p.dtype}" for p in s.params)
        return [*(f"# {n}" for n in s.notes), f"kernel {s.name}({params}):",
                *(f"    # {p}" for p in s.params), *self.block(s.body)]

    def lines_FuncCall(self, s: st.FuncCall) -> list[str]:
        """Print the precision of a product only for f32 operands: it has no effect on others."""
        if s.func.name == "dot" and all(isinstance(a, ex.Expr) and a.dtype.memory is not f32
                                        for a in s.args[1:]):
            return [f"dot({', '.join(self.argument(a) for a in s.args)})"]
        return super().lines_FuncCall(s)


def _folded(line: str) -> list[str]:
    """A line that is too long, broken before the mask of an access and between its conditions, before the
    extents of a box, or before the destination of a fetch."""
    opening = line.find("(") + 1
    if len(line) <= WIDTH:
        return [line]
    if line.startswith("fetch ") and " -> " in line:
        what, where = line.split(" -> ", 1)
        return [what, f"      -> {where}"]
    if 0 < opening < (cut := line.find(", mask=")):
        return [line[:cut + 1], *_conditions(line[cut + 2:], opening)]
    if 0 < opening < (cut := line.find(", extents=")):
        return [line[:cut + 1], " " * opening + line[cut + 2:]]
    return [line]


def _conditions(mask: str, indent: int) -> list[str]:
    """``mask=a and b and ..)`` wrapped between conditions."""
    first, *others = mask.split(" and ")
    lines = [" " * indent + first]
    for part in others:
        if len(lines[-1]) + len(f" and {part}") <= WIDTH:
            lines[-1] += f" and {part}"
        else:
            lines[-1] += " and"
            lines.append(" " * (indent + len("mask=")) + part)
    return lines


def readable(at: Node) -> str:
    """The text of an expression, a statement or a kernel for people; it does not parse back."""
    if isinstance(at, ex.Expr):
        return Reading().text(at)
    return "\n".join(ReadingStatements().lines(at))

"""The text of IR: the same spelling in dumps, traces, golden files and error messages."""

from __future__ import annotations

from typing import Any

from transconv.ir import access as ac
from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir.dtype import index
from transconv.ir.node import Node
from transconv.ir.tile_expr import Reduce, Spread

INFIX = {
    ex.Add: "+", ex.Sub: "-", ex.Mul: "*", ex.Div: "/", ex.FloorDiv: "//", ex.Mod: "%",
    ex.Shl: "<<", ex.Shr: ">>", ex.Lt: "<", ex.Le: "<=", ex.Eq: "==", ex.Ne: "!=",
    ex.And: "&", ex.Or: "|", ex.Xor: "^",
}
PREFIX = {ex.Neg: "-", ex.Not: "~"}


class ExprPrinter:
    """Prints expressions. Every binary operation is in parentheses but the outermost: what is
    printed shows the tree, so that ``a + b + c`` never hides which sum is taken first."""

    def text(self, e: Node, top: bool = False) -> str:
        method = getattr(self, f"text_{type(e).__name__}", None)
        if method is not None:
            return str(method(e))
        if isinstance(e, ex.Binary) and type(e) in INFIX:
            body = f"{self.text(e.a)} {INFIX[type(e)]} {self.text(e.b)}"
            return f"({body})"
        if isinstance(e, ex.Unary) and type(e) in PREFIX:
            return f"{PREFIX[type(e)]}{self.text(e.x)}"
        raise TypeError(f"no text form for the node class {type(e).__name__}")

    def text_Const(self, e: ex.Const) -> str:
        return repr(e.value)

    def text_Var(self, e: ex.Var) -> str:
        return e.name

    def text_Lane(self, e: ex.Lane) -> str:
        return f"{e.name}[0:{e.extent}]"

    def text_Min(self, e: ex.Min) -> str:
        return f"min({self.text(e.a)}, {self.text(e.b)})"

    def text_Max(self, e: ex.Max) -> str:
        return f"max({self.text(e.a)}, {self.text(e.b)})"

    def text_Select(self, e: ex.Select) -> str:
        return f"select({self.text(e.cond)}, {self.text(e.yes)}, {self.text(e.no)})"

    def text_Cast(self, e: ex.Cast) -> str:
        return f"{e.type}({_bare(self.text(e.x))})"

    def text_Call(self, e: ex.Call) -> str:
        return f"{e.name}({', '.join(_bare(self.text(a)) for a in e.args)})"

    def text_Load(self, e: ac.Load) -> str:
        mask = "" if e.mask is ex.TRUE else f", mask={_bare(self.text(e.mask))}"
        fill = f", fill={e.fill:g}" if e.fill else ""
        return f"load({e.tensor.name}, {_bare(self.text(e.offset))}{mask}{fill})"

    def text_BoxLoad(self, e: ac.BoxLoad) -> str:
        return f"box_load({e.tensor.name}, {self.box(e)})"

    def box(self, e: ac.BoxLoad | st.BoxStore) -> str:
        """Where a box begins, and how far it reaches along each dimension."""
        corner = ", ".join(_bare(self.text(c)) for c in e.corner)
        return f"at=[{corner}], extents=[{', '.join(map(str, e.extents))}]"

    def text_Piece(self, e: xp.Piece) -> str:
        return f"{e.buffer.name}[{_bare(self.text(e.slot))}]"

    def text_Spread(self, e: Spread) -> str:
        return self.text(e.x)

    def text_Reduce(self, e: Reduce) -> str:
        return f"{e.op}({_bare(self.text(e.x))}, over={e.lane.name})"


def _bare(text: str) -> str:
    """Drop the outermost parentheses where commas or a line end already delimit the text."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[1:-1] if i == len(text) - 1 else text
    return text


class Printer(ExprPrinter):
    """Prints statements as an indented block, one line per statement."""

    def block(self, s: Node, indent: int) -> list[str]:
        return [("    " * indent + line) for line in self.lines(s)]

    def lines(self, s: Node) -> list[str]:
        return list(getattr(self, f"lines_{type(s).__name__}")(s))

    def lines_Seq(self, s: st.Seq) -> list[str]:
        return [line for part in s.stmts for line in self.lines(part)]

    def lines_Let(self, s: st.Let) -> list[str]:
        other = s.var.type.is_integer and s.var.type is not index  # what is said of whole numbers alone
        kind = f": {s.var.type}" if other else ""
        return [f"let {s.var.name}{kind} = {_bare(self.text(s.value))}"]

    def lines_For(self, s: st.For) -> list[str]:
        stages = f" stages={s.stages}" if s.stages else ""
        kind = "" if s.kind == "serial" else f" {s.kind}"
        kind += f" programs={s.programs}" if s.programs else ""
        start = _bare(self.text(s.start))
        until = "" if s.until is None else f" until {_bare(self.text(s.until))}"
        return [f"for {s.var.name} in {start}..{s.stop}{until}{kind}{stages}:", *self.block(s.body, 1)]

    def lines_If(self, s: st.If) -> list[str]:
        out = [f"if {_bare(self.text(s.cond))}:", *self.block(s.then, 1)]
        return out if s.other is None else [*out, "else:", *self.block(s.other, 1)]

    def lines_Alloc(self, s: st.Alloc) -> list[str]:
        shape = ", ".join(f"{x.name}:{x.extent}" for x in s.lanes)
        tile = f"[{shape}]" if shape else ""
        return [f"{s.scope} {s.var.name}: {s.var.type}{tile} = {_bare(self.text(s.init))}"]

    def lines_Update(self, s: st.Update) -> list[str]:
        return [f"{s.var.name} = {_bare(self.text(s.value))}"]

    def lines_Store(self, s: st.Store) -> list[str]:
        mask = "" if s.mask is ex.TRUE else f", mask={_bare(self.text(s.mask))}"
        target = f"{s.tensor.name}, {_bare(self.text(s.offset))}"
        return [f"store({target}, {_bare(self.text(s.value))}{mask})"]

    def lines_BoxStore(self, s: st.BoxStore) -> list[str]:
        return [f"box_store({s.tensor.name}, {self.box(s)}, {_bare(self.text(s.value))})"]

    def lines_FuncCall(self, s: st.FuncCall) -> list[str]:
        return [f"{s.func}({', '.join(self.argument(a) for a in s.args)})"]

    def lines_Shared(self, s: xp.Shared) -> list[str]:
        if isinstance(s.what, xp.Barrier):
            return [f"barrier {s.what.name}[{s.what.slots}]"]
        shape = ", ".join(map(str, s.what.extents))
        below = "below " if s.what.below else ""
        members = f"{s.what.members} {below}x " if s.what.members > 1 else ""
        return [f"shared {s.what.name}[{s.what.slots}]: {members}{s.what.type}[{shape}]"]

    def lines_Fetch(self, s: xp.Fetch) -> list[str]:
        corner = ", ".join(_bare(self.text(c)) for c in s.corner)
        member = f".{self.text(s.piece.member)}" if s.piece.buffer.members > 1 else ""
        lands = f"{s.barrier.name}[{_bare(self.text(s.slot))}]"
        return [f"fetch {s.tensor.name} at=[{corner}] -> {self.text(s.piece)}{member}, then {lands}"]

    def lines_Put(self, s: xp.Put) -> list[str]:
        return [f"put {self.text(s.piece)} = {_bare(self.text(s.value))}"]

    def lines_Send(self, s: xp.Send) -> list[str]:
        corner = ", ".join(_bare(self.text(c)) for c in s.corner)
        return [f"send {self.text(s.piece)} -> {s.tensor.name} at=[{corner}]"]

    def lines_Roles(self, s: xp.Roles) -> list[str]:
        return [line for role in s.roles for line in self.lines(role)]

    def lines_Role(self, s: xp.Role) -> list[str]:
        registers = f" registers={s.registers}" if s.registers else ""
        return [f"role {s.name} warps={s.warps}{registers}:", *self.block(s.body, 1)]

    def argument(self, a: Any) -> str:
        return _bare(self.text(a)) if isinstance(a, ex.Expr) else str(a.name)

    def lines_Comment(self, s: st.Comment) -> list[str]:
        return [f"# {line}" for line in s.text.splitlines()]

    def lines_Kernel(self, s: st.Kernel) -> list[str]:
        params = ", ".join(f"{p.name}: {p.dtype}" for p in s.params)
        notes = [f"# {n}" for n in s.notes]
        tensors = [f"# {p}" for p in s.params]
        return [*notes, f"kernel {s.name}({params}):", *("    " + t for t in tensors),
                *self.block(s.body, 1)]


def text(at: Node) -> str:
    """The printed form of any expression or statement."""
    if isinstance(at, ex.Expr):
        return ExprPrinter().text(at)
    return "\n".join(Printer().lines(at))

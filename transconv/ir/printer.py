"""The text form of the IR, used in dumps, traces and error messages, and a shorter one for people.

Different nodes have different texts, and ``Kernel.parse`` reads a kernel's text back. Each name is
defined once: variables where they are bound, all else in the kernel's header. The text of an expression
alone has no header.

    kernel scale(x: f16, y: f16):
        sizes M=8 in 1..99, N=64 in 8..4096, N % 8 == 0    arguments: example, range, requirements
        # x: 8a64b [m=8 n=64]                              the tensors, in the order of the call
        # x_copy: 64a8b [n=64 m=8], copy of x
        # z: 8a64b [m=8 n=64], any [M, N]                  its sizes are arguments; 8 and 64 are examples
        lanes m[0:8 axis=1 M] n[0:64 axis=2 N]             the body writes m[0:8]
        box x = [m[0:8], n[0:64]]                          the position of each lane in boxes of x
        piece ring = [m[0:8], n[0:64]] of 0                the same in slots of ring, and which box

``readable`` has parentheses only where precedence needs them: ``((qh * 2) + 0) + 1`` is ``qh*2 + 1``. Its
spelling is Python's, with ``and`` and ``or`` instead of ``&`` and ``|``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir import tensor as ac
from transconv.ir.dtype import DTYPES, boolean, f32, index
from transconv.ir.functions.calls import REDUCERS
from transconv.ir.node import Node
from transconv.ir.operations import Call, Cast, Gather, Reduce, Renamed, Running, Select, Spread
from transconv.ir.visit import find, lanes_of, walk

PREFIX = {ex.Neg: "-", ex.Not: "~"}
LITERAL = {bool: boolean, int: index, float: f32}  # the types of literals that are printed without one
FORMS = ("select", "min", "max", "load", "box_load", "spread", "renamed")


class ExprPrinter:
    """Prints expressions. Nested binary operations are in parentheses, so that the text shows the tree:
    ``a + b + c`` would hide which sum is computed first. ``header``: that of the kernel, if any."""

    def __init__(self, header: Header | None = None) -> None:
        self.header = header

    def text(self, e: Node, top: bool = False) -> str:
        method = getattr(self, f"text_{type(e).__name__}", None)
        if method is not None:
            return str(method(e))
        if isinstance(e, ex.Binary) and type(e) in ex.INFIX:
            body = f"{self.text(e.a)} {ex.INFIX[type(e)]} {self.text(e.b)}"
            return f"({body})"
        if isinstance(e, ex.Unary) and type(e) in PREFIX:
            inside = self.text(e.x)
            inside = f"({inside})" if isinstance(e.x, ex.Const) else inside  # -(3) is not -3
            return f"{PREFIX[type(e)]}{inside}"
        raise TypeError(f"no text form for the node class {type(e).__name__}")

    def text_Const(self, e: ex.Const) -> str:
        usual = e.type is LITERAL[type(e.value)]
        return f"{e.value!r}" if usual else f"{e.value!r}:{e.type}"

    def text_Var(self, e: ex.Var) -> str:
        return e.name

    def text_Lane(self, e: ex.Lane) -> str:
        return f"{e.name}[0:{e.extent}{self.suffix(e)}]"

    def suffix(self, lane: ex.Lane) -> str:
        """A lane's axis and kind, where the header does not have this lane."""
        return "" if self.header is None else self.header.suffix(lane)

    def text_Min(self, e: ex.Min) -> str:
        return f"min({self.text(e.a)}, {self.text(e.b)})"

    def text_Max(self, e: ex.Max) -> str:
        return f"max({self.text(e.a)}, {self.text(e.b)})"

    def text_Select(self, e: Select) -> str:
        return f"select({self.text(e.cond)}, {self.text(e.yes)}, {self.text(e.no)})"

    def text_Cast(self, e: Cast) -> str:
        return f"{e.type}({_bare(self.text(e.x))})"

    def text_Call(self, e: Call) -> str:
        taken = e.name in DTYPES or e.name in FORMS or e.name in REDUCERS
        return f"{'call ' * taken}{e.name}({self.several(e.args)})"

    def several(self, exprs: tuple[ex.Expr, ...]) -> str:
        return ", ".join(_bare(self.text(e)) for e in exprs)

    def text_Load(self, e: ac.Load) -> str:
        mask = "" if e.mask is ex.TRUE else f", mask={_bare(self.text(e.mask))}"
        fill = "" if repr(e.fill) == "0.0" else f", fill={e.fill!r}"
        return f"load({e.tensor.name}, {_bare(self.text(e.offset))}{mask}{fill})"

    def text_BoxLoad(self, e: ac.BoxLoad) -> str:
        return f"box_load({e.tensor.name}, {self.box(e)})"

    def box(self, e: ac.BoxLoad | st.BoxStore) -> str:
        """The corner and the extents of a box; ``within`` where it differs from the header's."""
        known = self.header is None or self.header.boxes.get(e.tensor.name) == e.within
        within = "" if known else f", within=[{self.several(e.within)}]"
        return f"at=[{self.several(e.corner)}], extents=[{', '.join(map(str, e.extents))}]{within}"

    def text_SlotTile(self, e: st.SlotTile) -> str:
        text = f"{e.buffer.name}[{_bare(self.text(e.slot))}]"
        if self.header is None:
            return text
        member, within = self.header.pieces.get(e.buffer.name, (None, None))
        if e.member is not member:
            inside = self.text(e.member)
            text += f".({inside})" if isinstance(e.member, (st.SlotTile, ex.Unary)) else f".{inside}"
        return text if e.within == within else f"{text} within=[{self.several(e.within)}]"

    def text_Spread(self, e: Spread) -> str:
        return f"spread({_bare(self.text(e.x))}, over=[{self.several(e.lanes)}])"

    def text_Renamed(self, e: Renamed) -> str:
        x = _bare(self.text(e.x))
        return f"renamed({x}, old=[{self.several(e.old)}], new=[{self.several(e.new)}])"

    def text_Running(self, e: Running) -> str:
        return f"running_{e.op}({_bare(self.text(e.x))}, over={self.text(e.lane)})"

    def text_Gather(self, e: Gather) -> str:
        x = _bare(self.text(e.x))
        return f"gather({x}, along=[{self.several(e.lanes)}], at=[{self.several(e.places)}])"

    def text_Reduce(self, e: Reduce) -> str:
        return f"{e.op}({_bare(self.text(e.x))}, over={self.text(e.lane)})"


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

    def detail(self, text: str) -> str:
        """Text that the parser needs and ``readable`` leaves out."""
        return text

    def block(self, s: Node, indent: int = 1) -> list[str]:
        return [("    " * indent + line) for line in self.lines(s)]

    def lines(self, s: Node) -> list[str]:
        return list(getattr(self, f"lines_{type(s).__name__}")(s))

    def lines_Seq(self, s: st.Seq) -> list[str]:
        """The lines of the parts. ``seq:`` marks a sequence within another, and one of one statement."""
        if len(s.stmts) == 1:
            return ["seq:", *("    " + line for line in self.part(s.stmts[0]))]
        return [line for part in s.stmts for line in self.part(part)]

    def part(self, s: st.Stmt) -> list[str]:
        if isinstance(s, st.Seq) and len(s.stmts) != 1:
            return ["seq:", *self.block(s)]
        return self.lines(s)

    def lines_Let(self, s: st.Let) -> list[str]:
        value = _bare(self.text(s.value))  # first, as its TypeError is clearer than one from ``dtype``
        typed = "" if s.var.type is s.value.dtype else self.detail(f": {s.var.type}")
        if s.var.type.is_integer and s.var.type is not index:  # ``readable`` prints these types, too
            typed = f": {s.var.type}"
        origin = self.detail(f" from {s.origin}") if s.origin else ""
        return [f"let {s.var.name}{typed}{origin} = {value}"]

    def lines_For(self, s: st.For) -> list[str]:
        typed = "" if s.var.type is index else self.detail(f": {s.var.type}")
        bounds = f"{_bare(self.text(s.start))}..{s.stop}"
        bounds += "" if s.until is None else f" until {_bare(self.text(s.until))}"
        words = "" if s.kind == "serial" else f" {s.kind}"
        words += self.detail(f" side={s.side}") if s.side else ""
        words += f" programs={s.programs}" if s.programs else ""
        words += f" stages={s.stages}" if s.stages else ""
        return [f"for {s.var.name}{typed} in {bounds}{words}:", *self.block(s.body)]

    def lines_If(self, s: st.If) -> list[str]:
        out = [f"if {_bare(self.text(s.cond))}:", *self.block(s.then)]
        return out if s.other is None else [*out, "else:", *self.block(s.other)]

    def lines_Alloc(self, s: st.Alloc) -> list[str]:
        shape = ", ".join(f"{x.name}:{x.extent}{self.suffix(x)}" for x in s.lanes)
        tile = f"[{shape}]" if shape else ""
        return [f"{s.scope} {s.var.name}: {s.var.type}{tile} = {_bare(self.text(s.init))}"]

    def lines_Update(self, s: st.Update) -> list[str]:
        return [f"{s.var.name} = {_bare(self.text(s.value))}"]

    def lines_Store(self, s: st.Store) -> list[str]:
        mask = "" if s.mask is ex.TRUE else f", mask={_bare(self.text(s.mask))}"
        return [f"store({s.tensor.name}, {self.several((s.offset, s.value))}{mask})"]

    def lines_BoxStore(self, s: st.BoxStore) -> list[str]:
        return [f"box_store({s.tensor.name}, {self.box(s)}, {_bare(self.text(s.value))})"]

    def lines_FuncCall(self, s: st.FuncCall) -> list[str]:
        return [f"{s.func}({', '.join(self.argument(a) for a in s.args)})"]

    def lines_Shared(self, s: st.Shared) -> list[str]:
        if isinstance(s.what, st.Barrier):
            arrivals = "" if s.what.arrivals == 1 else self.detail(f" arrivals={s.what.arrivals}")
            return [f"barrier {s.what.name}[{s.what.slots}]{arrivals}"]
        shape = ", ".join(map(str, s.what.extents))
        below = "below " if s.what.below else ""
        members = f"{s.what.members} {below}x " if below or s.what.members != 1 else ""
        return [f"shared {s.what.name}[{s.what.slots}]: {members}{s.what.type}[{shape}]"]

    def lines_Fetch(self, s: st.Fetch) -> list[str]:
        corner = self.several(s.corner)
        lands = f"{s.barrier.name}[{_bare(self.text(s.slot))}]"
        return [f"fetch {s.tensor.name} at=[{corner}] -> {self.target(s.piece)}, then {lands}"]

    def target(self, piece: st.SlotTile) -> str:
        """The piece that a box is fetched to, with its box of the slot also where there is no header."""
        member = piece.buffer.members > 1 and self.header is None
        return self.text(piece) + (f".{self.text(piece.member)}" if member else "")

    def lines_Put(self, s: st.Put) -> list[str]:
        return [f"put {self.text(s.piece)} = {_bare(self.text(s.value))}"]

    def lines_Send(self, s: st.Send) -> list[str]:
        return [f"send {self.text(s.piece)} -> {s.tensor.name} at=[{self.several(s.corner)}]"]

    def lines_Roles(self, s: st.Roles) -> list[str]:
        return ["roles:", *("    " + line for role in s.roles for line in self.lines(role))]

    def lines_Role(self, s: st.Role) -> list[str]:
        registers = f" registers={s.registers}" if s.registers else ""
        return [f"role {s.name} warps={s.warps}{registers}:", *self.block(s.body)]

    def argument(self, a: Any) -> str:
        return _bare(self.text(a)) if isinstance(a, ex.Expr) else str(a.name)

    def lines_Comment(self, s: st.Comment) -> list[str]:
        return _commented(s.text)

    def lines_Kernel(self, s: st.Kernel) -> list[str]:
        params = ", ".join(f"{p.name}: {p.dtype}" for p in s.params)
        notes = [line for n in s.notes for line in _commented(n)]
        self.header = Header.of(s)
        sizes = [f"sizes {s.sizes}"] if s.sizes else []
        about = [*sizes, *(f"# {tensor_line(p)}" for p in s.params), *self.header_lines(self.header)]
        return [
            *notes,
            f"kernel {s.name}({params}):",
            *("    " + line for line in about),
            *self.block(s.body),
        ]

    def header_lines(self, header: Header) -> list[str]:
        """The lines that define the lanes, boxes and pieces of the body."""
        lanes = sorted(header.lanes.values(), key=lambda x: (x.axis, x.name, x.extent))
        names = [f"{x.name}[0:{x.extent}{axis_and_kind(x)}]" for x in lanes]
        lines = [f"lanes {' '.join(names)}"] if names else []
        lines += [f"box {name} = [{self.several(within)}]" for name, within in header.boxes.items()]
        return lines + [
            f"piece {name} = [{self.several(within)}] of {_bare(self.text(member))}"
            for name, (member, within) in header.pieces.items()
        ]


def _commented(text: str) -> list[str]:
    """Lines of one comment: ``#`` before the first, ``#|`` before those that continue it."""
    first, *others = text.split("\n")
    return [f"# {first}", *(f"#| {line}" for line in others)]


def text(at: Node) -> str:
    """The printed form of any expression or statement."""
    if isinstance(at, ex.Expr):
        return ExprPrinter().text(at)
    return "\n".join(Printer().lines(at))


Within = tuple[ex.Expr, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """Lanes by name and extent, ``within`` of boxes by tensor, ``member, within`` of pieces by buffer.
    The body prints these only where they differ from the header."""

    lanes: dict[tuple[str, int], ex.Lane]
    boxes: dict[str, Within]
    pieces: dict[str, tuple[ex.Expr, Within]]

    @staticmethod
    def of(kernel: st.Kernel) -> Header:
        """The header of a kernel: its first lane of each name, box of each tensor and piece of each buffer
        whose positions depend on lanes alone."""
        boxes: dict[str, Within] = {}
        boxed: list[ac.BoxLoad | st.BoxStore] = [*find(kernel, ac.BoxLoad), *find(kernel, st.BoxStore)]
        for box in boxed:
            if _over_lanes(box.within):
                boxes.setdefault(box.tensor.name, box.within)
        slots: dict[str, tuple[ex.Expr, Within]] = {}
        for piece in sorted(find(kernel, st.SlotTile), key=lambda p: not lanes_of(p.member)):
            if _over_lanes((piece.member, *piece.within)):
                slots.setdefault(piece.buffer.name, (piece.member, piece.within))
        return Header({(x.name, x.extent): x for x in reversed(find(kernel, ex.Lane))}, boxes, slots)

    def suffix(self, lane: ex.Lane) -> str:
        """A lane's axis and kind; empty where the header has this lane."""
        return "" if self.lanes.get((lane.name, lane.extent)) is lane else axis_and_kind(lane)


def axis_and_kind(lane: ex.Lane) -> str:
    """`` axis=1 M``: what the text of a lane has after its name and extent."""
    return f" axis={lane.axis}" + (f" {lane.kind}" if lane.kind else "")


def tensor_line(t: ac.Tensor) -> str:
    """The header's line about a tensor: everything but its type."""
    words = (
        (t.copy_of, f"copy of {t.copy_of}"),
        (t.parts_of, f"parts of {t.parts_of}"),
        (t.planes, "planes"),
        (t.number, "number"),
        (t.extents, f"any [{', '.join(map(str, t.extents))}]"),
        (t.pitches, f"apart [{', '.join(map(str, t.pitches))}]"),
        (t.every, f"every [{', '.join(map(str, t.every))}]"),
    )
    return ", ".join([str(t), *(text for holds, text in words if holds)])


def _over_lanes(exprs: Iterable[ex.Expr]) -> bool:
    """Whether expressions mention only lanes and constants, so that the header can print them."""
    return not any(isinstance(n, (ex.Var, ac.MemoryRead, st.SlotTile)) for e in exprs for n in walk(e))


# Precedence, weakest first: that of Python's `or`, `and`, comparisons, `^`, shifts, sums and products.
PRECEDENCE = (
    (ex.Or,),
    (ex.And,),
    (ex.Lt, ex.Le, ex.Eq, ex.Ne),
    (ex.Xor,),
    (ex.Shl, ex.Shr),
    (ex.Add, ex.Sub),
    (ex.Mul, ex.Div, ex.FloorDiv, ex.Mod),
)
LEVEL: dict[type[ex.Binary], int] = {
    kind: level for level, kinds in enumerate(PRECEDENCE, 1) for kind in kinds
}
SIGN = {kind: f" {sign} " for kind, sign in ex.INFIX.items()}
SIGN |= {ex.Or: " or ", ex.And: " and ", ex.Mul: "*"}
UNARY, ATOM = len(PRECEDENCE) + 1, len(PRECEDENCE) + 2
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

    def lines_Roles(self, s: st.Roles) -> list[str]:
        return [line for role in s.roles for line in self.lines(role)]

    def lines_Comment(self, s: st.Comment) -> list[str]:
        return [f"# {line}" for line in s.text.splitlines()]

    def lines_Kernel(self, s: st.Kernel) -> list[str]:
        params = ", ".join(f"{p.name}: {p.dtype}" for p in s.params)
        return [
            *(f"# {n}" for n in s.notes),
            f"kernel {s.name}({params}):",
            *(f"    # {p}" for p in s.params),
            *self.block(s.body),
        ]

    def lines_FuncCall(self, s: st.FuncCall) -> list[str]:
        """Print the precision of a product only for f32 operands: it has no effect on others."""
        if s.func.name == "dot" and all(
            isinstance(a, ex.Expr) and a.dtype.memory is not f32 for a in s.args[1:]
        ):
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
        return [line[: cut + 1], *_conditions(line[cut + 2 :], opening)]
    if 0 < opening < (cut := line.find(", extents=")):
        return [line[: cut + 1], " " * opening + line[cut + 2 :]]
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

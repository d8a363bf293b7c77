"""Parses expressions as the printer writes them: nested operations are in parentheses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from transconv.errors import KernelError
from transconv.ir import access as ac
from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir.dtype import DTYPES
from transconv.ir.functions.reductions import REDUCERS
from transconv.ir.operations import Call, Cast, Select
from transconv.ir.reader.words import NUMBER, LineWords
from transconv.ir.rules.names import NAME
from transconv.ir.tensor import Tensor
from transconv.ir.text.header import Header
from transconv.ir.text.printer import INFIX, LITERAL
from transconv.ir.tile_expr import Reduce, Renamed, Spread

OPERATIONS = {sign: node for node, sign in INFIX.items()}
LITERALS = {"True": True, "False": False, "inf": float("inf"), "nan": float("nan")}


@dataclass(frozen=True, slots=True)
class ReaderScope:
    """The meaning of names. ``variables`` and ``rings`` are those of one block; binding adds to them in
    place."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    header: Header = field(default_factory=lambda: Header({}, {}, {}))
    variables: dict[str, ex.Var] = field(default_factory=dict)
    rings: dict[str, xp.SmemRing | xp.Barrier] = field(default_factory=dict)

    def inner(self) -> ReaderScope:
        """The scope of a block inside this one."""
        return replace(self, variables=dict(self.variables), rings=dict(self.rings))

    def bind(self, var: ex.Var) -> ex.Var:
        self.variables[var.name] = var
        return var


class ExpressionParser:
    """Parses expressions from words, with the names of a scope."""

    def __init__(self, words: LineWords, scope: ReaderScope) -> None:
        self.words, self.scope = words, scope

    def expression(self) -> ex.Expr:
        """An operation without parentheses around it, or an operand."""
        left = self.operand()
        node = OPERATIONS.get(self.words.next())
        if node is None:
            return left
        self.words.take()
        made: ex.Expr = node(left, self.operand())
        return made

    def operand(self) -> ex.Expr:
        words = self.words
        if words.accept("("):
            inside = self.expression()
            words.expect(")")
            return inside
        if words.accept("~"):
            return ex.Not(self.operand())
        if words.accept("-"):
            literal = NUMBER.fullmatch(words.next()) or words.next() in ("inf", "nan")
            return self.literal(-1) if literal else ex.Neg(self.operand())
        if NUMBER.fullmatch(words.next()) or words.next() in LITERALS:
            return self.literal(1)
        return self.named()

    def literal(self, sign: int) -> ex.Const:
        words, value = self.words, self.value(sign)
        if words.next() == ":" and words.next(1) in DTYPES:
            words.take()
            return ex.Const(value, words.type())
        return ex.Const(value, LITERAL[type(value)])

    def value(self, sign: int = 1) -> int | float | bool:
        """A number, with or without a sign before it."""
        sign = -sign if self.words.accept("-") else sign
        word = self.words.next()
        found = LITERALS[self.words.take()] if word in LITERALS else self.words.number()
        return -found if sign < 0 else found

    def named(self) -> ex.Expr:
        words = self.words
        marked = words.next() == "call" and NAME.fullmatch(words.next(1)) is not None
        if marked:
            words.take()
        name = words.name("an expression")
        if words.accept("("):
            made = self.called(name, marked)
            words.expect(")")
            return made
        if words.follows("[", "0", ":") and words.next(3).isdigit():
            words.expect("[", "0", ":")
            lane = self.lane(name)
            words.expect("]")
            return lane
        if words.next() == "[":
            return self.piece(name)
        return self.variable(name)

    def variable(self, name: str) -> ex.Var:
        if name not in self.scope.variables:
            raise _unbound(name, "a variable that is bound here", self.scope.variables)
        return self.scope.variables[name]

    def tensor(self) -> Tensor:
        name = self.words.name("a tensor")
        if name not in self.scope.tensors:
            raise _unbound(name, "a tensor of the kernel", self.scope.tensors)
        return self.scope.tensors[name]

    def lane(self, name: str) -> ex.Lane:
        """The rest of a lane, from its extent on; without an axis here, it is the lane of the header."""
        extent = self.words.count()
        if self.words.accept("axis", "="):
            sign = -1 if self.words.accept("-") else 1
            axis = sign * self.words.count()
            kind = self.words.take() if NAME.fullmatch(self.words.next()) else ""
            return ex.Lane(name, extent, axis, kind)
        if (name, extent) not in self.scope.header.lanes:
            known = [f"{n}[0:{size}]" for n, size in self.scope.header.lanes]
            raise _unbound(f"{name}[0:{extent}]", "a lane of the header", known)
        return self.scope.header.lanes[name, extent]

    def piece(self, name: str) -> xp.SlotTile:
        buffer = self.scope.rings.get(name)
        if not isinstance(buffer, xp.SmemRing):
            known = [n for n, ring in self.scope.rings.items() if isinstance(ring, xp.SmemRing)]
            raise _unbound(name, "shared memory that is reserved here", known)
        self.words.expect("[")
        slot = self.expression()
        self.words.expect("]")
        member, within = self.scope.header.pieces.get(name, (None, None))
        member = self.operand() if self.words.accept(".") else member
        within = self.several() if self.words.accept("within", "=") else within
        if member is None or within is None:
            raise self.words.unlike(f"'.' and 'within=', as the header has no piece {name}")
        return xp.SlotTile(buffer, slot, member, within)

    def several(self) -> tuple[ex.Expr, ...]:
        """``[a, b + 1]``"""
        self.words.expect("[")
        found: list[ex.Expr] = []
        while not self.words.accept("]"):
            if found:
                self.words.expect(",")
            found.append(self.expression())
        return tuple(found)

    def called(self, name: str, marked: bool) -> ex.Expr:
        """What follows a name and an opening parenthesis."""
        method = getattr(self, f"form_{name}", None)
        if not marked and method is not None:
            made: ex.Expr = method()
            return made
        if not marked and name in DTYPES:
            return Cast(self.expression(), DTYPES[name])
        args = [self.expression()]
        while self.words.accept(","):
            if not marked and name in REDUCERS and self.words.accept("over", "="):
                return Reduce(name, args[0], self.one_lane())
            args.append(self.expression())
        if not marked and name in ("min", "max") and len(args) == 2:
            return (ex.Min if name == "min" else ex.Max)(*args)
        return Call(name, tuple(args))

    def form_select(self) -> ex.Expr:
        cond = self.expression()
        self.words.expect(",")
        yes = self.expression()
        self.words.expect(",")
        return Select(cond, yes, self.expression())

    def form_load(self) -> ex.Expr:
        tensor = self.tensor()
        self.words.expect(",")
        offset = self.expression()
        mask = self.expression() if self.words.accept(",", "mask", "=") else ex.TRUE
        fill = self.value() if self.words.accept(",", "fill", "=") else 0.0
        return ac.Load(tensor, offset, mask, fill)

    def form_box_load(self) -> ex.Expr:
        tensor = self.tensor()
        self.words.expect(",")
        return ac.BoxLoad(tensor, *self.box(tensor))

    def form_spread(self) -> ex.Expr:
        x = self.expression()
        return Spread(x, self.lanes("over"))

    def form_renamed(self) -> ex.Expr:
        x = self.expression()
        return Renamed(x, self.lanes("old"), self.lanes("new"))

    def lanes(self, word: str) -> tuple[ex.Lane, ...]:
        """``, word=[a[0:8], b[0:4]]``"""
        self.words.expect(",", word, "=", "[")
        lanes: list[ex.Lane] = []
        while not self.words.accept("]"):
            if lanes:
                self.words.expect(",")
            lanes.append(self.one_lane())
        return tuple(lanes)

    def one_lane(self) -> ex.Lane:
        found = self.expression()
        if not isinstance(found, ex.Lane):
            raise KernelError(f"found '{found}', expected a lane")
        return found

    def box(self, tensor: Tensor) -> tuple[tuple[ex.Expr, ...], tuple[ex.Expr, ...], tuple[int, ...]]:
        """``at=[..], extents=[..]`` and optionally ``within=[..]``, as corner, within, extents."""
        self.words.expect("at", "=")
        corner = self.several()
        self.words.expect(",", "extents", "=")
        extents = self.words.counts()
        within = self.scope.header.boxes.get(tensor.name)
        within = self.several() if self.words.accept(",", "within", "=") else within
        if within is None:
            raise self.words.unlike(f"', within=', as the header has no box {tensor.name}")
        return corner, within, extents


def _unbound(name: str, expected: str, known: Iterable[str]) -> KernelError:
    names = " ".join(known)
    return KernelError(f"found '{name}', expected {expected} ({names or 'there is none'})")

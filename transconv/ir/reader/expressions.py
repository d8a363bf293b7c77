"""The parser of expressions as the printer writes them: nested operations are in parentheses.

The tokenizer: a line of text as words and signs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir import tensor as ac
from transconv.ir.dtype import DTYPES, DType
from transconv.ir.expr import INFIX
from transconv.ir.functions.calls import REDUCERS
from transconv.ir.operations import Call, Cast, Gather, Reduce, Renamed, Running, Select, Spread
from transconv.ir.printer import LITERAL, Header
from transconv.ir.rules.names import DEEPEST, NAME, why_not_name, why_not_text
from transconv.ir.tensor import Tensor
from transconv.support import KernelError

OPERATIONS = {sign: node for node, sign in INFIX.items()}
LITERALS = {"True": True, "False": False, "inf": float("inf"), "nan": float("nan")}


@dataclass(frozen=True, slots=True)
class ReaderScope:
    """The meaning of names. ``variables`` and ``rings`` are those of one block; binding adds to them in
    place."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    header: Header = field(default_factory=lambda: Header({}, {}, {}))
    variables: dict[str, ex.Var] = field(default_factory=dict)
    rings: dict[str, st.SmemRing | st.Barrier] = field(default_factory=dict)

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

    def piece(self, name: str) -> st.SlotTile:
        buffer = self.scope.rings.get(name)
        if not isinstance(buffer, st.SmemRing):
            known = [n for n, ring in self.scope.rings.items() if isinstance(ring, st.SmemRing)]
            raise _unbound(name, "shared memory that is reserved here", known)
        self.words.expect("[")
        slot = self.expression()
        self.words.expect("]")
        member, within = self.scope.header.pieces.get(name, (None, None))
        member = self.operand() if self.words.accept(".") else member
        within = self.several() if self.words.accept("within", "=") else within
        if member is None or within is None:
            raise self.words.unlike(f"'.' and 'within=', as the header has no piece {name}")
        return st.SlotTile(buffer, slot, member, within)

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
            op = name.removeprefix("running_")
            if not marked and op in REDUCERS and self.words.accept("over", "="):
                return (Reduce if op == name else Running)(op, args[0], self.one_lane())
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

    def form_gather(self) -> ex.Expr:
        x, lanes = self.expression(), self.lanes("along")
        self.words.expect(",", "at", "=")
        return Gather(x, lanes, self.several())

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


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
WORD = re.compile(rf"\s*({NUMBER.pattern}|{NAME.pattern}|\.\.|->|//|<<|>>|<=|==|!=|\S)")
END = "the end of the line"


class LineWords:
    """The unread words of a line. Methods raise KernelError with what was found and what was expected, and
    so does the constructor, for a character that no text has and for too many open parentheses."""

    def __init__(self, text: str) -> None:
        if not text.startswith("#") and (reason := why_not_text(text)):
            raise KernelError(reason)
        self.words = [found[1] for found in WORD.finditer(text)]
        self.at = 0
        if _depth(self.words) > 2 * DEEPEST:  # casts are operations here
            raise KernelError(
                f"found more than {2 * DEEPEST} operations inside one another, expected fewer"
            )

    def next(self, ahead: int = 0) -> str:
        """The next word, or the one ``ahead`` words after it; empty beyond the end."""
        place = self.at + ahead
        return self.words[place] if place < len(self.words) else ""

    def follows(self, *words: str) -> bool:
        """Whether these words come next, in this order."""
        return all(self.next(i) == word for i, word in enumerate(words))

    def take(self) -> str:
        self.at += 1
        return self.words[self.at - 1]

    def accept(self, *words: str) -> bool:
        """Take these words if they come next."""
        if found := self.follows(*words):
            self.at += len(words)
        return found

    def expect(self, *words: str) -> None:
        for word in words:
            if not self.accept(word):
                raise self.unlike(f"'{word}'")

    def unlike(self, expected: str) -> KernelError:
        found = f"'{self.next()}'" if self.next() else END
        return KernelError(f"found {found}, expected {expected}")

    def end(self) -> None:
        if self.next():
            raise self.unlike(END)

    def name(self, what: str = "a name") -> str:
        """A word that may name something."""
        if not NAME.fullmatch(self.next()):
            raise self.unlike(what)
        return self.take()

    def new_name(self, what: str = "a name") -> str:
        """A name that the text gives to something."""
        name = self.name(what)
        if reason := why_not_name(name):
            raise KernelError(f"found '{name}', which cannot name anything: {reason}")
        return name

    def type(self) -> DType:
        if self.next() not in DTYPES:
            raise self.unlike(f"a type ({' '.join(DTYPES)})")
        return DTYPES[self.take()]

    def number(self) -> int | float:
        if not NUMBER.fullmatch(self.next()):
            raise self.unlike("a number")
        word = self.take()
        return int(word) if word.isdigit() else float(word)

    def count(self) -> int:
        if not self.next().isdigit():
            raise self.unlike("a whole number")
        return int(self.take())

    def counts(self) -> tuple[int, ...]:
        """``[4, 4, 16]``"""
        self.expect("[")
        found: list[int] = []
        while not self.accept("]"):
            if found:
                self.expect(",")
            found.append(self.count())
        return tuple(found)


def _depth(words: list[str]) -> int:
    """The most parentheses and signs that are open at once."""
    depth = signs = deepest = 0
    for word in words:
        signs = signs + 1 if word in ("-", "~") else 0
        depth += (word == "(") - (word == ")")
        deepest = max(deepest, depth + signs)
    return deepest

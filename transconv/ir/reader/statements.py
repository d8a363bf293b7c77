"""Parses statements, one a line, and the blocks indented below them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transconv.errors import KernelError
from transconv.ir import explicit as xp
from transconv.ir import stmt as st
from transconv.ir.dtype import index
from transconv.ir.expr import TRUE, Expr, Lane, Var
from transconv.ir.func import FUNCS, Func
from transconv.ir.node import Node
from transconv.ir.reader.expressions import ExpressionParser, ReaderScope
from transconv.ir.reader.words import LineWords
from transconv.ir.rules.names import NAME


@dataclass(slots=True)
class SourceLine:
    """A line without its indentation, and the lines indented under it."""

    number: int
    text: str
    below: list[SourceLine] = field(default_factory=list)


def block(lines: list[SourceLine], scope: ReaderScope) -> st.Stmt:
    """The statement of a block: a sequence, unless it has exactly one statement."""
    found = sequence(lines, scope)
    return found[0] if len(found) == 1 else st.Seq(found)


def sequence(lines: list[SourceLine], scope: ReaderScope) -> tuple[st.Stmt, ...]:
    """The statements of lines, in order."""
    found: list[st.Stmt] = []
    for line in lines:
        try:
            if line.text == "else:":
                found[-1:] = [_with_other(found[-1:], line, scope)]
            elif line.text.startswith("#|"):
                found[-1:] = [_continued(found[-1:], line)]
            else:
                found.append(Statement(line, scope).read())
        except KernelError as error:
            raise located(error, line.number) from None
    return tuple(found)


class Located(KernelError):
    """An error whose message has the number of its line."""


def located(error: KernelError, number: int) -> Located:
    """The error with a line number; an error of an inner line has one already."""
    return error if isinstance(error, Located) else Located(f"line {number}: {error}")


def _with_other(before: list[st.Stmt], line: SourceLine, scope: ReaderScope) -> st.Stmt:
    if not before or not isinstance(before[0], st.If) or before[0].other is not None:
        raise KernelError("found 'else', expected it behind the block of an 'if'")
    return st.If(before[0].cond, before[0].then, block(line.below, scope.inner()))


def _continued(before: list[st.Stmt], line: SourceLine) -> st.Stmt:
    if not before or not isinstance(before[0], st.Comment):
        raise KernelError("found '#|', expected it behind a comment")
    return st.Comment(f"{before[0].text}\n{comment(line.text)}")


def comment(text: str) -> str:
    """The text after ``# `` or ``#| ``."""
    return text.removeprefix("#").removeprefix("|").removeprefix(" ")


class Statement(ExpressionParser):
    """Parses the statement of one line and the lines below it."""

    def __init__(self, line: SourceLine, scope: ReaderScope) -> None:
        super().__init__(LineWords(line.text), scope)
        self.line = line

    def read(self) -> st.Stmt:
        if self.line.text.startswith("#"):
            self.words.at = len(self.words.words)
            made: st.Stmt = st.Comment(comment(self.line.text))
        elif self.words.next(1) == "=":
            var = self.variable(self.words.name())
            self.words.expect("=")
            made = st.Update(var, self.expression())
        else:
            word = self.words.name("a statement")
            read: Callable[[], st.Stmt] | None = getattr(self, f"line_{word}", None)
            made = read() if read is not None else self.function(word)
        self.words.end()
        if self.line.below and not isinstance(made, (st.For, st.If, st.Seq, xp.Roles, xp.Role)):
            raise located(KernelError("found a deeper line, expected one as deep as that before"),
                          self.line.below[0].number)
        return made

    def end_of_title(self) -> None:
        """The colon before a block."""
        self.words.expect(":")
        self.words.end()

    # ---- names and structure ----

    def line_let(self) -> st.Stmt:
        name = self.words.new_name()
        dtype = self.words.type() if self.words.accept(":") else None
        origin = self.words.name("an origin") if self.words.accept("from") else ""
        self.words.expect("=")
        value = self.expression()
        return st.Let(self.scope.bind(Var(name, dtype or value.dtype)), value, origin)

    def line_for(self) -> st.Stmt:
        name = self.words.new_name()
        var = Var(name, self.words.type() if self.words.accept(":") else index)
        self.words.expect("in")
        start = self.expression()
        self.words.expect("..")
        stop = self.words.count()
        until = self.expression() if self.words.accept("until") else None
        named = NAME.fullmatch(self.words.next()) and self.words.next(1) != "="
        kind = self.words.take() if named else "serial"
        side = self.words.name() if self.words.accept("side", "=") else ""
        programs = self.words.count() if self.words.accept("programs", "=") else 0
        stages = self.words.count() if self.words.accept("stages", "=") else 0
        self.end_of_title()
        inner = self.scope.inner()
        inner.bind(var)
        return st.For(var, stop, block(self.line.below, inner), kind, stages, programs, start, until, side)

    def line_if(self) -> st.Stmt:
        cond = self.expression()
        self.end_of_title()
        return st.If(cond, block(self.line.below, self.scope.inner()))

    def line_seq(self) -> st.Stmt:
        self.end_of_title()
        return st.Seq(sequence(self.line.below, self.scope))

    def line_register(self) -> st.Stmt:
        return self.allocated("register", self.words.new_name())

    def allocated(self, place: str, name: str) -> st.Stmt:
        self.words.expect(":")
        var, lanes = Var(name, self.words.type()), list[Lane]()
        if self.words.accept("["):
            while not self.words.accept("]"):
                if lanes:
                    self.words.expect(",")
                lane = self.words.name("a lane")
                self.words.expect(":")
                lanes.append(self.lane(lane))
        self.words.expect("=")
        init = self.expression()
        return st.Alloc(self.scope.bind(var), tuple(lanes), init, place)

    # ---- memory ----

    def line_store(self) -> st.Stmt:
        self.words.expect("(")
        tensor = self.tensor()
        self.words.expect(",")
        offset = self.expression()
        self.words.expect(",")
        value = self.expression()
        mask = self.expression() if self.words.accept(",", "mask", "=") else TRUE
        self.words.expect(")")
        return st.Store(tensor, offset, value, mask)

    def line_box_store(self) -> st.Stmt:
        self.words.expect("(")
        tensor = self.tensor()
        self.words.expect(",")
        corner, within, extents = self.box(tensor)
        self.words.expect(",")
        value = self.expression()
        self.words.expect(")")
        return st.BoxStore(tensor, corner, within, extents, value)

    def line_shared(self) -> st.Stmt:
        name = self.words.new_name()
        if not self.words.accept("["):
            return self.allocated("shared", name)
        slots = self.words.count()
        self.words.expect("]", ":")
        members, below = 1, False
        if self.words.next().isdigit():
            members, below = self.words.count(), self.words.accept("below")
            self.words.expect("x")
        dtype = self.words.type()
        buffer = xp.SmemRing(name, dtype, slots, self.words.counts(), members, below)
        self.scope.rings[name] = buffer
        return xp.Shared(buffer)

    def line_barrier(self) -> st.Stmt:
        name = self.words.new_name()
        self.words.expect("[")
        slots = self.words.count()
        self.words.expect("]")
        arrivals = self.words.count() if self.words.accept("arrivals", "=") else 1
        barrier = self.scope.rings[name] = xp.Barrier(name, slots, arrivals)
        return xp.Shared(barrier)

    def line_fetch(self) -> st.Stmt:
        tensor = self.tensor()
        self.words.expect("at", "=")
        corner = self.several()
        self.words.expect("->")
        piece = self.piece(self.words.name())
        self.words.expect(",", "then")
        barrier = self.barrier()
        self.words.expect("[")
        slot = self.expression()
        self.words.expect("]")
        return xp.Fetch(tensor, corner, piece, barrier, slot)

    def line_put(self) -> st.Stmt:
        piece = self.piece(self.words.name())
        self.words.expect("=")
        return xp.Put(piece, self.expression())

    def line_send(self) -> st.Stmt:
        piece = self.piece(self.words.name())
        self.words.expect("->")
        tensor = self.tensor()
        self.words.expect("at", "=")
        return xp.Send(tensor, self.several(), piece)

    # ---- roles and functions ----

    def line_roles(self) -> st.Stmt:
        self.end_of_title()
        found = sequence(self.line.below, self.scope)
        roles = tuple(s for s in found if isinstance(s, xp.Role))
        if len(roles) < len(found):
            raise KernelError("found another statement among roles, expected 'role'")
        return xp.Roles(roles)

    def line_role(self) -> st.Stmt:
        name = self.words.new_name()
        self.words.expect("warps", "=")
        warps = self.words.count()
        registers = self.words.count() if self.words.accept("registers", "=") else 0
        self.end_of_title()
        return xp.Role(name, warps, registers, block(self.line.below, self.scope.inner()))

    def barrier(self) -> xp.Barrier:
        name = self.words.name()
        found = self.scope.rings.get(name)
        if not isinstance(found, xp.Barrier):
            raise KernelError(f"found '{name}', expected a barrier that is reserved here")
        return found

    def function(self, name: str) -> st.Stmt:
        spec = FUNCS.get(name)
        if spec is None:
            self.words.at -= 1
            raise self.words.unlike(f"a statement or one of the functions {' '.join(FUNCS)}")
        attrs: list[tuple[str, str]] = []
        if self.words.accept("["):
            while not self.words.accept("]"):
                if attrs:
                    self.words.expect(",")
                key = self.words.name()
                self.words.expect("=")
                attrs.append((key, self.words.name("a word")))
        self.words.expect("(")
        args: list[Node] = []
        readers: dict[str, Callable[[], Any]] = {"tensor": self.tensor, "barrier": self.barrier}
        for param in spec.params:
            if args:
                self.words.expect(",")
            arg: Expr | Node = readers.get(param, self.expression)()
            args.append(arg)
        self.words.expect(")")
        return st.FuncCall(Func(name, tuple(attrs)), tuple(args))

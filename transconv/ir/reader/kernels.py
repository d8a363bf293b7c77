"""The parser of a whole kernel: notes, the line with its name, the header and the body.

Statements are parsed one a line, with the blocks indented below them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from transconv.ir import stmt as st
from transconv.ir.dtype import DTYPES, DType, index
from transconv.ir.expr import TRUE, Expr, Lane, Var
from transconv.ir.layout import LETTERS, Layout
from transconv.ir.node import Node
from transconv.ir.reader.expressions import ExpressionParser, LineWords, ReaderScope
from transconv.ir.rules.names import DEEPEST, NAME, why_not_text
from transconv.ir.sizes import Size, Sizes
from transconv.ir.stmt import FUNCS, Func, Kernel
from transconv.ir.tensor import Tensor
from transconv.support import KernelError, LayoutError

STEP = 4  # spaces of a block
TENSOR = re.compile(
    r"# (\w+): (.*?) \[(.*?)\](?: fetched as (\w+))?((?:, (?!any)[\w ]+)*)"
    r"(?:, any (\[.*?\]))?(?:, apart (\[.*?\]))?(?:, every \[([\d, ]+)\])?"
)
ABOUT = re.compile(r"(lanes|box|piece) \w+( =|\[)")


def parse_kernel(text: str) -> Kernel:
    """The kernel of a text that ``str`` printed. Raises KernelError with a message of one line: the
    number of the text's line, what was found and what was expected."""
    lines = _nested(text)
    notes = [*takewhile(lambda line: line.text.startswith("#"), lines)]
    titles = lines[len(notes) :]
    if not titles or not titles[0].text.startswith("kernel "):
        found = f"'{titles[0].text}'" if titles else "nothing"
        raise KernelError(
            f"line {titles[0].number if titles else 1}: found {found}, expected "
            "'kernel name(tensor: type, ...):'"
        )
    if len(titles) > 1:
        raise KernelError(f"line {titles[1].number}: found '{titles[1].text}', expected the end")
    title = titles[0]
    try:
        name, types = _title(LineWords(title.text))
    except KernelError as error:
        raise located(error, title.number) from None
    rest, sizes = title.below, None
    scope = ReaderScope()
    if rest and rest[0].text.startswith("sizes "):
        try:
            sizes = _sizes(rest[0], scope)
        except KernelError as error:
            raise located(error, rest[0].number) from None
        rest = rest[1:]
    tensors = _tensors(rest[: len(types)], types, title, scope)
    rest = rest[len(types) :]
    scope.tensors.update({t.name: t for t in tensors})
    while rest and ABOUT.match(rest[0].text):
        try:
            _about(rest[0], scope)
        except KernelError as error:
            raise located(error, rest[0].number) from None
        rest = rest[1:]
    return Kernel(name, tensors, block(rest, scope), _notes(notes), sizes)


def _nested(text: str) -> list[SourceLine]:
    """The lines of a text as a tree: each line is ``below`` the one that it is indented under."""
    top = SourceLine(0, "")
    path = [top]
    for number, line in enumerate(text.split("\n"), 1):
        body = line.lstrip(" ")
        if not body:
            continue
        deep, odd = divmod(len(line) - len(body), STEP)
        if odd or deep >= len(path):
            raise KernelError(
                f"line {number}: found {len(line) - len(body)} spaces before '{body}', "
                f"expected a multiple of {STEP}, at most {(len(path) - 1) * STEP}"
            )
        if deep > DEEPEST:
            raise KernelError(
                f"line {number}: found a block inside {deep} others, expected {DEEPEST} at most"
            )
        del path[deep + 1 :]
        path[-1].below.append(SourceLine(number, body))
        path.append(path[-1].below[-1])
    return top.below


def _notes(lines: list[SourceLine]) -> tuple[str, ...]:
    notes: list[str] = []
    for line in lines:
        if line.text.startswith("#|") and notes:
            notes[-1] += f"\n{comment(line.text)}"
        else:
            notes.append(comment(line.text))
    return tuple(notes)


def _title(words: LineWords) -> tuple[str, dict[str, DType]]:
    words.expect("kernel")
    name, types = words.new_name(), dict[str, DType]()
    words.expect("(")
    while not words.accept(")"):
        if types:
            words.expect(",")
        tensor = words.new_name("a tensor")
        if tensor in types:
            raise KernelError(f"found '{tensor}' twice, expected tensors of different names")
        words.expect(":")
        types[tensor] = words.type()
    words.expect(":")
    words.end()
    return name, types


def _sizes(line: SourceLine, scope: ReaderScope) -> Sizes:
    """The sizes that are arguments, and their requirements."""
    reader = ExpressionParser(LineWords(line.text), scope)
    words = reader.words
    words.expect("sizes")
    each: list[Size] = []
    where: list[Expr] = []
    while not (each or where) or words.accept(","):
        if words.next(1) != "=":
            where.append(reader.expression())
            continue
        name = words.new_name("a size")
        words.expect("=")
        like = words.count()
        words.expect("in")
        least = words.count()
        words.expect("..")
        each.append(Size(name, like, least, words.count()))
        scope.bind(each[-1].var)
    words.end()
    return Sizes(tuple(each), tuple(where))


def _tensors(
    lines: list[SourceLine], types: dict[str, DType], title: SourceLine, scope: ReaderScope
) -> tuple[Tensor, ...]:
    found = []
    for place, (name, dtype) in enumerate(types.items()):
        if place >= len(lines):
            raise KernelError(
                f"line {title.number}: found nothing about {name}, expected '# {name}: "
                "layout [dim=size ...]' below"
            )
        try:
            found.append(_tensor(lines[place].text, name, dtype, scope))
        except (KernelError, LayoutError) as error:
            raise KernelError(f"line {lines[place].number}: {error}") from None
    return tuple(found)


def _tensor(text: str, name: str, dtype: DType, scope: ReaderScope) -> Tensor:
    if reason := why_not_text(text):
        raise KernelError(reason)
    found = TENSOR.fullmatch(text)
    if found is None or found[1] != name:
        raise KernelError(f"found '{text}', expected '# {name}: layout [dim=size ...]'")
    sizes = [size.rpartition("=") for size in found[3].split()]
    if not all(dim and size.isdigit() for dim, _, size in sizes):
        raise KernelError(f"found [{found[3]}], expected sizes such as [n=8 c=64]")
    words = [word.rpartition(" ") for word in found[5].split(", ")[1:]]
    said = {before: word for before, _, word in words}
    flags = {word for before, _, word in words if not before}
    if wrong := (said.keys() - {"", "copy of", "parts of"}) | (flags - {"planes", "number"}):
        raise KernelError(f"found '{min(wrong)}', expected copy of, parts of, planes or number")
    if found[4] and found[4] not in DTYPES:
        raise KernelError(f"found 'fetched as {found[4]}', expected a type: {' '.join(DTYPES)}")
    layout = Layout.parse(found[2], dtype, letters=LETTERS[: len(sizes)])
    extents, pitches = (
        ExpressionParser(LineWords(sizes_of), scope).several() if sizes_of else ()
        for sizes_of in found.group(6, 7)
    )
    return Tensor(
        name,
        tuple(dim for dim, _, _ in sizes),
        tuple(int(size) for _, _, size in sizes),
        layout,
        DTYPES[found[4]] if found[4] else None,
        said.get("copy of", ""),
        said.get("parts of", ""),
        "planes" in flags,
        extents,
        pitches,
        "number" in flags,
        tuple(map(int, found[8].split(","))) if found[8] else (),
    )


def _about(line: SourceLine, scope: ReaderScope) -> None:
    """Add a ``lanes``, ``box`` or ``piece`` line to the header."""
    reader = ExpressionParser(LineWords(line.text), scope)
    words, header = reader.words, scope.header
    word = words.name()
    if word == "lanes":
        while words.next():
            lane = reader.named()
            if not isinstance(lane, Lane):
                raise KernelError(f"found '{lane}', expected a lane")
            header.lanes[lane.name, lane.extent] = lane
        return
    name = words.name()
    words.expect("=")
    within: tuple[Expr, ...] = reader.several()
    if word == "box":
        header.boxes[name] = within
    else:
        words.expect("of")
        header.pieces[name] = (reader.expression(), within)
    words.end()


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
        if self.line.below and not isinstance(made, (st.For, st.If, st.Seq, st.Roles, st.Role)):
            raise located(
                KernelError("found a deeper line, expected one as deep as that before"),
                self.line.below[0].number,
            )
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
        buffer = st.SmemRing(name, dtype, slots, self.words.counts(), members, below)
        self.scope.rings[name] = buffer
        return st.Shared(buffer)

    def line_barrier(self) -> st.Stmt:
        name = self.words.new_name()
        self.words.expect("[")
        slots = self.words.count()
        self.words.expect("]")
        arrivals = self.words.count() if self.words.accept("arrivals", "=") else 1
        barrier = self.scope.rings[name] = st.Barrier(name, slots, arrivals)
        return st.Shared(barrier)

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
        return st.Fetch(tensor, corner, piece, barrier, slot)

    def line_put(self) -> st.Stmt:
        piece = self.piece(self.words.name())
        self.words.expect("=")
        return st.Put(piece, self.expression())

    def line_send(self) -> st.Stmt:
        piece = self.piece(self.words.name())
        self.words.expect("->")
        tensor = self.tensor()
        self.words.expect("at", "=")
        return st.Send(tensor, self.several(), piece)

    # ---- roles and functions ----

    def line_roles(self) -> st.Stmt:
        self.end_of_title()
        found = sequence(self.line.below, self.scope)
        roles = tuple(s for s in found if isinstance(s, st.Role))
        if len(roles) < len(found):
            raise KernelError("found another statement among roles, expected 'role'")
        return st.Roles(roles)

    def line_role(self) -> st.Stmt:
        name = self.words.new_name()
        self.words.expect("warps", "=")
        warps = self.words.count()
        registers = self.words.count() if self.words.accept("registers", "=") else 0
        self.end_of_title()
        return st.Role(name, warps, registers, block(self.line.below, self.scope.inner()))

    def barrier(self) -> st.Barrier:
        name = self.words.name()
        found = self.scope.rings.get(name)
        if not isinstance(found, st.Barrier):
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

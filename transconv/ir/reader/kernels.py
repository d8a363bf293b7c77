"""Parses a whole kernel: notes, the line with its name, the header and the body."""

from __future__ import annotations

import re
from itertools import takewhile

from transconv.errors import KernelError, LayoutError
from transconv.ir.dtype import DTYPES, DType
from transconv.ir.expr import Expr, Lane
from transconv.ir.layout import Layout
from transconv.ir.reader.expressions import ExpressionParser, ReaderScope
from transconv.ir.reader.statements import SourceLine, block, comment, located
from transconv.ir.reader.words import LineWords
from transconv.ir.rules.names import DEEPEST, why_not_text
from transconv.ir.sizes import Size, Sizes
from transconv.ir.stmt import Kernel
from transconv.ir.tensor import Tensor
from transconv.ir.text.layout_text import LETTERS

STEP = 4  # spaces of a block
TENSOR = re.compile(r"# (\w+): (.*?) \[(.*?)\](?: fetched as (\w+))?((?:, (?!any)[\w ]+)*)"
                    r"(?:, any (\[.*?\]))?(?:, apart (\[.*?\]))?(?:, every \[([\d, ]+)\])?")
ABOUT = re.compile(r"(lanes|box|piece) \w+( =|\[)")


def parse_kernel(text: str) -> Kernel:
    """The kernel of a text that ``str`` printed. Raises KernelError with a message of one line: the
    number of the text's line, what was found and what was expected."""
    lines = _nested(text)
    notes = [*takewhile(lambda line: line.text.startswith("#"), lines)]
    titles = lines[len(notes):]
    if not titles or not titles[0].text.startswith("kernel "):
        found = f"'{titles[0].text}'" if titles else "nothing"
        raise KernelError(f"line {titles[0].number if titles else 1}: found {found}, expected "
                          "'kernel name(tensor: type, ...):'")
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
    tensors = _tensors(rest[:len(types)], types, title, scope)
    rest = rest[len(types):]
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
            raise KernelError(f"line {number}: found {len(line) - len(body)} spaces before '{body}', "
                              f"expected a multiple of {STEP}, at most {(len(path) - 1) * STEP}")
        if deep > DEEPEST:
            raise KernelError(f"line {number}: found a block inside {deep} others, expected {DEEPEST} at "
                              "most")
        del path[deep + 1:]
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


def _tensors(lines: list[SourceLine], types: dict[str, DType], title: SourceLine,
             scope: ReaderScope) -> tuple[Tensor, ...]:
    found = []
    for place, (name, dtype) in enumerate(types.items()):
        if place >= len(lines):
            raise KernelError(f"line {title.number}: found nothing about {name}, expected '# {name}: "
                              "layout [dim=size ...]' below")
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
    layout = Layout.parse(found[2], dtype, letters=LETTERS[:len(sizes)])
    extents, pitches = (ExpressionParser(LineWords(sizes_of), scope).several() if sizes_of else ()
                        for sizes_of in found.group(6, 7))
    return Tensor(name, tuple(dim for dim, _, _ in sizes), tuple(int(size) for _, _, size in sizes),
                  layout, DTYPES[found[4]] if found[4] else None, said.get("copy of", ""),
                  said.get("parts of", ""), "planes" in flags, extents, pitches, "number" in flags,
                  tuple(map(int, found[8].split(","))) if found[8] else ())


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

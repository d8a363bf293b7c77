"""Lists of problems and of layers to run: benchdnn batch files, and ``layers.json`` of networks.

A token of a batch file is an option or a descriptor. An option lists alternatives; a descriptor yields one
problem for each combination of the current alternatives of all options. ``#`` starts a comment, a trailing
backslash joins a token with the next one, ``--batch=FILE`` reads another file.

A layer is a named convolution of a network. A transposed convolution is stored as the problem whose BWD_D
is its forward direction; its data gradient is FWD of that problem."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.descriptor import Descriptor, parse_descriptor
from transconv.support import ProblemError, read_named

T = TypeVar("T")
Source = str | Path | Iterable[str]

OPTION_DIRECTIONS: dict[str, Prop | None] = {
    "": None,
    "FWD_D": Prop.FWD,
    "FWD_B": Prop.FWD,
    "FWD_I": Prop.FWD,
    "BWD_D": Prop.BWD_D,
    "BWD_W": Prop.BWD_W,
    "BWD_WB": Prop.BWD_W,
}
MAX_NESTING = 16
OPEN = (",", "+", ":", "=")  # what no token ends with


def _direction(word: str) -> Prop | None:
    word = word.upper()  # oneDNN's files have both
    if word not in OPTION_DIRECTIONS:
        raise ProblemError(
            f"direction '{word}' is unknown; expected one of {' '.join(filter(None, OPTION_DIRECTIONS))}"
        )
    return OPTION_DIRECTIONS[word]


def _minibatch(word: str) -> int:
    if not (word or "0").isdecimal():
        raise ProblemError(f"minibatch '{word}' is no number; expected --mb=N, 0 for its own")
    return int(word or "0")


# The parser of one alternative of each option; an empty text gives the default. Problems of a descriptor
# vary the first option slowest.
OPTIONS: dict[str, Callable[[str], Any]] = {
    "dir": _direction,
    "dt": lambda word: word or "f32",
    "stag": str,
    "wtag": str,
    "dtag": str,
    "mb": _minibatch,
}


@dataclass(slots=True)
class State:
    """The current alternatives of every option."""

    options: dict[str, list[Any]]

    @staticmethod
    def initial() -> State:
        return State({option: [read("")] for option, read in OPTIONS.items()})

    def set(self, option: str, value: str) -> None:
        """Set one option. Raises ProblemError for an unknown option or a bad value."""
        if option == "reset":
            self.options = State.initial().options
        elif option in OPTIONS:
            self.options[option] = [OPTIONS[option](word) for word in value.split(",")]
        else:
            raise ProblemError(
                f"option '--{option}' is unknown; expected one of "
                f"{' '.join('--' + name for name in ('batch', 'reset', *OPTIONS))}"
            )

    def problems(self, text: str) -> Iterator[tuple[ConvProblem, Prop | None]]:
        """The problems of one descriptor: the product of the alternatives."""
        shape = parse_descriptor(text)
        for values in itertools.product(*self.options.values()):
            now = dict(zip(self.options, values, strict=True))
            sized = replace(shape, mb=now["mb"] or shape.mb)
            tags = tuple(now[option] for option in ("stag", "wtag", "dtag"))
            yield (ConvProblem.of_descriptor(sized, now["dt"], tags if any(tags) else "nchw"), now["dir"])


def iter_problems(source: Source) -> Iterator[tuple[ConvProblem, Prop | None]]:
    """Yield (problem, direction) of a batch file or of its lines; the direction is None without ``--dir``.
    Raises ProblemError naming file and line, OSError for a missing file."""
    state = State.initial()
    return walk(source, state.set, lambda text, where: state.problems(text))


def read_problems(source: Source, *, prop: Prop | None = None) -> list[ConvProblem]:
    """The problems of a batch file or of its lines, in order. With ``prop``, only those that run in
    this direction (a list without ``--dir`` runs in all)."""
    return [p for p, way in iter_problems(source) if prop in (None, way) or way is None]


def walk(
    source: Source,
    option: Callable[[str, str], None],
    descriptor: Callable[[str, str], Iterable[T]],
    depth: int = 0,
) -> Iterator[T]:
    """Read a batch file, or lines, and the files that they name: call ``option(name, value)`` for each
    option, and yield from ``descriptor(text, where)`` for each descriptor. Raises ProblemError naming file
    and line."""
    path, lines = (None, source) if not isinstance(source, (str, Path)) else _open(source)
    for number, token in _tokens(lines):
        yield from take(token, option, descriptor, path, f"{path or 'list'}:{number}", depth)


def take(
    token: str,
    option: Callable[[str, str], None],
    descriptor: Callable[[str, str], Iterable[T]],
    path: Path | None,
    where: str,
    depth: int = 0,
) -> Iterator[T]:
    """One token of a batch, read in the file ``path`` at ``where``. See ``walk``."""
    name, _, value = token.removeprefix("--").partition("=")
    if name == "batch" and token.startswith("--"):
        if depth >= MAX_NESTING:
            raise ProblemError(f"{path}: batch files are nested {depth + 1} deep; expected no cycle")
        yield from walk(path.parent / value if path else Path(value), option, descriptor, depth + 1)
        return
    try:
        if token.startswith("--"):
            option(name, value)
        else:
            yield from descriptor(token, where)
    except ProblemError as error:
        raise ProblemError(f"{where}: {error}") from error


def _open(source: str | Path) -> tuple[Path, list[str]]:
    path = Path(source)
    try:
        return path, read_named(path, "a benchdnn batch file").splitlines()
    except ValueError as error:
        raise ProblemError(str(error)) from error


def _tokens(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Tokens with their line numbers, without comments; tokens that end in a backslash are joined with the
    next, and so are those before one that are not at their end."""
    glued = ""
    last: list[tuple[int, str]] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        for word in line.split():
            if word.startswith("#"):
                break
            if word == "\\" and last and last[0][1].endswith(OPEN):
                glued = last.pop()[1]
            elif word.endswith("\\"):
                glued += word[:-1]
            else:
                yield from last
                last, glued = [(number, glued + word)], ""
    yield from last
    if glued:
        yield number, glued


DIRECTIONS = ("fwd", "bwd_d", "bwd_w")
"""The directions of a layer."""
KINDS = ("dense", "first", "last", "grouped", "depthwise")
"""The kinds of layers."""
SCHEMA = "transconv-suite-1"
"""The schema of JSON files of layers."""
# A folded batch norm is a bias; the activation, and the residual before it, remain.
EPILOGUES = {
    "none": "",
    "relu": "relu",
    "bn_relu": "bias+relu",
    "bn_relu6": "bias+relu6",
    "bn_silu": "bias+silu",
    "bn_add_relu": "bias+res+relu",
    "add": "res",
    "gelu": "gelu",
}


@dataclass(frozen=True, slots=True)
class ListedLayer:
    """One layer: its shape (as an f32 nchw problem), and the epilogue that follows it in its network."""

    name: str
    shape: ConvProblem
    transposed: bool = False
    epilogue: str = ""
    tags: tuple[str, ...] = ()

    def problem(self, dtype: str = "bf16", layout: str = "nhwc", math: str = "ieee") -> ConvProblem:
        """The problem in a dtype and layout; the dtype ``tf32`` is f32 multiplied as tf32."""
        if dtype == "tf32":
            dtype, math = "f32", "tf32"
        p = replace(self.shape, math=math if dtype == "f32" else "tf32")
        p = p.with_dtype(dtype)
        return p if layout == "nchw" else p.with_layout(layout)

    def reduced(self, most: int) -> ListedLayer:
        """The layer with a batch of at most ``most``; unchanged for 0."""
        if not 0 < most < self.shape.mb:
            return self
        smaller = replace(parse_descriptor(self.shape.shape_text), mb=most)
        return replace(self, shape=ConvProblem.of_descriptor(smaller))

    def prop(self, direction: str) -> Prop:
        """The direction of the problem that is this direction of the layer."""
        if self.transposed and direction != "bwd_w":
            direction = {"fwd": "bwd_d", "bwd_d": "fwd"}[direction]
        return Prop(direction)

    @property
    def kind(self) -> str:
        """``depthwise`` (one input channel a group), ``dense`` (at least 32 channels a group on both
        sides), ``grouped`` (more than one group), ``first`` (fewer channels in than out or as many), or
        ``last``."""
        p = self.shape
        if p.g > 1 and p.icg == 1:
            return "depthwise"
        if min(p.icg, p.ocg) >= 32:
            return "dense"
        if p.g > 1:
            return "grouped"
        return "first" if p.icg <= p.ocg else "last"


def read(source: str | Path) -> list[ListedLayer]:
    """The layers of a ``.json`` file, of a benchdnn list, or of all files of a folder. Raises
    FileNotFoundError, ProblemError, or ValueError for what is no suite file."""
    path = Path(source)
    if path.is_dir():
        return [layer for p in sorted(path.iterdir()) if p.is_file() for layer in read(p)]
    if path.suffix == ".json":
        try:
            return from_json(json.loads(read_named(path, "a file of layers")))
        except (ValueError, RecursionError) as error:
            told = str(error).removeprefix(f"{path}: ")
            raise ValueError(f"{path}: {told}") from error
    return from_problems(read_problems(path), path.stem)


def from_problems(problems: Iterable[ConvProblem], stem: str) -> list[ListedLayer]:
    """One layer for each distinct shape; a problem without a name gets the list's name."""
    found: dict[ConvProblem, ListedLayer] = {}
    for p in problems:
        plain = replace(p.with_dtype("f32").with_layout("nchw"), math="tf32", name="")
        name = p.name or f"{stem}:{p.shape_text}"
        found.setdefault(plain, ListedLayer(name, plain))
    return list(found.values())


def from_json(data: dict[str, Any]) -> list[ListedLayer]:
    """The layers of a suite file; epilogues that are not in ``EPILOGUES`` are left out. Raises ValueError
    for an unknown schema or an incomplete row."""
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"layers of schema {schema!r}; expected {SCHEMA!r}")
    found = []
    for place, row in enumerate(data.get("layers", ()), 1):
        try:
            found.append(_layer(row))
        except KeyError as error:
            raise ValueError(f"layer {place} ({row.get('name', 'no name')}) has no {error}") from error
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"layer {place} makes no sense: {error}") from error
    return found


def _layer(row: dict[str, Any]) -> ListedLayer:
    outer, taps = tuple(row["in_size"]), tuple(row["kernel"])
    stride, dilation, pad = (tuple(row[x]) for x in ("stride", "dilation", "pad"))
    high = tuple(row.get("pad_high", pad))
    cin, cout = row["cin"], row["cout"]
    axes = tuple(zip(outer, taps, stride, dilation, pad, high, strict=True))
    if row["transposed"]:
        extra = row.get("output_padding", (0,) * len(outer))
        made = tuple(
            (n - 1) * s - lo - hi + (k - 1) * d + 1 + x
            for (n, k, s, d, lo, hi), x in zip(axes, extra, strict=True)
        )
        ic, oc, i, o = cout, cin, made, outer
    else:
        made = tuple((n + lo + hi - (k - 1) * d - 1) // s + 1 for n, k, s, d, lo, hi in axes)
        ic, oc, i, o = cin, cout, outer, made
    shape = Descriptor(row["n"], row["groups"], ic, oc, i, o, taps, stride, dilation, pad, "")
    word = row.get("epilogue", "none")
    epilogue = EPILOGUES.get(word, "")
    if row.get("bias") and "bias" not in epilogue:
        epilogue = "+".join(["bias", epilogue]).strip("+")
    return ListedLayer(
        row["name"],
        ConvProblem.of_descriptor(shape),
        row["transposed"],
        epilogue,
        (*row.get("tags", ()), row.get("tier", "full")),
    )


def select(layers: Iterable[ListedLayer], pattern: str = "", kinds: str = "") -> list[ListedLayer]:
    """The layers whose name matches a regular expression and whose kind is in a comma-separated list.
    Raises ValueError for an invalid pattern or kind, and if no layer is selected."""
    wanted = [k for k in kinds.split(",") if k]
    if unknown := sorted(set(wanted) - set(KINDS)):
        raise ValueError(f"kinds {', '.join(unknown)} are unknown; expected some of {' '.join(KINDS)}")
    try:
        matches = re.compile(pattern).search
    except re.error as error:
        raise ValueError(f"the pattern '{pattern}' cannot be read: {error}") from error
    given = list(layers)
    found = [x for x in given if matches(x.name) and (not wanted or x.kind in wanted)]
    if not found:
        raise ValueError(f"none of {len(given)} layers is selected; expected at least one")
    return found

"""The builder of intrinsics: the functions of tiles, products, loads and stores, text of Triton,
assembly, and functions of the chip's own library.

Functions that a user spells in Triton become rows of ``ir.CALLS``: the passes, the verifier and the
interpreter treat them as those that the compiler knows. A row is named after its function and its
types, with a digest where another row has that name. Its meaning in NumPy is the Python body of the
function, by which both are compared."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from textwrap import dedent, indent
from typing import Any

import numpy as np

from transconv.ir import CALLS, Call, Callee, DType, Fault, f32, i32
from transconv.kernel.frontend.reader import SourceReader, sizes_of, view_of
from transconv.kernel.functions import FUNCTIONS, cast
from transconv.kernel.source import Refusal, dtype_of
from transconv.kernel.tiles.kernel_builder import aligned, apply, as_type
from transconv.kernel.tiles.reductions import product
from transconv.kernel.tiles.values import Tile, combined, tile_of


class Unavailable(Exception):
    """What an intrinsic builds is not there on this chip; the next one is asked."""


class Builder:
    """Builds what a call becomes. Values are tiles, vectors and numbers; results are tiles, active where
    all values are. ``stem``: the name of the function; ``meaning``: its body in NumPy."""

    def __init__(self, at: SourceReader, stem: str, meaning: Meaning | None) -> None:
        self.at, self.stem, self.meaning = at, stem, meaning

    @property
    def chip(self) -> Any:
        """The chip that the kernel is for."""
        return self.at.chip.target

    def create(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """An operation of this builder, or of a library: a function whose first parameter is a builder.
        ``create(Builder.dot)(a, b, acc)`` is ``dot(a, b, acc)``."""
        return functools.partial(operation, self)

    def call(self, name: str, *values: Any, dtype: Any = None) -> Tile:
        """A function by its name: one of NumPy's or the compiler's (``exp``, ``rsqrt``), or, with two
        underscores in front, one of the chip's own library (``__nv_fast_expf``), of elements."""
        if name in FUNCTIONS:
            return apply(self.at.b, FUNCTIONS[name], list(values))
        if name in CALLS:
            return self._wide(name, values)
        if not name.startswith("__"):
            raise Refusal(
                f"a call of {name}, which is no function",
                " ".join([*FUNCTIONS, "rsqrt fma sigmoid, and names that begin with __"]),
            )
        self._not_interpreted("functions of the chip's library")
        kinds = self._types(values)
        result = kinds[0] if dtype is None else dtype_of(dtype)
        told = ", ".join(f'{{tl}}.core.dtype("{t.signature}")' for t in kinds)
        return self._elements(SYMBOL, values, kinds, result, symbol=name, of=told, gives=result.signature)

    def text(self, spelling: str, *values: Any, dtype: Any = None) -> Tile:
        """An expression of Triton of elements, in which ``{0}`` is the first value and ``{tl}`` the
        language (Triton's, or Gluon's where a kernel is spelled in it): ``{tl}.math.fma({0}, {0}, {1})``.
        Several lines are a function's body, which ends with ``return``. ``dtype``: of the result, by
        default that of the first value."""
        kinds = self._types(values)
        names = [f"x{i}" for i in range(len(values))]
        said = spelling.strip("\n").format(*names, tl="{tl}")
        body = indent(dedent(said if "return" in said else f"return {said.strip()}"), "    ")
        result = kinds[0] if dtype is None else dtype_of(dtype)
        return self._elements(TEXT, values, kinds, result, body=body)

    def asm(
        self, text: str, *values: Any, dtype: Any = None, constraints: str = "", pack: int = 1
    ) -> Tile:
        """Assembly of the chip, ``$0`` the result and ``$1`` the first value, for ``pack`` elements at a
        time. ``constraints``: by default a register for each, by its type. Triton's interpreter has no
        assembly: there the next intrinsic is asked."""
        self._not_interpreted("assembly")
        kinds = self._types(values)
        result = kinds[0] if dtype is None else dtype_of(dtype)
        said = constraints or ",".join([f"={letter(result)}", *map(letter, kinds)])
        return self._elements(
            ASM, values, kinds, result, text=repr(text), constraints=repr(said), pack=pack
        )

    def dot(self, a: Any, b: Any, acc: Any = None) -> Any:
        """``a @ b``, or ``acc + a @ b``, which ``acc`` becomes."""
        made = product(tile_of(a), tile_of(b))
        if acc is None:
            return self.at.whole(made)
        if not isinstance(acc, Tile) or acc.own != made.own:
            raise Refusal(f"{acc} as the sum of a product of shape {made.own}", "a tile of that shape")
        return self.at.summed(acc, made)

    def load(self, array: Any, shape: Any = None) -> Tile:
        """The elements of a part of an array, as ``group.vload``."""
        sizes = None if shape is None else sizes_of(self.at.b.known(shape))
        return self.at.load(view_of(array), sizes, vector=True)

    def store(self, array: Any, value: Any) -> None:
        """Write the active elements of a value to a part of an array, as ``group.store``."""
        self.at.store(view_of(array), value)

    # -- functions of elements --

    def _not_interpreted(self, what: str) -> None:
        if self.chip.backend == "interpreter":
            raise Unavailable(f"Triton's interpreter has no {what}")

    def _types(self, values: Sequence[Any]) -> list[DType]:
        found = [tile_of(v).dtype for v in values]
        if not found:
            raise Refusal("an operation without values", "at least one")
        narrow = self.chip.upcast16
        return [
            i32 if t.kind == "index" else f32 if narrow and t.kind == "float" and t.bits <= 16 else t
            for t in found
        ]

    def _wide(self, name: str, values: Sequence[Any]) -> Tile:
        """A function of the compiler, which may lack 16-bit floats."""
        kinds = [tile_of(v).dtype for v in values]
        work = [t if not CALLS[name].why_not(t) or t.kind != "float" else f32 for t in kinds]
        made = self._applied(name, values, work)
        return as_type(made, kinds[0]) if made.dtype is work[0] else made

    def _elements(
        self, template: str, values: Sequence[Any], kinds: Sequence[DType], result: DType, **words: Any
    ) -> Tile:
        narrow = self.chip.upcast16 and result.kind == "float" and result.bits <= 16
        gives = f32 if narrow else result
        name = row(self.stem, template, kinds, gives, self.meaning, **{"gives": gives.triton, **words})
        return as_type(self._applied(name, values, kinds), result)

    def _applied(self, name: str, values: Sequence[Any], kinds: Sequence[DType]) -> Tile:
        tiles = aligned(self.at.b, [tile_of(v) for v in values])
        self.at.b.taken.add(name)
        return combined(
            tiles, Call(name, tuple([cast(t.expr, kind) for t, kind in zip(tiles, kinds, strict=True)]))
        )


Array = np.ndarray[Any, np.dtype[Any]]
Meaning = Callable[..., Array]

ASM = """@{jit}
def {name}({params}):
    return {tl}.inline_asm_elementwise({text}, {constraints}, [{params}],
                                       dtype={tl}.{gives}, is_pure=True, pack={pack})
"""
TEXT = """@{jit}
def {name}({params}):
{body}
"""
SYMBOL = """@{tl}.core.extern
def {name}({params}, _semantic=None):
    return {tl}.core.extern_elementwise(
        "", "", [{params}], {{({of},): ("{symbol}", {tl}.core.dtype("{gives}"))}}, is_pure=True,
        _semantic=_semantic)
"""
LETTERS = {64: "l", 32: "r", 16: "h", 8: "r", 1: "r"}
FLOATS = {64: "d", 32: "f", 16: "h"}


def row(
    stem: str,
    template: str,
    types: Sequence[DType],
    result: DType,
    meaning: Meaning | None,
    needs: tuple[str, ...] = (),
    **words: Any,
) -> str:
    """The name of the row of a function that a template spells; the row is added if it is new."""
    params = ", ".join(f"x{i}" for i in range(len(types)))
    name = "_".join([stem, *dict.fromkeys(t.name for t in types)])
    known = CALLS.get(name)
    filled = _filled(template, name=name, params=params, **words)
    if known is not None and (known.helper, known.takes, known.result) != (filled, tuple(types), result):
        name += "_" + hashlib.blake2b(filled.encode(), digest_size=4).hexdigest()
        filled = _filled(template, name=name, params=params, **words)
    CALLS[name] = Callee(
        len(types),
        meaning or _without(stem),
        name,
        name,
        filled,
        result=result,
        takes=tuple(types),
        needs=needs,
    )
    return name


def _filled(template: str, **words: Any) -> str:
    """The template with all but ``{jit}`` and ``{tl}`` filled in; braces of the words stay braces."""
    made = template
    for key, value in words.items():
        text = str(value).replace("{", "{{").replace("}", "}}").replace("{{tl}}", "{tl}")
        made = made.replace(f"{{{key}}}", text)
    return made


def letter(dtype: DType) -> str:
    """The letter of a type in the constraints of inline assembly."""
    return (FLOATS if dtype.kind == "float" else LETTERS).get(dtype.bits, "r")


def _without(stem: str) -> Meaning:
    def meaning(*values: Array) -> Array:
        raise Fault(f"{stem} has no body in Python that could be computed")

    return meaning

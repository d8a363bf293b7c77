"""One kind of call: a function of the library bound to shapes, strides, types and numbers.

torch's own function, called on tensors without values, gives the results' shapes and types and raises
the errors of wrong calls; the library gives the texts that compute them. A text reads and stores tensors
by name (``X``, ``Y``, ``dX``: see library.Formula); here they get the shapes of torch's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from transconv.calls.size_policy import LIMIT
from transconv.compute import library, one_line
from transconv.functional.calls.compiled_launch import TORCH, TYPES, TensorMemory, program
from transconv.support import Cache, ComputeError, Unsupported

Tensor = torch.Tensor
_unseen: Any = _disable_current_modes  # by tracers and other modes

Values = dict[str, Tensor]
Numbers = tuple[Any, ...]
Specs = Sequence[library.Strided | None]  # of tensors, None for one that is missing
Made = Sequence[library.Strided]


@dataclass(frozen=True, eq=False, slots=True)
class PublicFunction:
    """A public function. ``torch``: torch's, of tensors (None for one that is missing) and then numbers,
    without side effects, to a tensor or several; ``formula``: the library's, of the tensors' and results'
    library.Strided, the numbers, and whether gradients are needed; ValueError or Unsupported where there
    is none. ``whole``: which tensors may hold integers. ``autocast``: ``f32`` or ``low`` where
    torch casts, ``torch`` where it does more. ``linear``: gradients do not depend on operands that their
    texts do not read; ``again``: gradients in torch's operations, of values by name, numbers and the
    result's gradient, for a function that does not keep its operands. Else they are kept, but for those of
    ``passing``, which gradients depend on only where their texts read them. ``shapes``: those of the
    results, by arithmetic on the shapes of tensors; Unsupported for calls that torch might refuse, so that
    one form serves all shapes (calls/call_forms.py); ``shaped``: the first number is a shape."""

    name: str
    torch: Callable[..., Any]
    formula: Callable[[Specs, Made, Numbers, bool], library.LibraryFormula]
    whole: tuple[bool, ...] = ()
    autocast: str = ""
    linear: bool = False
    again: Callable[[Values, Numbers, Tensor], tuple[Tensor, ...]] | None = None
    passing: tuple[str, ...] = ()
    handed: Callable[..., Any] | None = None  # torch's function with its side effects, if any
    finish: Callable[..., Any] | None = None  # from tensors, numbers and results to the caller's result
    shapes: Callable[[Specs, Numbers], Sequence[tuple[int, ...]]] | None = None
    shaped: bool = False

    def by_torch(self, tensors: Sequence[Tensor | None], numbers: Numbers, **named: Any) -> Any:
        """torch's result; its errors name the operands. ``named``: ``out``, where torch knows it."""
        try:
            return (self.handed or self.torch)(*tensors, *numbers, **named)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            tell(error, self.name, tensors)


def as_first(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    """The shapes of a function whose result has that of its first tensor."""
    assert given[0] is not None
    return (given[0].shape,)


def expect(holds: bool) -> None:
    """Raises Unsupported unless torch takes tensors of these shapes."""
    if not holds:
        raise Unsupported("shape:refused")


def tell(error: Exception, name: str, tensors: Sequence[Any]) -> NoReturn:
    """Raise an error of torch's class and sentence, preceded by the operands."""
    known = str(error).startswith(name) and not str(error).startswith(f"{name}()")
    if type(error) not in (IndexError, RuntimeError, TypeError, ValueError) or known:
        raise error
    said = ", ".join(
        "None"
        if t is None
        else f"{'nested' if t.is_nested else list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        if isinstance(t, Tensor)
        else type(t).__name__
        for t in tensors
    )
    raise type(error)(f"{name}({said}): {error}") from error


def as_tuple(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


@dataclass(frozen=True, slots=True)
class BoundText:
    """A text with the names of the tensors that it reads and stores; ``of``: the operand of each stored
    gradient; ``named``: its form for any size, where that was asked for. The text is one line: compilers
    write an operator's arguments into comments; it is empty for sizes that a form was found for."""

    text: str
    given: tuple[str, ...]
    stored: dict[str, TensorMemory]
    of: dict[str, str]
    named: library.LibraryText | None = None

    @property
    def read(self) -> str:
        """The text that all sizes of its form share, else its own."""
        return self.text if self.named is None else texts(self.named)[0]


@dataclass(frozen=True, slots=True, eq=False)
class BoundCall:
    """A call with its texts. ``operands``: the names of the tensors that are not None; ``saved``: those
    that gradients need; ``wanted``: which operands get gradients."""

    function: PublicFunction
    numbers: Numbers
    arity: int  # of the function: tensors, present or not
    places: tuple[int, ...]  # of the operands among them
    operands: tuple[str, ...]
    flows: tuple[str, ...]  # the gradients of results, of the first ones
    memory: dict[str, TensorMemory]  # of the operands
    seen: dict[str, library.TensorView]
    forward: BoundText
    results: tuple[str, ...]
    backward: tuple[BoundText, ...]
    saved: tuple[str, ...]
    wanted: tuple[bool, ...]

    @property
    def adds(self) -> bool:
        """Whether a gradient is summed in place, in no fixed order."""
        return any(program(s.read).compute.added for s in self.backward)

    def exact(self) -> BoundCall:
        """The same with texts for these sizes."""
        if self.forward.text:
            return self
        empty = [
            torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta")
            for m in self.memory.values()
        ]
        return bind(self.function, self.spread(empty), self.numbers, self.wanted, any_size=True)

    def spread(self, given: Iterable[Tensor | None]) -> list[Tensor | None]:
        """The function's tensors from the operands, None where one is missing."""
        found: list[Tensor | None] = [None] * self.arity
        for place, t in zip(self.places, given, strict=True):
            found[place] = t
        return found


def bind(
    f: PublicFunction,
    tensors: Sequence[Tensor | None],
    numbers: Numbers,
    wanted: tuple[bool, ...],
    any_size: bool = False,
) -> BoundCall:
    """``wanted``: which of the given tensors need gradients; empty: none. Raises torch's error for a wrong
    call, Unsupported where the library has no text."""
    metas = _results(f, tensors, numbers)
    if any(m.numel() == 0 for m in metas):
        raise Unsupported("shape:empty")
    if any(m.dtype not in TYPES for m in metas):
        raise Unsupported(f"dtype:{str(metas[0].dtype).removeprefix('torch.')}")
    results = [TensorMemory(tuple(m.shape), m.stride(), m.dtype) for m in metas]
    try:
        return bound_of(
            f, [t if t is None else lying(t) for t in tensors], results, numbers, wanted, any_size
        )
    except IndexError as error:
        tell(error, f.name, tensors)
    except (ValueError, ComputeError) as error:
        raise Unsupported("formula:none", f"{f.name}: {error}") from error


def bound_of(
    f: PublicFunction,
    given: Sequence[TensorMemory | None],
    results: Sequence[TensorMemory],
    numbers: Numbers,
    wanted: tuple[bool, ...],
    any_size: bool,
) -> BoundCall:
    """``bind`` of tensors without values to results that are known. ValueError and ComputeError, too,
    where the library has no text."""
    places = tuple(i for i, t in enumerate(given) if t is not None)
    formula = f.formula(
        [t and strided(t) for t in given], [strided(m) for m in results], numbers, any(wanted)
    )
    shapes = dict(zip(formula.results, results, strict=True))
    memory = dict(zip(formula.given, [t for t in given if t is not None], strict=True))
    real = {name: m.shape for name, m in memory.items()}
    forward = _step(formula, formula.text, shapes, real, {}, any_size)
    chosen = {name for name, on in zip(formula.given, wanted, strict=False) if on}
    whole = formula.together
    # One text for all gradients takes memory between kernels, whose size would be an argument too.
    apart = any_size or whole is None or chosen < {*whole.of.values()}
    gradients = formula.gradients if apart or whole is None else (whole,)
    backward = tuple(_step(formula, g.text, shapes, real, dict(g.of), any_size) for g in gradients)
    backward = tuple(s for s in backward if not s.of or chosen & {*s.of.values()}) if chosen else ()
    if not chosen <= {name for s in backward for name in s.of.values()}:
        raise Unsupported(f"gradient:{f.name}", f"{f.name} has no gradient of {' '.join(sorted(chosen))}")
    made = {name for s in backward for name in s.stored}
    read = {name for s in backward for name in s.given}
    between = read - made - {*formula.given, *formula.flows}  # stored by the forward text
    less = f.again is not None or (f.linear and not between)
    kept = read if less else read | {*formula.given} - {*f.passing}
    saved = tuple(sorted(kept - made - {*formula.flows})) if chosen else ()
    call = f, numbers, len(given), places, formula.given, formula.flows, memory, formula.page.seen
    return BoundCall(*call, forward, formula.results, backward, saved, wanted)


def _results(f: PublicFunction, tensors: Sequence[Tensor | None], numbers: Numbers) -> tuple[Tensor, ...]:
    """torch's results on tensors without values."""
    memory = [t if t is None else lying(t) for t in tensors]
    try:
        with _unseen(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            metas = [
                m and torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta") for m in memory
            ]
            return as_tuple(f.torch(*metas, *numbers))
    except (NotImplementedError, ZeroDivisionError) as error:  # torch's kernels judge, or say why not
        raise Unsupported("meta:none", str(error)) from error
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        tell(error, f.name, tensors)


def ints(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Sizes as numbers: symbolic ones get their value in this call."""
    return tuple(int(n) for n in sizes)


def lying(t: Tensor) -> TensorMemory:
    """A tensor without its values."""
    return TensorMemory(ints(t.shape), ints(t.stride()), t.dtype)


def strided(t: TensorMemory) -> library.Strided:
    """A tensor as the library has it; one without dims has one of size 1."""
    return library.Strided(t.shape or (1,), t.strides or (1,), TYPES[t.dtype])


def _step(
    formula: library.LibraryFormula,
    text: str,
    results: dict[str, TensorMemory],
    operands: dict[str, tuple[int, ...]],
    of: dict[str, str],
    any_size: bool,
) -> BoundText:
    named = library.named(formula.page, text) if any_size else None
    found = program(text if named is None else texts(named)[0])  # read once for all sizes
    stored = {}
    for name in found.stored:
        made = formula.page.tensors[name]
        shape = operands[of[name]] if name in of else made.shape
        stored[name] = results.get(name) or TensorMemory(shape, _strides(made, shape), TORCH[made.dtype])
    return BoundText(one_line(text), tuple(found.given), stored, of, named)


def _strides(made: library.Strided, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of the same memory in another shape, whose dims are one or several of its dims."""
    if tuple(shape) == made.shape:
        return made.strides
    inner = list(zip(made.shape, made.strides, strict=True))
    found = []
    for size in shape:
        whole, step = 1, 1
        while whole < size:
            part, step = inner.pop(0)
            whole *= part
        found.append(step)
    if prod(shape) != prod(made.shape):
        raise ValueError(f"sizes {list(shape)} of a tensor of sizes {list(made.shape)}")
    return tuple(found)


MOST = 2**31 - 2**16  # elements of a tensor; with those of the last tile they fit 32 bits
REACHES = (128, 1024, 8192, MOST)  # the longest rows of each plan, where one axis is reduced
WIDEST = 2**20  # a dim of a tensor that windows slide over
# Examples: rows, elements of a row of any length, elements where nothing is reduced, a dim under windows.
ROWS, LONG, ELEMENTS, SIDE = 8192, 65536, 1 << 22, 64

_written: Cache[str, tuple[str, ...]] = Cache("texts of forms", LIMIT)


def texts(named: library.LibraryText) -> tuple[str, ...]:
    """The texts of a form, one for each plan: they differ in their line of sizes."""
    found = _written.get(named.rest)
    if found is None:
        reaches = REACHES if len(named.summed) == 1 else (MOST,)
        found = _written.keep(
            named.rest,
            tuple(
                f"{named.head}\n    sizes  {', '.join(_said(named, reach))}\n{named.rest}"
                for reach in reaches
            ),
        )
    return found


def _said(named: library.LibraryText, reach: int) -> list[str]:
    """The sizes with examples and ranges, and what must hold for their products, also of the examples: of
    many features these are smaller."""
    likes, ranges, rows = dict[str, int](), dict[str, int](), len(named.sizes) - len(named.summed)
    for name in named.sizes:
        like, most = round((ROWS if named.summed else ELEMENTS) ** (1 / max(1, rows))), MOST
        if name in named.summed:
            like, most = round(min(reach, LONG) ** (1 / len(named.summed))), reach
        elif named.windows:
            like, most = SIDE, WIDEST
        likes[name], ranges[name] = like, most
    while max(likes.values()) > 1 and any(
        prod(likes.get(n) or int(n) for n in p) > MOST for p in named.products
    ):
        likes = {name: max(1, like // 2) for name, like in likes.items()}
    said = [f"{name}={like} in 1..{ranges[name]}" for name, like in likes.items()]
    return said + [f"{'*'.join(p)} <= {MOST}" for p in named.products if len(p) > 1]

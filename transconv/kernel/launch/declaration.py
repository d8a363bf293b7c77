"""The declaration of a kernel in Python, before any launch: its source, what it declares, and what a call
of it asks for. Results that a call leaves out are allocated, and returned:

    @kernel(work_shape=N, results="Y")
    def doubled(group, X: Buffer[N], Y: Buffer[N]): ...

    y = doubled(x)          # y = empty(N); doubled(x, y)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transconv.ir import DType
from transconv.kernel.annotations import (
    Buffer,
    Declared,
    Group,
    KernelCall,
    Meant,
    Tunable,
    declared_of,
    value_of,
)
from transconv.kernel.launch.arguments import as_tensor, described, plain_number
from transconv.kernel.source import FunctionSource, Refusal, dtype_of, used_names
from transconv.support import KernelError

PRECISIONS = ("ieee", "tf32", "tf32x3")
AskedResults = Mapping[str, Any] | Sequence[str] | str | None


class KernelDeclaration:
    """A function as a kernel. ``asked_results``: parameters that calls may leave out."""

    def __init__(
        self,
        function: Callable[..., Any],
        precision: str = "ieee",
        work_shape: Any = None,
        group_shape: Any = None,
        tuned: Mapping[str, int] = MappingProxyType({}),
        results: AskedResults = None,
    ) -> None:
        if not callable(function):
            raise KernelError(f"kernel: expected a function, got {type(function).__name__}")
        if precision not in PRECISIONS:
            raise KernelError(f"precision={precision!r}; expected one of {' '.join(PRECISIONS)}")
        self.python, self.precision = function, precision
        self.work_shape, self.group_shape, self.tuned = work_shape, group_shape, dict(tuned)
        self.asked_results = results

    @functools.cached_property
    def source(self) -> FunctionSource:
        """The function's tree and lines. Raises KernelError if it cannot be read."""
        return _checked(FunctionSource.of(self.python))

    @functools.cached_property
    def results(self) -> dict[str, DType | None]:
        """The parameters that calls may leave out, in order, and the types of those that are not of the
        first array's. Raises KernelError."""
        return results_of(self.source.name, self.source.parameters[1:], self.asked_results)

    @functools.cached_property
    def declared(self) -> Declared:
        """What the function's annotations and the decorator say. Raises KernelError."""
        names = self.source.parameters[1:]
        return declared_of(self.python, names, self.work_shape, self.group_shape)

    @functools.cached_property
    def tunables(self) -> dict[str, Tunable]:
        """The numbers that the kernel leaves to tuning, by name."""
        around, code = self.source.outside(), self.python.__code__
        used = [around[n] for n in used_names(code) if n in around]
        return {t.name: t for t in (*self.declared.shape, *used) if isinstance(t, Tunable)}

    def asked(
        self,
        args: tuple[Any, ...],
        words: dict[str, Any],
        chosen: Mapping[str, int] = MappingProxyType({}),
    ) -> KernelCall:
        """A call: its group, its arguments by name, what symbols mean. ``chosen``: values of tunable
        numbers. Results that the call leaves out are allocated. Raises KernelError unless each other
        parameter has an argument as declared."""
        name, group = self.source.name, args[0] if args and isinstance(args[0], Group) else None
        if group is None and not self.declared.work:
            found = described(args[0]) if args else "nothing"
            raise KernelError(
                f"{name} is called with {found}; expected a Group first: "
                f"{name}(Group(work_shape=...), ...)"
            )
        given = self._given(args if group is None else args[1:], words)
        bound = self.declared.bound(name, given)
        tuned = {n: t.default for n, t in self.tunables.items()} | dict(chosen) | self.tuned
        meant = Meant({n: said for n, (_, said) in bound.items()}, self.declared.constants(), tuned)
        sizes = {n: size for n, (size, _) in bound.items()}
        asked_for = group is None
        group = self.declared.group(name, bound, tuned) if group is None else group
        names, made = self.source.parameters[1:], ()
        if any(n not in given for n in names):
            each = makers(name, self.results, self.declared, given, sizes)
            made = tuple(make() for make in each.values())
            given |= dict(zip(each, made, strict=True))
        return KernelCall(group, {n: given[n] for n in names}, meant, sizes, asked_for, made)

    def recipe(self, args: tuple[Any, ...], asked: KernelCall) -> Recipe | None:
        """What a call with arguments by place alone leaves out; None if it is nothing."""
        first, names = int(isinstance(args[0], Group)), self.source.parameters[1:]
        count, inputs = len(args) - first, [n for n in names if n not in self.results]
        left_out = {*names} - {*(names if count > len(inputs) else inputs)[:count]}
        if not left_out:
            return None
        makes: dict[str, Any] = (
            {}
            if not asked.made
            else makers(self.source.name, self.results, self.declared, asked.given, asked.symbols)
        )
        return Recipe(
            tuple(
                (at, makes.get(n), None if n in makes else asked.given[n])
                for at, n in enumerate(names, first)
                if n in left_out
            )
        )

    def _given(self, args: tuple[Any, ...], words: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with defaults; without results if it leaves these out."""
        names = self.source.parameters[1:]
        inputs = [n for n in names if n not in self.results]
        by_place = names if len(args) > len(inputs) else inputs
        given = dict(zip(by_place, args, strict=False))
        wrong = len(args) > len(names) or any(w not in names or w in given for w in words)
        defaults = self.python.__defaults__ or ()
        given = dict(zip(names[::-1], defaults[::-1], strict=False)) | given | words
        if wrong or set(given) not in ({*names}, {*inputs}):
            got = ", ".join([*("_" for _ in args), *words])
            raise KernelError(
                f"{self.source.name}(group, {got}); expected "
                f"{self.source.name}(group, {', '.join(inputs)})"
                + (f", or with {' '.join(self.results)} too" if self.results else "")
            )
        return {n: given[n] for n in names if n in given}


def _checked(source: FunctionSource) -> FunctionSource:
    """The source, if the function has parameters of the plain kind, the group first."""
    a = source.tree.args
    place = source.place(source.tree)
    if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs:
        raise KernelError(
            f"{place}: found parameters with * or /; allowed: plain parameters\n"
            f"    {place.text.strip()}\n  for example: def {source.name}(group, X, Y):"
        )
    if not a.args:
        raise KernelError(
            f"{place}: found a kernel without parameters; allowed: the group first\n"
            f"    {place.text.strip()}\n  for example: def {source.name}(group, X, Y):"
        )
    return source


def results_of(name: str, parameters: Sequence[str], asked: AskedResults) -> dict[str, DType | None]:
    """The element type of each result in the order of the parameters; None: that of the first array.
    Raises KernelError for what is no parameter or no type."""
    said = (
        {}
        if asked is None
        else {asked: None}
        if isinstance(asked, str)
        else (dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(asked))
    )
    if wrong := [n for n in said if n not in parameters]:
        raise KernelError(f"{name} has the result {wrong[0]}; expected some of {' '.join(parameters)}")
    try:
        return {n: None if said[n] is None else dtype_of(said[n]) for n in parameters if n in said}
    except Refusal as refusal:
        raise KernelError(
            f"the results of {name}: found {refusal.found}; expected {refusal.allowed}"
        ) from None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What calls with such arguments leave out, by its place among the arguments in increasing order:
    what makes a result, or None and a default."""

    each: tuple[tuple[int, Callable[[], Any] | None, Any], ...]

    def filled(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """The arguments with what is left out, and the results as the call returns them."""
        full, made = list(args), []
        for at, make, default in self.each:
            if make is None:
                full.insert(at, default)
            else:
                full.insert(at, make())
                made.append(full[at])
        return tuple(full), returned(made)


def returned(made: Sequence[Any]) -> Any:
    """Results as a call returns them; None for one that was given all arrays."""
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def makers(
    name: str,
    results: Mapping[str, DType | None],
    declared: Declared,
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> dict[str, Callable[[], Any]]:
    """What makes each result: as large as its annotation says, else as the first array; beside that, and
    of its type unless the kernel says another. ``sizes``: the values of symbols. Raises KernelError."""
    first = next(
        (
            n
            for n, v in given.items()
            if n not in results and hasattr(v, "shape") and plain_number(v) is None
        ),
        None,
    )
    if first is None:
        raise KernelError(f"{name} is called without an array; expected at least one")
    made = {}
    for n, dtype in results.items():
        said, shape = declared.each.get(n), tuple(given[first].shape)
        if isinstance(said, Buffer):
            shape = tuple(value_of(name, e, sizes) for e in said.sizes)
        made[n] = _empty(first, given[first], shape, dtype)
    return made


def _empty(name: str, like: Any, shape: tuple[int, ...], dtype: DType | None) -> Callable[[], Any]:
    """What makes an array of a shape, of NumPy for NumPy's and else of torch."""
    import numpy as np

    if isinstance(like, np.ndarray):
        kind = like.dtype if dtype is None else dtype.numpy
        return lambda: np.empty(shape, kind)
    import torch

    tensor = as_tensor(name, like)
    of = tensor.dtype if dtype is None else getattr(torch, dtype.torch)
    device = tensor.device
    return lambda: torch.empty(shape, dtype=of, device=device)


def signature(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the launch of a call depends on, beside addresses and floats; None for a call that is always
    looked at."""
    plain = _plain()
    found: list[Any] = []
    for a in args:
        kind = type(a)
        if kind in plain:
            found += (a.dtype, a.shape, a.stride(), a.device)
        elif kind is int or kind is bool:
            found += (kind, a)
        elif kind is Group:
            found.append(a)
        elif kind is float:
            found.append(kind)
        else:
            return None
    return tuple(found)


@functools.lru_cache(maxsize=1)
def _plain() -> frozenset[type]:
    import torch

    return frozenset((torch.Tensor, torch.nn.Parameter))

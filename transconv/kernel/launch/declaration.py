"""What a kernel written in Python is before any launch: its source, what it declares, and what a call
of it asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transconv.ir import DType
from transconv.kernel.annotations import Declared, Group, KernelCall, Meant, Tunable, declared_of
from transconv.kernel.launch.arguments import AskedResults, Recipe, described, makers, results_of
from transconv.kernel.source import FunctionSource, used_names
from transconv.support import KernelError

PRECISIONS = ("ieee", "tf32", "tf32x3")


class KernelDeclaration:
    """A function as a kernel. ``asked_results``: parameters that calls may leave out."""

    def __init__(self, function: Callable[..., Any], precision: str = "ieee", work_shape: Any = None,
                 group_shape: Any = None, tuned: Mapping[str, int] = MappingProxyType({}),
                 results: AskedResults = None) -> None:
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

    def asked(self, args: tuple[Any, ...], words: dict[str, Any],
              chosen: Mapping[str, int] = MappingProxyType({})) -> KernelCall:
        """A call: its group, its arguments by name, what symbols mean. ``chosen``: values of tunable
        numbers. Results that the call leaves out are allocated. Raises KernelError unless each other
        parameter has an argument as declared."""
        name, group = self.source.name, args[0] if args and isinstance(args[0], Group) else None
        if group is None and not self.declared.work:
            found = described(args[0]) if args else "nothing"
            raise KernelError(f"{name} is called with {found}; expected a Group first: "
                              f"{name}(Group(work_shape=...), ...)")
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
        makes: dict[str, Any] = {} if not asked.made else makers(
            self.source.name, self.results, self.declared, asked.given, asked.symbols)
        return Recipe(tuple((at, makes.get(n), None if n in makes else asked.given[n])
                            for at, n in enumerate(names, first) if n in left_out))

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
            raise KernelError(f"{self.source.name}(group, {got}); expected "
                              f"{self.source.name}(group, {', '.join(inputs)})" + (
                                  f", or with {' '.join(self.results)} too" if self.results else ""))
        return {n: given[n] for n in names if n in given}


def _checked(source: FunctionSource) -> FunctionSource:
    """The source, if the function has parameters of the plain kind, the group first."""
    a = source.tree.args
    place = source.place(source.tree)
    if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs:
        raise KernelError(f"{place}: found parameters with * or /; allowed: plain parameters\n"
                          f"    {place.text.strip()}\n  for example: def {source.name}(group, X, Y):")
    if not a.args:
        raise KernelError(f"{place}: found a kernel without parameters; allowed: the group first\n"
                          f"    {place.text.strip()}\n  for example: def {source.name}(group, X, Y):")
    return source

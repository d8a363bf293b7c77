"""``@kernel``: a Python function that is called with a group and arrays, and runs as Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, overload

from transconv.ir import DType
from transconv.kernel.annotations import Declared, KernelCall, Meant, Tunable, declared_of
from transconv.kernel.device_functions import func, intrinsic
from transconv.kernel.frontend.source import FunctionSource
from transconv.kernel.group import Group
from transconv.kernel.launch.arguments import (
    AskedResults,
    Recipe,
    described,
    makers,
    results_of,
    returned,
)
from transconv.kernel.launch.first_result import check
from transconv.kernel.launch.launcher import KernelLaunches
from transconv.kernel.launch.lowering import LoweredKernel, explained
from transconv.kernel.launch.torch_operator import Results, as_operator
from transconv.kernel.launch.tuned_choices import TunedChoice
from transconv.kernel.simulator.execution import simulate
from transconv.support import KernelError
from transconv.target import Target, detect

PRECISIONS = ("ieee", "tf32", "tf32x3")


class KernelFunction:
    """A kernel. Call it with a Group and the function's other arguments: torch tensors, NumPy arrays,
    objects with DLPack or the CUDA array interface, Python numbers. Arrays are written in place.

    Tensors on a GPU run there. Those of the CPU run in Triton's interpreter, with TRITON_INTERPRET=1;
    without it a call raises KernelError. One compiled kernel serves all sizes of equal divisors; sizes
    that the function needs to know, types and strides belong to it, floats do not. ``precision``: of
    products of float32; ``results``: parameters that calls may leave out, which are allocated then, and
    returned.
    """

    def __init__(self, function: Callable[..., Any], precision: str = "ieee", work_shape: Any = None,
                 group_shape: Any = None, tuned: Mapping[str, int] = MappingProxyType({}),
                 results: AskedResults = None) -> None:
        if precision not in PRECISIONS:
            raise KernelError(f"precision={precision!r}; expected one of {' '.join(PRECISIONS)}")
        functools.update_wrapper(self, function)
        self.python, self.precision = function, precision
        self.work_shape, self.group_shape, self.tuned = work_shape, group_shape, dict(tuned)
        self.asked_results = results
        self._source: FunctionSource | None = None
        self._declared: Declared | None = None
        self._tunables: dict[str, Tunable] | None = None
        self._results: dict[str, DType | None] | None = None
        self._launches = KernelLaunches(self)

    @property
    def source(self) -> FunctionSource:
        """The function's tree and lines. Raises KernelError if it cannot be read."""
        if self._source is None:
            self._source = _checked(FunctionSource.of(self.python))
        return self._source

    def __repr__(self) -> str:
        return f"<kernel {getattr(self.python, '__name__', '?')}>"

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self._launches(args, words)

    @property
    def results(self) -> dict[str, DType | None]:
        """The parameters that calls may leave out, in order, and the types of those that are not of the
        first array's. Raises KernelError."""
        if self._results is None:
            self._results = results_of(self.source.name, self.source.parameters[1:], self.asked_results)
        return self._results

    @property
    def declared(self) -> Declared:
        """What the function's annotations and the decorator say. Raises KernelError."""
        if self._declared is None:
            names = self.source.parameters[1:]
            self._declared = declared_of(self.python, names, self.work_shape, self.group_shape)
        return self._declared

    @property
    def tunables(self) -> dict[str, Tunable]:
        """The numbers that the kernel leaves to tuning, by name."""
        if self._tunables is None:
            around, code = self.source.outside(), self.python.__code__
            used = [around[n] for n in _names(code) if n in around]
            self._tunables = {t.name: t for t in (*self.declared.shape, *used) if isinstance(t, Tunable)}
        return self._tunables

    def parametrize(self, **values: int) -> KernelFunction:
        """The kernel with other values of its tunable numbers. Raises KernelError for other names."""
        if wrong := sorted({*values} - {*self.tunables}):
            known = " ".join(self.tunables) or "none"
            raise KernelError(f"{self.source.name} has no tunable number {wrong[0]}; it has: {known}")
        return KernelFunction(self.python, self.precision, self.work_shape, self.group_shape,
                              self.tuned | values, self.asked_results)

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

    def simulate(self, *args: Any, **words: Any) -> Any:
        """Run the Python function itself, for one group after the other, on NumPy arrays: slow, in an
        order that is always the same, and with breakpoints. Raises KernelError with the user's line, also
        for races, and for barriers that not all items of a group reach."""
        asked = self.asked(args, words)
        simulate(self.python, asked.group, asked.given, asked.symbols | asked.meant.tuned)
        return returned(asked.made)

    def check(self, *args: Any, rtol: float | None = None, atol: float | None = None,
              **words: Any) -> None:
        """Run the kernel and its simulation on copies of the arguments, and compare all arrays; by default
        to some units in the last place. The simulation executes the bodies of functions in Python, so a
        wrong intrinsic is found. Raises KernelError for the first element that differs."""
        asked = self.asked(args, words)
        check(self, asked.group, asked.given, rtol, atol)

    def as_operator(self, name: str, *, group: Callable[..., Group], results: Results,
                    backward: KernelFunction | None = None) -> Any:
        """The kernel as an operator of torch, registered under a name such as ``mine::silu``.

            op = silu.as_operator("mine::silu", group=lambda X: Group(X.numel(), 1024), results="Y")

        ``results``: the parameters that it allocates and returns, like the first tensor or as functions of
        arguments make them; ``backward``: a kernel that writes ``grad_X``. See
        ``launch/torch_operator.py``."""
        return as_operator(self, name, group=group, results=results, backward=backward)

    def lower(self, *args: Any, target: Target | str | None = None, **words: Any) -> LoweredKernel:
        """The kernel for such arguments, with its stages and its Triton text; launches nothing.
        ``target``: a chip (``sm_90``), by default this machine's. Arguments may be of torch's ``meta``
        device. Raises KernelError with the user's line."""
        chip = detect() if target is None else Target.parse(target) if isinstance(target, str) else target
        return self._launches.chosen(self.asked(args, words), chip)[0]

    def show(self, *args: Any, stage: str = "emit", target: Target | str | None = None,
             **words: Any) -> str:
        """The text after a stage: ``written`` (as the source has it), the name of a pass, or ``emit``, the
        Triton text."""
        return self.lower(*args, target=target, **words).stage(stage)

    def tune(self, *args: Any, seconds: float = 20.0, trials: int = 32, **words: Any) -> TunedChoice:
        """Try values of tunable numbers, warps and stages for calls like this one, on copies of the
        arrays, and keep the fastest in the user's cache, where later calls find it. What the group hints
        stays. Raises KernelError as a call does."""
        return self._launches.tune(args, words, seconds, trials)

    def explain(self, *args: Any, target: Target | str | None = None, **words: Any) -> str:
        """How the kernel is launched for such arguments: the groups, their shape and whether it was asked
        for, warps, sizes that are arguments and what is required of them, masks that were proved away."""
        chip = detect() if target is None else Target.parse(target) if isinstance(target, str) else target
        return explained(*self._launches.chosen(self.asked(args, words), chip), chip)


def _names(code: Any) -> list[str]:
    """The names that a function and those inside of it use."""
    inside = [n for c in code.co_consts if hasattr(c, "co_names") for n in _names(c)]
    return [*code.co_names, *code.co_freevars, *inside]


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


class KernelDecorator:
    """The decorator ``kernel``: makes a kernel of a function whose first parameter is the group.

        @kernel
        def double(group, X, Y):
            i = group.work_offset()[0]
            x = group.load(X[i:], shape=group.shape)
            group.store(Y[i:], x + x)

        double(Group(work_shape=X.shape[0]), X, Y)

    ``@kernel(precision="tf32")``: the precision of products of float32, ``ieee`` (float32), ``tf32`` or
    ``tf32x3`` (the matrix unit). ``@kernel(work_shape=(H, W), group_shape=(16, 64))``: the group follows
    from symbols that annotations bind, and calls have none. ``@kernel(results="Y")``, or several names, or
    ``{"Y": np.int32}``: parameters that calls may leave out; they are allocated, of the type of the first
    array where none is said, and returned. ``@kernel.func`` makes a function that kernels may call.
    """

    func = staticmethod(func)
    intrinsic = staticmethod(intrinsic)

    @overload
    def __call__(self, function: Callable[..., Any]) -> KernelFunction: ...

    @overload
    def __call__(self, *, precision: str = "ieee", work_shape: Any = None, group_shape: Any = None,
                 results: AskedResults = None) -> Callable[[Callable[..., Any]], KernelFunction]: ...

    def __call__(self, function: Callable[..., Any] | None = None, *, precision: str = "ieee",
                 work_shape: Any = None, group_shape: Any = None, results: AskedResults = None) -> Any:
        """The kernel of a function; a decorator where only words are given."""
        if function is not None:
            return KernelFunction(function, precision, work_shape, group_shape, results=results)
        return lambda made: KernelFunction(made, precision, work_shape, group_shape, results=results)


kernel = KernelDecorator()
"""Makes a kernel of a function, see ``KernelDecorator``."""

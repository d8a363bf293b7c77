"""``@kernel``: a Python function that is called with a group and arrays, and runs as Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from transconv.errors import KernelError
from transconv.kernel.arguments import described, tensors_of
from transconv.kernel.checking import check
from transconv.kernel.device_functions import func
from transconv.kernel.group import Group
from transconv.kernel.intrinsics import intrinsic
from transconv.kernel.launching import Launches
from transconv.kernel.lowering import Lowered, lowered
from transconv.kernel.operators import Results, as_operator
from transconv.kernel.simulator import simulate
from transconv.kernel.source import Source
from transconv.target import Target, detect

PRECISIONS = ("ieee", "tf32", "tf32x3")


class KernelFunction:
    """A kernel. Call it with a Group and the function's other arguments: torch tensors, NumPy arrays,
    objects with DLPack or the CUDA array interface, Python numbers. Arrays are written in place.

    Tensors on a GPU run there. Those of the CPU run in Triton's interpreter, with TRITON_INTERPRET=1;
    without it a call raises KernelError. Each combination of types, shapes, strides and whole numbers is
    compiled once; floats are read at run time. ``precision``: of products of float32.
    """

    def __init__(self, function: Callable[..., Any], precision: str = "ieee") -> None:
        if precision not in PRECISIONS:
            raise KernelError(f"precision={precision!r}; expected one of {' '.join(PRECISIONS)}")
        functools.update_wrapper(self, function)
        self.python, self.precision = function, precision
        self._source: Source | None = None
        self._launches = Launches(self)

    @property
    def source(self) -> Source:
        """The function's tree and lines. Raises KernelError if it cannot be read."""
        if self._source is None:
            self._source = _checked(Source.of(self.python))
        return self._source

    def __repr__(self) -> str:
        return f"<kernel {getattr(self.python, '__name__', '?')}>"

    def __call__(self, group: Group, *args: Any, **words: Any) -> None:
        self._launches(group, self.bound(group, args, words))

    def bound(self, group: Any, args: tuple[Any, ...], words: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises KernelError unless each parameter has one."""
        if not isinstance(group, Group):
            raise KernelError(f"{self.source.name} is called with {described(group)}; expected a Group "
                              f"first: {self.source.name}(Group(work_shape=...), ...)")
        names = self.source.parameters[1:]
        given = dict(zip(names, args, strict=False))
        unknown = [w for w in words if w not in names or w in given]
        given |= words
        if unknown or len(args) > len(names) or set(given) != set(names):
            got = ", ".join([*("_" for _ in args), *words])
            raise KernelError(f"{self.source.name}(group, {got}); expected "
                              f"{self.source.name}(group, {', '.join(names)})")
        return {n: given[n] for n in names}

    def simulate(self, group: Group, *args: Any, **words: Any) -> None:
        """Run the Python function itself, for one group after the other, on NumPy arrays: slow, in an
        order that is always the same, and with breakpoints. Raises KernelError with the user's line, also
        for races, and for barriers that not all items of a group reach."""
        simulate(self.python, group, self.bound(group, args, words))

    def check(self, group: Group, *args: Any, rtol: float | None = None, atol: float | None = None,
              **words: Any) -> None:
        """Run the kernel and its simulation on copies of the arguments, and compare all arrays; by default
        to some units in the last place. The simulation executes the bodies of functions in Python, so a
        wrong intrinsic is found. Raises KernelError for the first element that differs."""
        check(self, group, self.bound(group, args, words), rtol, atol)

    def as_operator(self, name: str, *, group: Callable[..., Group], results: Results,
                    backward: KernelFunction | None = None) -> Any:
        """The kernel as an operator of torch, registered under a name such as ``mine::silu``.

            op = silu.as_operator("mine::silu", group=lambda X: Group(X.numel(), 1024), results="Y")

        ``results``: the parameters that it allocates and returns, like the first tensor or as functions of
        arguments make them; ``backward``: a kernel that writes ``grad_X``. See ``operators.py``."""
        return as_operator(self, name, group=group, results=results, backward=backward)

    def lower(self, group: Group, *args: Any, target: Target | str | None = None, **words: Any) -> Lowered:
        """The kernel for such arguments, with its stages and its Triton text; launches nothing.
        ``target``: a chip (``sm_90``), by default this machine's. Arguments may be of torch's ``meta``
        device. Raises KernelError with the user's line."""
        chip = detect() if target is None else Target.parse(target) if isinstance(target, str) else target
        arguments = tensors_of(self.bound(group, args, words))
        return lowered(self.source, group, arguments.specs, chip, self.precision, arguments.alike)

    def show(self, group: Group, *args: Any, stage: str = "emit", target: Target | str | None = None,
             **words: Any) -> str:
        """The text after a stage: ``written`` (as the source has it), the name of a pass, or ``emit``, the
        Triton text."""
        return self.lower(group, *args, target=target, **words).stage(stage)

    def explain(self, group: Group, *args: Any, target: Target | str | None = None, **words: Any) -> str:
        """How the kernel is launched for such arguments: the groups, their shape and whether it was asked
        for, warps, masks that were proved away."""
        chip = detect() if target is None else Target.parse(target) if isinstance(target, str) else target
        made = self.lower(group, *args, target=chip, **words)
        asked = "as hinted" if group.group_shape_hint is not None else "chosen"
        lines = [f"kernel     {made.name}",
                 f"target     {chip.name}",
                 f"work       {' x '.join(map(str, group.work))}",
                 f"group      {' x '.join(map(str, group.shape))} ({asked})",
                 f"groups     {' x '.join(map(str, group.groups))} = {group.count} programs",
                 f"sub-group  {chip.warp_size}" + (
                     f" (the chip's; {group.subgroup_size_hint} was hinted)"
                     if group.subgroup_size_hint not in (None, chip.warp_size) else " (the chip's)"),
                 f"warps      {made.warps}"]
        lines += [f"masks      {note}" for note in made.kernel.notes]
        return "\n".join(lines)


def _checked(source: Source) -> Source:
    """The source, if the function has parameters of the plain kind, the group first."""
    a = source.tree.args
    place = source.place(source.tree)
    if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or a.defaults:
        raise KernelError(f"{place}: found parameters with defaults, * or /; allowed: plain parameters\n"
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
    ``tf32x3`` (the matrix unit). ``@kernel.func`` makes a function that kernels may call.
    """

    func = staticmethod(func)
    intrinsic = staticmethod(intrinsic)

    @overload
    def __call__(self, function: Callable[..., Any]) -> KernelFunction: ...

    @overload
    def __call__(self, *, precision: str = "ieee") -> Callable[[Callable[..., Any]], KernelFunction]: ...

    def __call__(self, function: Callable[..., Any] | None = None, *, precision: str = "ieee") -> Any:
        """The kernel of a function; a decorator where only a precision is given."""
        if function is not None:
            return KernelFunction(function, precision)
        return lambda made: KernelFunction(made, precision)


kernel = KernelDecorator()
"""Makes a kernel of a function, see ``KernelDecorator``."""

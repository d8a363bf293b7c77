"""``@kernel``: a Python function that is called with a group and arrays, and runs as Triton.

One compiled kernel for each kind of arguments is kept in the process. The first call with such
arguments looks at everything. Later ones compare types, shapes, strides and devices, and whether arrays
share memory, and start the compiled kernel for these sizes directly."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NoReturn, overload

import numpy as np

from transconv.backend_triton import Miscompiled, torch_module
from transconv.ir import CALLS, Call, find
from transconv.kernel.annotations import Group, KernelCall, Meant
from transconv.kernel.device_functions import func, intrinsic
from transconv.kernel.launch.arguments import Arguments, as_tensor, plain_number, spanned, tensors_of
from transconv.kernel.launch.declaration import (
    AskedResults,
    KernelDeclaration,
    Recipe,
    returned,
    signature,
)
from transconv.kernel.launch.kernel_plan import CompiledKernel, KernelRequest, LoweredKernel, compiled
from transconv.kernel.launch.lowering import explained, lowered
from transconv.kernel.launch.torch_operator import Results, as_operator
from transconv.kernel.launch.trace_digest import Untold, trace_digest
from transconv.kernel.launch.tuned_choices import (
    WARPS,
    LaunchWords,
    TunedChoice,
    choices,
    key_of,
    record,
    recorded,
    search,
    with_words,
)
from transconv.kernel.simulator.execution import SimulatorCheck, refusal, simulate
from transconv.runtime import (
    Batch,
    Launch,
    PlanRequest,
    collect,
    first_run_check,
    is_capturing,
    is_collecting,
    plan_cache,
)
from transconv.support import KernelError, knobs
from transconv.target import Target, detect

KEPT = 256  # kinds of arguments of one kernel
KNOWN_CALLS = 4096  # calls that are known by their types and sizes
log = logging.getLogger("transconv.kernel")


@dataclass(slots=True)
class ArgumentKind:
    """The compiled kernels for arguments of one kind. ``fixed``: the places of numbers that the kernel
    needs to know; ``plain``: of those whose divisors do not matter."""

    fixed: frozenset[int] = frozenset()
    plain: frozenset[int] = frozenset()
    compiled: list[CompiledKernel] = field(default_factory=list)


KnownCall = tuple[Recipe | None, Callable[..., bool] | None]
"""What calls of one kind leave out, and what starts the kernel with all arguments (``Launch.guarded``)."""
UNKNOWN: KnownCall = (None, None)


class KernelLaunches:
    """The launches of one kernel."""

    def __init__(self, owner: KernelDeclaration) -> None:
        self.owner = owner
        self.kinds: dict[Any, ArgumentKind] = {}
        self.calls: dict[Any, KnownCall] = {}
        self.found: dict[str, TunedChoice | None] = {}
        self.instead: dict[str, tuple[LaunchWords, str]] = {}  # of calls whose own warps are miscompiled
        self.lock = threading.Lock()

    def __call__(self, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Launch; nothing for work without elements. The results that the call leaves out. Raises
        KernelError."""
        key = None if words else signature(args)
        recipe, start = self.calls.get(key, UNKNOWN)
        if recipe is None:
            return None if start is not None and start(*args) else self.launched(key, args, words)
        args, results = recipe.filled(args)
        if start is None or not start(*args):
            self.launched(None, args, words)
        return results

    def launched(self, key: Any, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """A launch that looks at everything; none while requests are recorded, as ``prepare`` does.
        ``key``: of a call that is remembered."""
        asked = self.owner.asked(args, words)
        arguments = tensors_of(asked.given)
        target = self.target_of(arguments)
        if is_collecting():  # the call is only looked at: its results have no values
            made = self.of(self.best(asked, arguments, target)[0], arguments, target)[0]
            aligned = first_run_check.is_aligned(arguments.tensors)
            collect(Batch((PlanRequest(made.plan.workload, target, aligned=aligned),)))
            return returned(asked.made)
        found = self.start_right(asked, arguments, target)
        if (
            found is not None
            and key is not None
            and not arguments.alike
            and arguments.device.type == "cuda"
            and not is_capturing(arguments.device)
        ):  # a later one is compared
            self.remember(key, found, args, asked, arguments)
        return returned(asked.made)

    def start_right(self, asked: KernelCall, arguments: Arguments, target: Target) -> Launch | None:
        """``start`` with the best words. Where the machine code shows a known mistake of the compiler, and
        the call leaves the warps open, with other warps, which later calls like it have, too. Raises
        Miscompiled if each number of warps has such code."""
        best, _ = self.best(asked, arguments, target)
        try:
            return self.start(best, arguments, target)
        except Miscompiled as mistake:
            if best.group.warps_hint is not None:
                raise refusal(self.name, mistake) from None
            own = self.of(best, arguments, target)[0].step.schedule.warps
            for warps in (w for w in (2 * own, own // 2, 4 * own, own // 4) if w in WARPS):
                with suppress(Miscompiled, KernelError):
                    found = self.start(with_words(best, LaunchWords(warps)), arguments, target)
                    key = key_of(self.owner.source, asked, arguments, target, self.owner.precision)
                    self.instead[key] = LaunchWords(warps), f"instead    of {own} warps: {mistake.why}"
                    return found
            raise refusal(self.name, mistake) from None

    def start(self, asked: KernelCall, arguments: Arguments, target: Target) -> Launch | None:
        """Launch a call; what launched it, None for work without elements."""
        made, values = self.of(asked, arguments, target)
        if asked.group.count == 0:
            return None
        found = made.launch(first_run_check.is_aligned(arguments.tensors), values)
        given = arguments.tensors | arguments.floats
        try:
            found.start(
                [given[n] for n in found.names],
                SimulatorCheck(self.owner.python, asked, arguments, made.stored).judge,
            )
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # of Triton, which is imported by now
                raise
            raise KernelError(
                f"{self.name} does not fit the chip: {error}; expected a smaller group, or "
                f"fewer than {made.step.schedule.stages} stages"
            ) from None
        if spilt := made.step.triton.spilled:
            warnings.warn(
                f"{self.name}: {spilt} bytes of the values of each thread do not fit into registers and "
                f"are kept in memory ({made.step.schedule.warps} warps); expected a smaller group, more "
                "warps (warps_hint=), or a loop over parts of its tiles",
                stacklevel=2,
            )
        return found

    def remember(
        self, key: Any, found: Launch, args: tuple[Any, ...], asked: KernelCall, arguments: Arguments
    ) -> None:
        """Have later calls like this one start the kernel directly."""
        if len(self.calls) >= KNOWN_CALLS:
            self.calls.clear()
        names = ("",) * isinstance(args[0], Group) + tuple(arguments.kinds)
        spans = {n: spanned(t) for n, t in arguments.tensors.items()}
        start = found.guarded(arguments.device.index, names, spans)
        self.calls[key] = self.owner.recipe(args, asked), start

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.owner.source.name

    def target_of(self, arguments: Arguments) -> Target:
        """The chip of the arrays, or Triton's interpreter for those of the CPU. KernelError where kernels
        do not run."""
        if arguments.device is None:
            raise KernelError(f"{self.name} is called without an array; expected at least one")
        kind = arguments.device.type
        if kind == "cpu" and not knobs.interpret():
            raise KernelError(
                f"{self.name} is called with arrays of the CPU; expected arrays of a "
                'GPU; without one, set transconv.config.cpu = "interpret" at the beginning '
                "of the program (or TRITON_INTERPRET=1) for Triton's interpreter, or call "
                f"{self.name}.simulate(..)"
            )
        if kind not in ("cpu", "cuda", "xpu") or (kind != "cpu" and knobs.interpret()):
            raise KernelError(
                f"{self.name} is called with arrays of {arguments.device}, where it "
                "cannot run" + " with TRITON_INTERPRET=1" * (kind == "cuda")
            )
        return detect(arguments.device)

    def best(self, asked: KernelCall, arguments: Arguments, target: Target) -> tuple[KernelCall, str]:
        """A call with what tuning found fastest for such arguments, or what is compiled right, where it
        leaves that open, and how that was found."""
        owner = self.owner
        key = key_of(owner.source, asked, arguments, target, owner.precision)
        if key not in self.found:
            self.found[key] = recorded(key, owner.tunables)
        found = self.found[key]
        best, told = (
            (asked, "") if found is None else (self.worded(asked, found.words), f"tuned      {found}")
        )
        if key not in self.instead:
            return best, told
        words, why = self.instead[key]
        return with_words(best, words), "\n".join(filter(None, (told, why)))

    def worded(self, asked: KernelCall, words: LaunchWords) -> KernelCall:
        """A call with words of tuning."""
        numbers = {n: v for n, v in words.numbers if n not in self.owner.tuned}
        if numbers:
            given = (asked.group,) if not asked.declared else ()
            asked = self.owner.asked(given, asked.given, numbers)
        return with_words(asked, words)

    def tune(
        self, args: tuple[Any, ...], words: dict[str, Any], seconds: float, trials: int
    ) -> TunedChoice:
        """The fastest words for a call, which are kept."""
        owner, asked = self.owner, self.owner.asked(args, words)
        arguments = tensors_of(asked.given)
        target = self.target_of(arguments)
        low = lowered(owner.source, asked.group, arguments, target, owner.precision, meant=asked.meant)

        def run(words: LaunchWords, arrays: dict[str, Any]) -> None:
            made = self.worded(asked, words)
            self.start(replace(made, given=made.given | arrays), tensors_of(made.given | arrays), target)

        offered = choices(asked, low, owner.tunables, owner.tuned)
        found = search(run, arguments.tensors, offered, seconds, trials)
        key = key_of(owner.source, asked, arguments, target, owner.precision)
        record(key, found)
        self.found[key] = found
        self.calls.clear()
        return found

    def chosen(self, asked: KernelCall, target: Target) -> tuple[LoweredKernel, Meant, str]:
        """The kernel that such a call launches on a chip, compiled anew."""
        arguments = tensors_of(asked.given)
        asked, why = self.best(asked, arguments, target)
        low = lowered(
            self.owner.source, asked.group, arguments, target, self.owner.precision, meant=asked.meant
        )
        return low, asked.meant, why

    def of(
        self, asked: KernelCall, arguments: Arguments, target: Target
    ) -> tuple[CompiledKernel, dict[str, int]]:
        """The kernel for arguments, and its sizes that are arguments."""
        group, precision = asked.group, self.owner.precision
        key = (*group.launched, arguments.key, asked.meant.key, target.name, precision)
        numbers = (*(n.value for n in arguments.numbers), *group.work)
        with self.lock:
            if len(self.kinds) >= KEPT:
                self.kinds.clear()
            kind = self.kinds.setdefault(key, ArgumentKind())
            for made in reversed(kind.compiled):
                if (values := made.values(numbers)) is not None:
                    return made, values
            request = self.request(asked, arguments, target)
            before = kind.fixed, kind.plain
            found = request.find(*before)
            if found is None:
                low = lowered(self.owner.source, group, arguments, target, precision, *before, asked.meant)
                found = compiled(low, target, request.workload(low.sizing))
                if why := found.why_not(numbers):  # more programs than a launch may have
                    raise KernelError(f"{self.name} cannot be launched for this work: {why}")
                request.keep(found, before)
            kind.fixed, kind.plain = found.fixed, found.plain
            kind.compiled.append(found)
            return found, found.sizing.values(numbers)

    def request(self, asked: KernelCall, arguments: Arguments, target: Target) -> KernelRequest:
        """What a call asks for."""
        group, meant = asked.group, asked.meant
        modules = {n: k for n, k in arguments.kinds.items() if isinstance(k, ModuleType)}
        made_of = ""
        if plan_cache.keeps():
            try:
                made_of = trace_digest(self.owner.source, modules)
            except Untold as reason:
                log.debug("%s is not kept on disk: it uses %s", self.name, reason)
        kinds = [
            (n, k.__name__ if isinstance(k, (ModuleType, type)) else k) for n, k in arguments.kinds.items()
        ]
        kind = (
            *group.launched,
            kinds,
            sorted(arguments.alike.items()),
            sorted(meant.places.items()),
            sorted(meant.constants),
            sorted(meant.tuned.items()),
        )
        return KernelRequest(
            self.name,
            made_of,
            kind,
            self.owner.precision,
            arguments,
            arguments.numbers_with(group.work),
            target,
        )


# -- calls that are known --------------------------------------------------------------------------


class KernelFunction(KernelDeclaration):
    """A kernel. Call it with a Group and the function's other arguments: torch tensors, NumPy arrays,
    objects with DLPack or the CUDA array interface, Python numbers. Arrays are written in place.

    Tensors on a GPU run there. Those of the CPU run in Triton's interpreter, with TRITON_INTERPRET=1;
    without it a call raises KernelError. One compiled kernel serves all sizes of equal divisors; sizes
    that the function needs to know, types and strides belong to it, floats do not. ``precision``: of
    products of float32; ``results``: parameters that calls may leave out, which are allocated then, and
    returned."""

    def __init__(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        functools.update_wrapper(self, function)
        super().__init__(function, *given, **named)
        self._launches = KernelLaunches(self)

    def __repr__(self) -> str:
        return f"<kernel {getattr(self.python, '__name__', '?')}>"

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self._launches(args, words)

    def __getitem__(self, grid: object) -> NoReturn:
        call = f"{self.source.name}(Group(work_shape=...), {', '.join(self.source.parameters[1:])})"
        raise TypeError(
            f"{self.source.name}[{grid}]: a launch's grid follows from the group; expected {call}"
        )

    def parametrize(self, **values: int) -> KernelFunction:
        """The kernel with other values of its tunable numbers. Raises KernelError for other names."""
        if wrong := sorted({*values} - {*self.tunables}):
            known = " ".join(self.tunables) or "none"
            raise KernelError(f"{self.source.name} has no tunable number {wrong[0]}; it has: {known}")
        return KernelFunction(
            self.python,
            self.precision,
            self.work_shape,
            self.group_shape,
            self.tuned | values,
            self.asked_results,
        )

    def simulate(self, *args: Any, **words: Any) -> Any:
        """Run the Python function itself, for one group after the other, on NumPy arrays: slow, in an
        order that is always the same, and with breakpoints. Raises KernelError with the user's line, also
        for races, and for barriers that not all items of a group reach."""
        asked = self.asked(args, words)
        simulate(self.python, asked.group, asked.given, asked.symbols | asked.meant.tuned)
        return returned(asked.made)

    def check(
        self, *args: Any, rtol: float | None = None, atol: float | None = None, **words: Any
    ) -> None:
        """Run the kernel and its simulation on copies of the arguments, and compare all arrays; by default
        to some units in the last place. The simulation executes the bodies of functions in Python, so a
        wrong intrinsic is found. Raises KernelError for the first element that differs."""
        asked = self.asked(args, words)
        _compare(self, asked.group, asked.given, rtol, atol)

    def as_operator(
        self,
        name: str,
        *,
        group: Callable[..., Group],
        results: Results,
        backward: KernelFunction | None = None,
    ) -> Any:
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

    def show(
        self, *args: Any, stage: str = "emit", target: Target | str | None = None, **words: Any
    ) -> str:
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
        for, warps, sizes that are arguments and what is required of them, masks that were proved away,
        which addresses it reaches, by which proof."""
        chip = detect() if target is None else Target.parse(target) if isinstance(target, str) else target
        return explained(*self._launches.chosen(self.asked(args, words), chip), chip)


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
    array where none is said, and returned. ``@kernel.func`` makes a function that kernels may call."""

    func = staticmethod(func)
    intrinsic = staticmethod(intrinsic)

    @overload
    def __call__(self, function: Callable[..., Any]) -> KernelFunction: ...

    @overload
    def __call__(
        self,
        *,
        precision: str = "ieee",
        work_shape: Any = None,
        group_shape: Any = None,
        results: AskedResults = None,
    ) -> Callable[[Callable[..., Any]], KernelFunction]: ...

    def __call__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        precision: str = "ieee",
        work_shape: Any = None,
        group_shape: Any = None,
        results: AskedResults = None,
    ) -> Any:
        """The kernel of a function; a decorator where only words are given."""
        if function is not None:
            return KernelFunction(function, precision, work_shape, group_shape, results=results)
        return lambda made: KernelFunction(made, precision, work_shape, group_shape, results=results)


kernel = KernelDecorator()
"""Makes a kernel of a function, see ``KernelDecorator``."""


def _compare(
    kernel: KernelFunction, group: Group, given: dict[str, Any], rtol: float | None, atol: float | None
) -> None:
    """Run a kernel and its simulation on copies of the arguments, and compare the arrays. Raises
    KernelError for the first difference."""
    torch = torch_module()
    compiled, simulated = (
        {
            n: v if plain_number(v) is not None or isinstance(v, ModuleType) else as_tensor(n, v).clone()
            for n, v in given.items()
        }
        for _ in range(2)
    )
    kernel(group, **compiled)
    kernel.simulate(group, **simulated)
    own = {c.name for c in find(kernel.lower(group, **given).kernel, Call) if CALLS[c.name].takes}
    for name, value in compiled.items():
        if not isinstance(value, torch.Tensor):
            continue
        got, wanted = (t.detach().cpu().double().numpy() for t in (value, simulated[name]))
        near = 2.0 * float(torch.finfo(value.dtype).eps) if value.dtype.is_floating_point else 0.0
        r, a = (16 * near if rtol is None else rtol), (16 * near if atol is None else atol)
        wrong = ~np.isclose(got, wanted, rtol=r, atol=a, equal_nan=True)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            told = f"; it has functions of a chip: {' '.join(sorted(own))}" if own else ""
            place = f"{name}[{', '.join(map(str, at))}]"
            raise KernelError(
                f"{kernel.source.name}: {place} is {got[at]:.9g}, and {wanted[at]:.9g} in "
                f"the simulator ({int(wrong.sum())} of {wrong.size} elements differ){told}"
            )

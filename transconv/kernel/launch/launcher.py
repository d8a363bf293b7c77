"""Launches of a kernel: one compiled kernel for each kind of arguments, kept in the process.

The first call with such arguments looks at everything. Later ones compare types, shapes, strides and
devices, and whether arrays share memory, and start the compiled kernel for these sizes directly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transconv.backend_triton import Miscompiled
from transconv.kernel.annotations import KernelCall, Meant
from transconv.kernel.group import Group
from transconv.kernel.launch.arguments import Arguments, Recipe, returned, spanned, tensors_of
from transconv.kernel.launch.first_result import refusal, start_checked
from transconv.kernel.launch.kernel_plan import CompiledKernel, KernelRequest, compiled
from transconv.kernel.launch.lowering import LoweredKernel, lowered
from transconv.kernel.launch.size_arguments import Number
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
from transconv.runtime import (
    Batch,
    PlanRequest,
    collect,
    first_run_check,
    is_collecting,
    plan_cache,
    torch_internals,
)
from transconv.support import KernelError, defined, knobs
from transconv.target import Target, detect

if TYPE_CHECKING:
    from transconv.kernel.decorator import KernelFunction

Known = Callable[[tuple[Any, ...]], bool]
"""Starts a kernel with the arguments of a call; False for a call that has to be looked at."""
KEPT = 256  # kinds of arguments of one kernel
CALLS = 4096  # calls that are known by their types and sizes
log = logging.getLogger("transconv.kernel")


@dataclass(slots=True)
class ArgumentKind:
    """The compiled kernels for arguments of one kind. ``fixed``: the places of numbers that the kernel
    needs to know; ``plain``: of those whose divisors do not matter."""

    fixed: frozenset[int] = frozenset()
    plain: frozenset[int] = frozenset()
    compiled: list[CompiledKernel] = field(default_factory=list)


class KernelLaunches:
    """The launches of one kernel."""

    def __init__(self, owner: KernelFunction) -> None:
        self.owner = owner
        self.kinds: dict[Any, ArgumentKind] = {}
        self.calls: dict[Any, Known] = {}
        self.recipes: dict[Any, Recipe] = {}  # of calls that leave out results
        self.found: dict[str, TunedChoice | None] = {}
        self.instead: dict[str, tuple[LaunchWords, str]] = {}  # of calls whose own warps are miscompiled
        self.lock = threading.Lock()

    def __call__(self, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Launch; nothing for work without elements. The results that the call leaves out. Raises
        KernelError."""
        key = None if words else signature(args)
        recipe, known = self.recipes.get(key), self.calls.get(key)
        if recipe is not None:
            args, results = recipe.filled(args)
            if known is None or not known(args):
                self.launched(None, args, words)
            return results
        if known is not None and known(args):
            return None
        return self.launched(key, args, words)

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
        if found and key is not None and not arguments.alike and arguments.device.type == "cuda":
            self.remember(key, *found, arguments, isinstance(args[0], Group))
            if (left_out := self.owner.recipe(args, asked)) is not None:
                self.recipes[key] = left_out
        return returned(asked.made)

    def start_right(self, asked: KernelCall, arguments: Arguments,
                    target: Target) -> tuple[CompiledKernel, dict[str, int]] | None:
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

    def start(self, asked: KernelCall, arguments: Arguments,
              target: Target) -> tuple[CompiledKernel, dict[str, int]] | None:
        """Launch a call; what was launched for which sizes, None for work without elements."""
        made, values = self.of(asked, arguments, target)
        if asked.group.count == 0:
            return None
        given = arguments.tensors | arguments.floats
        try:
            if first_run_check.is_trusted(made.plan, first_run_check.is_aligned(arguments.tensors)):
                made.start(given, values)
            else:
                start_checked(self.owner.python, asked, arguments, made, values)
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # of Triton, which is imported by now
                raise
            raise KernelError(f"{self.name} does not fit the chip: {error}; expected a smaller group, or "
                              f"fewer than {made.step.schedule.stages} stages") from None
        return made, values

    def remember(self, key: Any, made: CompiledKernel, values: dict[str, int], arguments: Arguments,
                 grouped: bool) -> None:
        """Have later calls like this one start the kernel directly. ``grouped``: whether their first
        argument is the group."""
        names = [*([""] if grouped else []), *arguments.kinds]
        places = {n: names.index(n) for n in made.step.params}
        order = tuple(~at if n in arguments.floats else at for n, at in places.items())
        device = arguments.device.index
        starters = [made.starter(device, aligned, order, values) for aligned in (False, True)]
        arrays = [at for at in order if at >= 0]
        spans = [spanned(arguments.tensors[names[at]]) for at in arrays]
        if len(self.calls) >= CALLS:
            self.calls.clear()
            self.recipes.clear()
        self.calls[key] = known(starters, arrays, spans, device)

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
            raise KernelError(f"{self.name} is called with arrays of the CPU; expected arrays of a "
                              'GPU; without one, set transconv.config.cpu = "interpret" at the beginning '
                              "of the program (or TRITON_INTERPRET=1) for Triton's interpreter, or call "
                              f"{self.name}.simulate(..)")
        if kind not in ("cpu", "cuda", "xpu") or kind != "cpu" and knobs.interpret():
            raise KernelError(f"{self.name} is called with arrays of {arguments.device}, where it "
                              "cannot run" + " with TRITON_INTERPRET=1" * (kind == "cuda"))
        return detect(arguments.device)

    def best(self, asked: KernelCall, arguments: Arguments, target: Target) -> tuple[KernelCall, str]:
        """A call with what tuning found fastest for such arguments, or what is compiled right, where it
        leaves that open, and how that was found."""
        owner = self.owner
        key = key_of(owner.source, asked, arguments, target, owner.precision)
        if key not in self.found:
            self.found[key] = recorded(key, owner.tunables)
        found = self.found[key]
        best, told = (asked, "") if found is None else (
            self.worded(asked, found.words), f"tuned      {found}")
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
        self.recipes.clear()
        self.calls.clear()
        return found

    def chosen(self, asked: KernelCall, target: Target) -> tuple[LoweredKernel, Meant, str]:
        """The kernel that such a call launches on a chip, compiled anew."""
        arguments = tensors_of(asked.given)
        asked, why = self.best(asked, arguments, target)
        low = lowered(self.owner.source, asked.group, arguments, target, self.owner.precision,
                      meant=asked.meant)
        return low, asked.meant, why

    def of(
        self, asked: KernelCall, arguments: Arguments, target: Target
    ) -> tuple[CompiledKernel, dict[str, int]]:
        """The kernel for arguments, and its sizes that are arguments."""
        group, precision = asked.group, self.owner.precision
        key = (group.shape, group.subgroup_size_hint, group.warps_hint, group.stages_hint, arguments.key,
               asked.meant.key, target.name, precision)
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
        kinds = [(n, k.__name__ if isinstance(k, (ModuleType, type)) else k)
                 for n, k in arguments.kinds.items()]
        kind = (group.shape, group.subgroup_size_hint, group.warps_hint, group.stages_hint, kinds,
                sorted(arguments.alike.items()), sorted(meant.places.items()), sorted(meant.constants),
                sorted(meant.tuned.items()))
        numbers = [*arguments.numbers, *(Number(f"work_shape[{at}]", f"work_{at}", n)
                                         for at, n in enumerate(group.work))]
        return KernelRequest(self.name, made_of, kind, self.owner.precision, arguments, numbers, target)


# -- calls that are known --------------------------------------------------------------------------


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


@lru_cache(maxsize=1)
def _plain() -> frozenset[type]:
    import torch

    return frozenset((torch.Tensor, torch.nn.Parameter))


def known(starters: Sequence[Callable[..., None] | None], arrays: Sequence[int], spans: Sequence[int],
          device: int) -> Known:
    """A function of the arguments of a call. ``starters``: what starts the kernel for arrays of which one
    is not aligned to 16 bytes, and for aligned ones; ``arrays``: the places of arrays among the arguments;
    ``spans``: their bytes."""
    made: Known = _spelled(tuple(arrays))(starters, device, torch_internals.current_device(), *spans)
    return made


@lru_cache(maxsize=256)
def _spelled(arrays: tuple[int, ...]) -> Any:
    """The text of such a function, in which each argument is written out."""
    rank = range(len(arrays))
    spans = "".join(f", s{i}" for i in rank)
    lines = [f"def made(starters, device, current{spans}):",
             "    far, near = starters",
             "    def run(args):",
             *(f"        t{i} = args[{int(at)}]" for i, at in enumerate(arrays)),
             *(f"        p{i} = t{i}.data_ptr()" for i in rank),
             "        if current() != device" + "".join(f" or t{i}.is_neg()" for i in rank) + ":",
             "            return False",
             *(f"        if p{i} < p{k} + s{k} and p{k} < p{i} + s{i}: return False"
               for i in rank for k in rank if i < k),
             f"        start = far if ({' | '.join(f'p{i}' for i in rank) or 0}) & 15 else near",
             "        if start is None:",
             "            return False",
             "        start(*args)",
             "        return True",
             "    return run"]
    return defined("\n".join(lines), "made")

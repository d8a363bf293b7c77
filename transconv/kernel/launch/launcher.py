"""Launches of a kernel: one compiled kernel for each kind of arguments, kept in the process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from transconv import knobs
from transconv.backend_triton import (
    Launcher,
    Miscompiled,
    SizedLauncher,
    grid_size,
    programs,
    write,
)
from transconv.errors import KernelError
from transconv.kernel.annotations import KernelCall, Meant
from transconv.kernel.group import Group
from transconv.kernel.launch.arguments import Arguments, spanned, tensors_of
from transconv.kernel.launch.launch_cache import Known, known, signature
from transconv.kernel.launch.lowering import LoweredKernel, lowered
from transconv.kernel.launch.results import Recipe, returned
from transconv.kernel.launch.tuned_choices import (
    WARPS,
    LaunchWords,
    TunedChoice,
    choices,
    key_of,
    record,
    recorded,
    with_words,
)
from transconv.kernel.launch.tuning import search
from transconv.target import Target, detect

if TYPE_CHECKING:
    from transconv.kernel.decorator import KernelFunction

KEPT = 256  # kinds of arguments of one kernel
CALLS = 4096  # calls that are known by their types and sizes


@dataclass(slots=True)
class ArgumentKind:
    """The compiled kernels for arguments of one kind. ``fixed``: the places of numbers that the kernel
    needs to know; ``plain``: of those whose divisors do not matter."""

    fixed: frozenset[int] = frozenset()
    plain: frozenset[int] = frozenset()
    compiled: list[CompiledKernel] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel and its launcher."""

    low: LoweredKernel
    launcher: Launcher

    def values(self, numbers: tuple[int, ...]) -> dict[str, int] | None:
        """The sizes that are arguments for the numbers of a call; None for one that it does not fit."""
        sizing = self.low.sizing
        if not sizing.fits(numbers):
            return None
        values = sizing.values(numbers)
        if isinstance(self.launcher, SizedLauncher) and self.launcher.requires.why_not(values):
            return None
        return values

    def starter(self, device: int, aligned: bool, order: tuple[int, ...],
                values: dict[str, int]) -> Callable[..., None] | None:
        """What starts the kernel for these sizes with the arguments at the places ``order``; None if it is
        not loaded."""
        if not isinstance(self.launcher, SizedLauncher):
            return self.launcher.starter(device, aligned, order)
        bind, sizes = self.launcher.binding(device, aligned, order), self.launcher.in_order(values)
        return None if bind is None else bind(sizes, *self.launcher.numbers(*sizes)[0])


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
        """A launch that looks at everything. ``key``: of a call that is remembered."""
        asked = self.owner.asked(args, words)
        arguments = tensors_of(asked.given)
        target = self.target_of(arguments)
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
                raise
            own = self.of(best, arguments, target)[0].low.warps
            for warps in (w for w in (2 * own, own // 2, 4 * own, own // 4) if w in WARPS):
                with suppress(Miscompiled, KernelError):
                    found = self.start(with_words(best, LaunchWords(warps)), arguments, target)
                    key = key_of(self.owner.source, asked, arguments, target, self.owner.precision)
                    self.instead[key] = LaunchWords(warps), f"instead    of {own} warps: {mistake.why}"
                    return found
            raise

    def start(self, asked: KernelCall, arguments: Arguments,
              target: Target) -> tuple[CompiledKernel, dict[str, int]] | None:
        """Launch a call; what was launched for which sizes, None for work without elements."""
        made, values = self.of(asked, arguments, target)
        if asked.group.count == 0:
            return None
        given = arguments.tensors | arguments.floats
        tensors = [given[name] for name in made.low.arguments]
        try:
            if isinstance(made.launcher, SizedLauncher):
                made.launcher.start(tensors, values)
            else:
                made.launcher(tensors)
        except Exception as error:
            if type(error).__name__ != "OutOfResources":  # of Triton, which is imported by now
                raise
            raise KernelError(f"{self.name} does not fit the chip: {error}; expected a smaller group, or "
                              f"fewer than {made.low.num_stages} stages") from None
        return made, values

    def remember(self, key: Any, made: CompiledKernel, values: dict[str, int], arguments: Arguments,
                 grouped: bool) -> None:
        """Have later calls like this one start the kernel directly. ``grouped``: whether their first
        argument is the group."""
        names = [*([""] if grouped else []), *arguments.kinds]
        places = {n: names.index(n) for n in made.low.arguments}
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
        key = (group.shape, group.warps_hint, group.stages_hint, arguments.key, asked.meant.key,
               target.name, precision)
        numbers = (*(n.value for n in arguments.numbers), *group.work)
        with self.lock:
            if len(self.kinds) >= KEPT:
                self.kinds.clear()
            kind = self.kinds.setdefault(key, ArgumentKind())
            for made in reversed(kind.compiled):
                values = made.values(numbers)
                if values is not None:
                    return made, values
            low = lowered(self.owner.source, group, arguments, target, precision, kind.fixed, kind.plain,
                          asked.meant)
            made = CompiledKernel(low, launcher_of(low))
            kind.fixed, kind.plain = low.fixed, low.plain
            values = made.values(numbers)
            if values is None:  # more programs than a launch may have
                requires = made.launcher.requires if isinstance(made.launcher, SizedLauncher) else None
                why = requires.why_not(low.sizing.values(numbers)) if requires else "it does not fit"
                raise KernelError(f"{self.name} cannot be launched for this work: {why}")
            kind.compiled.append(made)
            return made, values


def launcher_of(low: LoweredKernel) -> Launcher:
    """What launches a kernel."""
    kernel, types = low.kernel, tuple(t.dtype.torch for t in low.kernel.params)
    # The text says neither the types of the arrays nor how products are rounded.
    words = f"{low.source} {low.warps} {low.num_stages} {' '.join(types)} as written".encode()
    digest = hashlib.blake2b(words, digest_size=8).hexdigest()
    path = write(low.source, f"kernel_{low.name[:75]}_{digest}")
    if kernel.sizes:
        return SizedLauncher(low.source, kernel.name, path, programs(kernel), kernel.sizes, low.warps,
                             low.num_stages, False, types=types, key=digest, fuse=False)
    return Launcher(low.source, kernel.name, path, grid_size(kernel), low.warps, low.num_stages,
                    types=types, key=digest, fuse=False)

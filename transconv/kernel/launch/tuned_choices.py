"""Tuned choices of a kernel's launch: what is open, and what tuning has found, in the user's cache.

Open is what neither the call nor the kernel says: tunable numbers, warps and stages without a hint. The
shape of a group is never changed behind the kernel's back; it is open where the kernel declares tunable
numbers as its sizes. A record holds for calls of one kind whose sizes have as many binary digits each.

From the words that the compiler chooses, each word is changed in turn while that makes the kernel faster.
A candidate runs on copies of the arguments, and has to give what the kernel gave without tuning."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transconv.ir import For, find
from transconv.kernel.annotations import MOST_STAGES, KernelCall, Tunable
from transconv.kernel.launch.arguments import Arguments
from transconv.kernel.launch.kernel_plan import LoweredKernel
from transconv.kernel.source import FunctionSource
from transconv.support import Drawer, TransconvError, knobs, records, triton_version
from transconv.target import Target

SCHEMA = 1
DRAWER = Drawer("kernels", SCHEMA, longest=1 << 14)
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)
WITHIN = 1e-2  # of the largest value: another order of summation
BUDGET_MS = 20.0  # of timing for a candidate

Run = Callable[["LaunchWords", dict[str, Any]], None]
"""Runs the kernel with words on arrays, by name."""


@dataclass(frozen=True, slots=True)
class LaunchWords:
    """What tuning chooses of a launch; None: the compiler decides."""

    warps: int | None = None
    stages: int | None = None
    numbers: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        said = [("warps", self.warps), ("stages", self.stages), *self.numbers]
        return " ".join(f"{name}={value}" for name, value in said if value is not None) or "default"


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The fastest words of ``tried``, and microseconds of these and of the kernel without tuning."""

    words: LaunchWords = field(default_factory=LaunchWords)
    us: float = 0.0
    before_us: float = 0.0
    tried: int = 0

    def __str__(self) -> str:
        return f"{self.words}: {self.us:.4g} us, {self.before_us:.4g} us before, {self.tried} tried"


def key_of(
    source: FunctionSource, asked: KernelCall, arguments: Arguments, target: Target, precision: str
) -> str:
    """The name of a call's record."""
    group = asked.group
    numbers = (
        tuple(n.value.bit_length() for n in arguments.numbers),
        tuple(n.bit_length() for n in group.work),
    )
    hints = group.warps_hint, group.stages_hint, group.shape if not asked.declared else ()
    words = repr(
        (
            SCHEMA,
            "".join(source.lines),
            arguments.key,
            numbers,
            hints,
            target.name,
            target.sms,
            precision,
            triton_version().split(".")[:2],
        )
    )
    return f"{source.name[:60]}-{hashlib.blake2b(words.encode(), digest_size=12).hexdigest()}"


def recorded(key: str, tunables: Mapping[str, Tunable]) -> TunedChoice | None:
    """What tuning has found for a call; None where there is nothing, or nothing that may be chosen."""
    content = None if knobs.tuned() == "0" else DRAWER.get(key)
    if content is None:
        return None
    try:
        numbers = tuple(
            sorted((str(n), records.whole(v, -records.LARGEST)) for n, v in content["numbers"].items())
        )
        warps, stages = (
            content[n] if content[n] is None else records.whole(content[n]) for n in ("warps", "stages")
        )
        found = TunedChoice(
            LaunchWords(warps, stages, numbers),
            float(content["us"]),
            float(content["before_us"]),
            records.whole(content["tried"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    fits = warps in (None, *WARPS) and stages in (None, *STAGES)
    return found if fits and all(n in tunables and v in tunables[n].values for n, v in numbers) else None


def record(key: str, found: TunedChoice) -> None:
    """Keep what tuning has found."""
    words = found.words
    DRAWER.put(
        key,
        {
            "warps": words.warps,
            "stages": words.stages,
            "numbers": dict(words.numbers),
            "us": round(found.us, 3),
            "before_us": round(found.before_us, 3),
            "tried": found.tried,
        },
    )


def with_words(asked: KernelCall, words: LaunchWords) -> KernelCall:
    """A call with words; what it hints itself stays."""
    group = asked.group
    if words.warps and group.warps_hint is None:
        group = replace(group, warps_hint=words.warps)
    if words.stages and group.stages_hint is None:
        group = replace(group, stages_hint=words.stages)
    return replace(asked, group=group)


def choices(
    asked: KernelCall, low: LoweredKernel, tunables: Mapping[str, Tunable], fixed: Mapping[str, int]
) -> dict[str, tuple[Any, ...]]:
    """What may be tried of each word, the nearest to the compiler's own first."""
    found: dict[str, tuple[Any, ...]] = {
        n: t.values for n, t in tunables.items() if n not in fixed and len(t.values) > 1
    }
    if asked.group.warps_hint is None:
        digits = low.warps.bit_length()
        found["warps"] = tuple(sorted(WARPS, key=lambda w: (abs(w.bit_length() - digits), w)))
    loops = any(x.kind == "serial" for x in find(low.kernel, For))
    if asked.group.stages_hint is None and loops:
        found["stages"] = tuple(
            sorted((s for s in STAGES if s <= MOST_STAGES), key=lambda s: abs(s - low.num_stages))
        )
    return found


# -- the search ------------------------------------------------------------------------------------


def search(
    run: Run, arrays: dict[str, Any], offered: dict[str, tuple[Any, ...]], seconds: float, trials: int
) -> TunedChoice:
    """The fastest words of those offered. Nothing starts after ``seconds``, and at most ``trials`` are
    measured beside the kernel without tuning."""
    from transconv.runtime import timing

    device = next(iter(arrays.values())).device
    clock, end = timing.Clock(str(device), BUDGET_MS), time.perf_counter() + seconds
    wanted = {n: t.clone() for n, t in arrays.items()}
    run(LaunchWords(), wanted)
    before = best = _timed(clock, run, LaunchWords(), arrays)
    ranked, tried = [LaunchWords()], 0
    for words in _walk(offered, ranked):
        if tried >= trials or time.perf_counter() >= end:
            break
        tried += 1
        took = _candidate(clock, run, words, arrays, wanted)
        if took is not None and took < best:
            best = took
            ranked.append(words)
    return TunedChoice(ranked[-1], best, before, tried)


def _walk(offered: dict[str, tuple[Any, ...]], ranked: list[LaunchWords]) -> Iterator[LaunchWords]:
    """Words that differ in one word from the best so far, which is the last of ``ranked``; again after a
    round that found better ones."""
    seen = {LaunchWords()}
    while True:
        begun = ranked[-1]
        for name, values in offered.items():
            for value in values:
                made = _changed(ranked[-1], name, value)
                if made not in seen:
                    seen.add(made)
                    yield made
        if ranked[-1] == begun:
            return


def _changed(words: LaunchWords, name: str, value: Any) -> LaunchWords:
    if name in ("warps", "stages"):
        return replace(words, **{name: value})
    return replace(words, numbers=tuple(sorted((dict(words.numbers) | {name: value}).items())))


def _candidate(
    clock: Any, run: Run, words: LaunchWords, arrays: dict[str, Any], wanted: dict[str, Any]
) -> float | None:
    """Microseconds of a candidate; None for one that does not compile, or gives something else."""
    made = {n: t.clone() for n, t in arrays.items()}
    try:
        run(words, made)
        if any(not _alike(made[n], t) for n, t in wanted.items()):
            return None
        return _timed(clock, run, words, arrays)
    except TransconvError:
        return None
    except Exception as error:  # Triton's own errors: too much shared memory, a pass that fails
        if type(error).__module__.partition(".")[0] != "triton":
            raise
        return None


def _alike(a: Any, b: Any) -> bool:
    """Whether two results differ by no more than another order of summation explains."""
    import torch

    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    scale = float(b.float().nan_to_num(0.0, 0.0, 0.0).abs().max()) if b.numel() else 0.0
    return bool(torch.allclose(a.float(), b.float(), rtol=WITHIN, atol=WITHIN * scale, equal_nan=True))


def _timed(clock: Any, run: Run, words: LaunchWords, arrays: dict[str, Any]) -> float:
    copies: dict[int, dict[str, Any]] = {}

    def make(at: int) -> Callable[[], object]:
        given = copies.setdefault(at, {n: t.clone() for n, t in arrays.items()})
        return lambda: run(words, given)

    footprint = sum(t.numel() * t.element_size() for t in arrays.values())
    return float(clock.one(make, footprint).us)

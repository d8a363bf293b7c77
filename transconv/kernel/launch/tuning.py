"""Tuning of a kernel for the arguments of a call: words are tried one after the other, within a budget.

From the words that the compiler chooses, each word is changed in turn while that makes the kernel faster.
A candidate runs on copies of the arguments, and has to give what the kernel gave without tuning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from transconv.errors import TransconvError
from transconv.kernel.launch.tuned_choices import LaunchWords, TunedChoice

WITHIN = 1e-2  # of the largest value: another order of summation
BUDGET_MS = 20.0  # of timing for a candidate

Run = Callable[[LaunchWords, dict[str, Any]], None]
"""Runs the kernel with words on arrays, by name."""


def search(run: Run, arrays: dict[str, Any], offered: dict[str, tuple[Any, ...]], seconds: float,
           trials: int) -> TunedChoice:
    """The fastest words of those offered. Nothing starts after ``seconds``, and at most ``trials`` are
    measured beside the kernel without tuning."""
    from transconv.tuning.timing import Clock

    device = next(iter(arrays.values())).device
    clock, end = Clock(str(device), BUDGET_MS), time.perf_counter() + seconds
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
    if name == "warps":
        return LaunchWords(value, words.stages, words.numbers)
    if name == "stages":
        return LaunchWords(words.warps, value, words.numbers)
    return LaunchWords(
        words.warps, words.stages, tuple(sorted((dict(words.numbers) | {name: value}).items()))
    )


def _candidate(clock: Any, run: Run, words: LaunchWords, arrays: dict[str, Any],
               wanted: dict[str, Any]) -> float | None:
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

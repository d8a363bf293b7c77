"""The choice of a schedule in words: the reason, the parts of its estimate, and refused schedules.

    tuned      tuned for this problem on sm_90x132: 20.4 us, the fastest of 16 tried
    estimate   24.1 us: 784 tiles on 132 multiprocessors are 5.94 waves, 1% of the last one idle;
               9 steps of 256x64x64; 14.8 GFLOP in 7.5 us at the matrix rate; 51.5 MB in 15.5 us
    refused    34 proposals: 4 stages of 256x64 and 64x256 need ... bytes of shared memory
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import ceil, prod

from transconv.compute import Compute
from transconv.cost import count, estimate
from transconv.schedule import Box, Schedule, Scheduled, in_place, told_behind, why_not
from transconv.selection.choice import Choice
from transconv.selection.proposals import heuristics
from transconv.target import Target

WIDTH = 88


def given(schedule: Schedule, choices: list[Choice], compute: Compute, target: Target) -> list[str]:
    """Lines about a schedule that is not the first choice, because the caller set it or stride phases
    share it, and about the first choice."""
    first = choices[0]
    by = "by the caller, or together with the other stride phases" if compute.phase else (
        "by the caller")
    return [*behind(schedule, compute, target), f"chosen     {by}",
            *_wrapped("estimate", parts(schedule, compute, target)),
            *_wrapped("without", f"{first.schedule}: {first.why}")]


def reasons(choice: Choice, choices: list[Choice], compute: Compute, target: Target) -> list[str]:
    """Lines that give the reason for the first choice, its estimate, and the next best schedule."""
    lines = [*behind(choice.schedule, compute, target), *_wrapped("chosen", choice.why)]
    if choice.row is not None:
        first = next((c for c in choices if c.row is None), None)
        if first is not None:
            lines += _wrapped("", f"the estimate alone would take {first.schedule}")
    lines += _wrapped("estimate", parts(choice.schedule, compute, target))
    second = [c for c in choices if c.row is None and c.schedule != choice.schedule][:1]
    for other in second:
        unit = "" if target.backend == "interpreter" else " us"
        lines += _wrapped("next best", f"{other.us:.4g}{unit}: {other.schedule}")
    return lines


def behind(schedule: Schedule, compute: Compute, target: Target) -> list[str]:
    """Lines about what the maps behind the sum of an explicit kernel read: what is fetched and why other
    elements are loaded; none if nothing can be a box there."""
    seen = Scheduled(compute, schedule, target).main
    told = told_behind(schedule, seen) if schedule.via == "gluon" else {}
    if not any(isinstance(found, Box) for found in told.values()):
        return []
    if schedule.behind == "gather":
        reason = why_not(replace(schedule, behind="box"), compute, target)
        return _wrapped("behind", f"the consumers load it; {reason or 'behind=box would fetch it'}")
    kept = in_place(schedule, seen)
    return _wrapped("behind", "; ".join(
        f"{view.tensor.name} is " + _taken(found, view.tensor.name, view is kept)
        for view, found in told.items()))


def _taken(found: Box | str, name: str, kept: bool) -> str:
    """How one of them comes to the consumers."""
    if isinstance(found, str):
        return f"loaded: {found.removeprefix(f'{name}: ')}"
    own = f"{prod(found.extents) * found.tensor.dtype.bytes} bytes of its own"
    return f"fetched to {'where the result will be' if kept else own}"


def parts(schedule: Schedule, compute: Compute, target: Target) -> str:
    """The parts of a schedule's estimate: waves, the idle fraction of the last one, steps, floating point
    operations and bytes, each with the time that it would take alone."""
    total = estimate(schedule, compute, target)
    w = count(schedule, compute, target)
    if target.backend == "interpreter":
        return (f"{total:.4g} units of an interpreted step; {_counted(w.tiles, 'program')} of "
                f"{_counted(w.steps, 'step')}")
    slots = schedule.programs or target.sms
    waves = w.tiles / slots
    idle = (ceil(waves) * slots - w.tiles) / slots
    flops = 2 * prod(x.size for x in Scheduled(compute, schedule, target).grouped.axes)
    peak = target.tflops * 1e6 * 16 / max(16, w.bits)  # operations a microsecond
    moved = w.traffic + w.partial
    text = (f"{total:.4g} us: {_counted(w.tiles, 'tile')} on {slots} "
            f"{'programs' if schedule.programs else 'multiprocessors'} "
            f"{'is' if w.tiles == 1 else 'are'} {waves:.3g} waves, "
            f"{idle:.0%} of the last one idle; "
            f"{'two consumers take turns at them; ' if schedule.consumers > 1 else ''}"
            f"{_counted(w.steps, 'step')} of {w.m * w.group}x{w.n}x{w.k}; "
            f"{flops / 1e9:.3g} GFLOP, {flops / peak:.3g} us at the matrix unit's rate"
            f"{_wasted(schedule)}; "
            f"{moved / 1e6:.3g} MB, {moved / target.bandwidth_gbs / 1e3:.3g} us at the memory's")
    return text + (f", {w.partial / 1e6:.3g} MB of them parts of sums" if w.partial else "")


def _wasted(schedule: Schedule) -> str:
    return f", {schedule.merge} times the products of groups one by one" if schedule.merge > 1 else ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def refusals(compute: Compute, target: Target, most: int = 4) -> list[str]:
    """Lines about the proposals that are not legal, counted by reason; the numbers are those of one of
    them."""
    found: Counter[str] = Counter()
    example: dict[str, str] = {}
    for schedule in dict.fromkeys(heuristics.proposals(compute, target)):
        if reason := why_not(schedule, compute, target):
            name = re.sub(r"\d+", "#", reason)
            found[name] += 1
            example.setdefault(name, reason)
    lines = []
    for name, n in found.most_common(most):
        lines += _wrapped("refused", f"{_counted(n, 'proposal')}, such as: {example[name]}")
    if len(found) > most:
        lines.append(f"           and {sum(n for _, n in found.most_common()[most:])} more for "
                     f"{len(found) - most} other reasons")
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    """Text in lines of at most ``WIDTH``, under a heading of ten characters."""
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    lines.append(line)
    return [f"{head:<10} {lines[0]}", *(f"{'':<10} {x}" for x in lines[1:])]

"""Every stage of the compiler with the lines that it added and removed; unchanged lines are folded."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup, escape

from transconv.compute import describe
from transconv.ir import Kernel, readable
from transconv.passes import (
    EMIT,
    NAIVE,
    PROBLEM,
    SCHEDULE,
    TOGETHER,
    Form,
    forms,
    lower,
    running,
    stages,
)
from transconv.schedule import Scheduled

AROUND = 3  # lines shown beside those that changed


@dataclass(frozen=True)
class Shown:
    """One stage: its name and phrase, counts of lines added and removed, the text with these marked.
    ``note``: why there is no text."""

    name: str
    phrase: str
    added: int
    removed: int
    lines: Markup
    note: str = ""


def kernels(whole: Scheduled, title: str, math: str) -> list[tuple[str, Kernel]]:
    """The kernel after every pass."""
    return lower(whole.compute, whole.schedule, whole.target, title, math)


def shown(whole: Scheduled, made: list[tuple[str, Kernel]], problem: str,
          joined: Kernel | None) -> Iterator[Shown]:
    """Every stage in its order. ``joined``: the kernel of all stride phases, where there is one."""
    kernels_of, runs = dict(made), running()
    before: list[str] = []
    first, *_ = forms()
    for stage in stages():
        if stage is PROBLEM:
            yield Shown(stage.name, stage.phrase, 0, 0, escape(problem))
        elif stage is SCHEDULE:
            yield Shown(stage.name, stage.phrase, 0, 0, escape(str(whole.schedule)))
        elif isinstance(stage, Form):
            after = describe(stage.of(whole)).splitlines()
            yield _changed(stage.name, stage.phrase, before if stage is not first else [], after)
            before = after
        elif stage.name in kernels_of:
            after = readable(kernels_of[stage.name]).splitlines()
            old = [] if stage is NAIVE else before
            off = "switched off" if not runs.get(stage.name, True) else ""
            yield _changed(stage.name, stage.phrase, old, after, off)
            before = after
        elif stage is TOGETHER and joined is not None:
            yield _changed(stage.name, stage.phrase, before, readable(joined).splitlines())
        elif stage is TOGETHER:
            yield Shown(stage.name, stage.phrase, 0, 0, Markup(""), "nothing to put together")
        elif stage is EMIT:
            yield Shown(stage.name, stage.phrase, 0, 0, Markup(""), "the text is shown below")


def _changed(name: str, phrase: str, before: list[str], after: list[str], note: str = "") -> Shown:
    if not before:
        return Shown(name, phrase, 0, 0, escape("\n".join(after)))
    if before == after:
        return Shown(name, phrase, 0, 0, Markup(""), note or "unchanged")
    lines: list[Markup] = []
    added = removed = 0
    match = difflib.SequenceMatcher(None, before, after, autojunk=False)
    groups = list(match.get_grouped_opcodes(AROUND))
    at = 0
    for group in groups:
        if group[0][3] > at:
            lines.append(_skipped(group[0][3] - at))
        for kind, i, j, k, n in group:
            if kind == "equal":
                lines += [escape(x) for x in after[k:n]]
                continue
            lines += [Markup('<span class="gone">{}</span>').format(x) for x in before[i:j]]
            lines += [Markup('<span class="came">{}</span>').format(x) for x in after[k:n]]
            removed, added = removed + j - i, added + n - k
        at = group[-1][4]
    if at < len(after):
        lines.append(_skipped(len(after) - at))
    return Shown(name, phrase, added, removed, Markup("\n").join(lines))


def _skipped(count: int) -> Markup:
    return Markup('<span class="same">{}</span>').format(f"... {count} line{'s' * (count > 1)} as before")

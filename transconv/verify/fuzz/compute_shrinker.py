"""Simpler trials than a given one of a computation: fewer words, steps and tensors, plainer coordinates,
numbers in place of arguments, smaller axes.

A text is made simpler line by line; what does not read, and a schedule that is not legal for it, is left
out. fuzz/shrinker.py asks which of them still fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from transconv.compute import END, kernels, one_line
from transconv.errors import TransconvError
from transconv.schedule import Block, Schedule
from transconv.target import Target
from transconv.verify.draw import legal_schedules
from transconv.verify.fuzz.compute_trial import ComputeTrial, completes
from transconv.verify.fuzz.shrinker import less, schedules

Lines = list[str]
NAME = r"[A-Za-z_]\w*"


def simpler(trial: ComputeTrial) -> Iterator[ComputeTrial]:
    """Legal trials that differ from this one in one respect."""
    lines = [line.strip() for line in one_line(trial.text).split(END)]
    for made in _ways(trial, lines):
        try:
            if made != trial and _is_legal(made):
                yield made
        except (TransconvError, ValueError):  # no such computation
            continue


def smaller(trial: ComputeTrial) -> Iterator[ComputeTrial]:
    """Legal trials that have half of the largest axis that can be halved."""
    lines = str(trial.compute).splitlines()
    lines = [line.strip() for line in lines]
    for name, size in sorted(trial.compute.sizes.items(), key=lambda x: -x[1]):
        for made in _axes(lines, name, [size // 2]) if size > 1 else ():
            try:
                if _is_legal(found := _on(trial, made)):
                    yield found
            except (TransconvError, ValueError):
                continue


def _is_legal(trial: ComputeTrial) -> bool:
    compute, target = trial.compute, Target.parse(trial.target)
    if not trial.schedule or not all(x.size for x in compute.axes):
        return not trial.schedule
    schedule = Schedule.parse(trial.schedule)
    if (schedule.red or schedule.row) and not schedule.blocks:
        return completes(schedule, compute, target)
    return kernels(compute) == (compute,) and legal_schedules.is_legal(schedule, [compute], target)


def _ways(trial: ComputeTrial, lines: Lines) -> Iterator[ComputeTrial]:
    if trial.schedule:
        yield replace(trial, schedule="")
        yield from (replace(trial, schedule=str(s)) for s in schedules(Schedule.parse(trial.schedule)))
    yield from (_on(trial, made) for ways in (_fewer, _numbers, _values, _coordinates, _shorter)
                for made in ways(lines))


def _on(trial: ComputeTrial, lines: Lines) -> ComputeTrial:
    """The trial of another text; blocks forget axes that are gone."""
    made = replace(trial, text=f" {END} ".join(lines))
    if not trial.schedule:
        return made
    known = {x for line in lines if line.startswith("axes ") for x in re.findall(rf"({NAME})=", line)}
    schedule = Schedule.parse(trial.schedule)
    kept = [(tuple(a for a in b.axes if a in known), b.extent) for b in schedule.blocks]
    order = ".".join(a for a in schedule.order.split(".") if a in known)
    return replace(made, schedule=str(replace(
        schedule, blocks=tuple(Block(axes, n) for axes, n in kept if axes), order=order)))


def _fewer(lines: Lines) -> Iterator[Lines]:
    """Without a line, a condition, a fill, a way to multiply."""
    for at, line in enumerate(lines):
        before, after = lines[:at], lines[at + 1:]
        if not line.startswith(("compute ", "axes ", "sizes ")):
            yield before + after
        for part in (r" math=\w+", r" where [^=]*?(?= \+?= | else |$)", r" where .*?(?= else |$)",
                     r" else \S+", r" strides\([\d,]*\)"):
            if (shorter := re.sub(part, "", line)) != line and "where(" not in re.findall(part, line):
                yield [*before, shorter, *after]
        if line.startswith("tensor "):
            yield [*before, re.sub(rf"^(tensor {NAME}) \w+", r"\1 f32", line), *after]


def _numbers(lines: Lines) -> Iterator[Lines]:
    """A number in place of a size that is an argument; a condition less."""
    at = next((i for i, line in enumerate(lines) if line.startswith("sizes ")), None)
    if at is None:
        return
    words = [w.strip() for w in lines[at].removeprefix("sizes ").split(",")]
    for word in words:
        found = re.match(rf"({NAME})=(\d+)", word)
        gone = rf"\b{found[1]}\b" if found else re.escape(word)  # a size, and what is asked of it
        rest = [w for w in words if not re.search(gone, w)]
        others = [*lines[:at], *([f"sizes {', '.join(rest)}"] if rest else []), *lines[at + 1:]]
        if found is None:
            yield others
            continue
        yield [re.sub(rf"\b{found[1]}\b", found[2], line) for line in others]


def _values(lines: Lines) -> Iterator[Lines]:
    """A name, or a part, in place of a value."""
    known: list[str] = []
    for at, line in enumerate(lines):
        word, _, rest = line.partition(" ")
        if word in ("let", "store"):
            target, equals, value = re.split(r"(?<![=<>!])(\s\+?=)(?!=)", line, maxsplit=1)
            inner = [*known, *re.findall(r"\(([^();]+)\)", value), *re.split(r" [-+*/] ", value.strip())]
            for other in dict.fromkeys(p.strip() for p in inner):
                if other != value.strip() and len(other) < len(value):
                    yield [*lines[:at], f"{target}{equals} {other}", *lines[at + 1:]]
        if word in ("let", "read"):
            known.append(rest.partition("=")[0].strip())


def _coordinates(lines: Lines) -> Iterator[Lines]:
    """An axis, or the first position, in place of what is computed of it."""
    for at, line in enumerate(lines):
        found = re.search(r"\[(.*)\]", line) if line.startswith(("read ", "store ")) else None
        if found is None:
            continue
        parts = re.split(r",\s*(?![^()]*\))", found[1])
        for i, part in enumerate(parts):
            for other in (*dict.fromkeys(re.findall(NAME, part)), "0"):
                if other != part.strip():
                    changed = ", ".join((*parts[:i], other, *parts[i + 1:]))
                    yield [*lines[:at], line.replace(found[0], f"[{changed}]", 1), *lines[at + 1:]]


def _shorter(lines: Lines) -> Iterator[Lines]:
    at = next(i for i, line in enumerate(lines) if line.startswith("axes "))
    for name, size in re.findall(rf"({NAME})=(\d+)", lines[at]):
        yield from _axes(lines, name, less(int(size)))


def _axes(lines: Lines, name: str, sizes: list[int]) -> Iterator[Lines]:
    """An axis of other sizes, with the dimensions that are as large, and alone."""
    at = next(i for i, line in enumerate(lines) if line.startswith("axes "))
    size = next(n for a, n in re.findall(rf"({NAME})=(\d+)", lines[at]) if a == name)
    for n in sizes:
        made = [*lines[:at], re.sub(rf"\b{name}={size}\b", f"{name}={n}", lines[at]), *lines[at + 1:]]
        yield [re.sub(rf"(?<![\w.]){size}(?=[\],])", str(n), line)
               if line.startswith("tensor ") else line for line in made]
        yield made

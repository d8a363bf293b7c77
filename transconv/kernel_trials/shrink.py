"""Simpler programs: fewer statements, values that are another one, blocks without their heads, less work,
smaller arrays. Whether they fail in the same way is asked elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from transconv.errors import ProblemError
from transconv.kernel_trials.trial import Drawn, KernelTrial
from transconv.verify.fuzz.shrinker import less

VALUE = re.compile(r"\bv\d+\b")
ASSIGNED = re.compile(r"(>*) ?(v\d+) = (.*)")


def simpler(trial: KernelTrial) -> Iterator[KernelTrial]:
    """Programs that differ from this one in one respect, and define every value that they use."""
    for made in _ways(trial):
        if made != trial and made.lines and _defined(made.lines) and _is_read(made := _unused(made)):
            yield made


def _is_read(trial: KernelTrial) -> bool:
    """Whether its line is one: a part of an expression may be none."""
    try:
        return KernelTrial.parse(str(trial)) == trial
    except ProblemError:
        return False


def _ways(trial: KernelTrial) -> Iterator[KernelTrial]:
    for lines in (*_fewer(trial.lines), *_unwrapped(trial.lines), *_values(trial.lines)):
        yield replace(trial, lines=tuple(lines))
    for at in range(len(trial.work)):
        for sizes, field in ((trial.work, "work"), (trial.group, "group")):
            for n in less(sizes[at]):
                changed = (*sizes[:at], n, *sizes[at + 1:])
                yield (replace(trial, work=changed) if field == "work" else replace(trial, group=changed))
    for at, (name, array) in enumerate(trial.arrays):
        for other in _smaller(array):
            yield replace(trial, arrays=(*trial.arrays[:at], (name, other), *trial.arrays[at + 1:]))


def _smaller(array: Drawn) -> Iterator[Drawn]:
    plain = "f32" if array.dtype[0] == "f" else "i32"
    if array.dtype != plain and not array.full and array.dtype != "bool":
        yield replace(array, dtype=plain)
    for at, size in enumerate(array.shape):
        for n in less(size):
            yield replace(array, shape=(*array.shape[:at], n, *array.shape[at + 1:]))


def _deep(line: str) -> int:
    return len(line) - len(line.lstrip(">"))


def _behind(lines: tuple[str, ...], at: int) -> int:
    """The first line behind a statement and what is inside of it."""
    end = at + 1
    while end < len(lines) and _deep(lines[end]) > _deep(lines[at]):
        end += 1
    return end


def _fewer(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Without a statement and what is inside of it, the last first; an ``else`` goes with its ``if``."""
    for at in reversed(range(len(lines))):
        end = _behind(lines, at)
        yield lines[:at] + lines[end:]
        if end < len(lines) and lines[end].lstrip("> ").startswith("else"):
            yield lines[:at] + lines[_behind(lines, end):]


def _unwrapped(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What is inside of a branch in its place."""
    for at, line in enumerate(lines):
        if line.endswith(":") and not line.lstrip("> ").startswith(("def ", "else", "for ")):
            end = _behind(lines, at)
            yield lines[:at] + tuple(x[1:].lstrip() if _deep(x) == 1 else x[1:]
                                     for x in lines[at + 1:end]) + lines[end:]


def _values(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """An earlier value, or a part in brackets, for an expression."""
    for at, line in enumerate(lines):
        found = ASSIGNED.fullmatch(line)
        if found is None:
            continue
        head, target, value = found.groups()
        lead = f"{head} " if head else ""
        known = [m[2] for x in lines[:at] if (m := ASSIGNED.fullmatch(x)) and _deep(x) <= len(head)]
        parts = [*VALUE.findall(value), *known[:3], *re.findall(r"\(([^()]+)\)", value)]
        for other in dict.fromkeys(parts):
            if other not in (value, target) and len(other) < len(value) and VALUE.search(other):
                yield (*lines[:at], f"{lead}{target} = {other}", *lines[at + 1:])
        for old in dict.fromkeys(VALUE.findall(value)):
            if known and old not in (known[0], target):
                yield (*lines[:at], f"{lead}{target} = " + re.sub(rf"\b{old}\b", known[0], value),
                       *lines[at + 1:])


def _defined(lines: tuple[str, ...]) -> bool:
    """Whether each value is assigned before it is used, and each block has a statement."""
    known: dict[str, int] = {}
    for at, line in enumerate(lines):
        deep = _deep(line)
        found = ASSIGNED.fullmatch(line)
        for name in VALUE.findall(found[3] if found else line):
            if known.get(name, 99) > deep:
                return False
        known = {n: d for n, d in known.items() if d <= deep}
        if found:
            known.setdefault(found[2], deep)
        inside = at + 1 < len(lines) and _deep(lines[at + 1]) > deep
        if line.endswith(":") != inside or inside and _deep(lines[at + 1]) > deep + 1:
            return False
        if line.lstrip("> ").startswith("else") and not _follows_if(lines, at):
            return False
    return True


def _follows_if(lines: tuple[str, ...], at: int) -> bool:
    before = next((x for x in reversed(lines[:at]) if _deep(x) <= _deep(lines[at])), "")
    return _deep(before) == _deep(lines[at]) and before.lstrip("> ").startswith("if ")


def _unused(trial: KernelTrial) -> KernelTrial:
    """Without the arrays that no statement mentions."""
    whole = "\n".join(trial.lines)
    kept = tuple((n, a) for n, a in trial.arrays if re.search(rf"\b{n}\b", whole))
    return replace(trial, arrays=kept) if kept else trial

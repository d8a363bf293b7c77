"""What records on disk are found by: texts of computations and chips, and a digest of this package."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Container
from dataclasses import fields, is_dataclass
from pathlib import Path

from transconv.compute import Compute, Reduction, Value, Write
from transconv.ir import free_vars
from transconv.target import Target

NAME = re.compile(r"\b[A-Za-z_]\w*\b(?!\()")  # of no function
FRACTION = re.compile(r"(?<![\w.])(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)")
TELLING = ("0.0", "1.0")  # numbers that may stand for nothing to compute


def unnamed(compute: Compute) -> str:
    """A text of all of a computation but its name and those of its tensors and values, and the fractions
    that values are computed with, on which no choice depends: blocks of a network may differ in a
    probability alone. Fractions that decide where elements lie, or whether they are read, stay. Axes keep
    their names, because schedules mention them."""
    named = [n for t in compute.tensors for n in (t.name, *t.dims)]
    named += [s.name for s in compute.steps if not isinstance(s, Write)]
    numbers = {n: f"%{i}" for i, n in enumerate(dict.fromkeys(named)) if n not in compute.sizes}
    placing = _placing(compute)
    text = "\n".join(_without_fractions(line, placing) for line in str(compute).split("\n")[1:])
    lines = NAME.sub(lambda m: numbers.get(m[0], m[0]), text)
    rest = (compute.math, compute.merge, compute.behind, compute.part, compute.does,
            [(x.name, x.role) for x in compute.axes], [str(t.layout) for t in compute.tensors])
    return f"{lines}\n{rest}"


def _placing(compute: Compute) -> set[str]:
    """The names of values that coordinates and masks depend on."""
    found = {v for view in compute.views() for d in view.dims for e in (d.coord, d.mask)
             for v in free_vars(e)}
    for step in reversed(compute.steps):
        if isinstance(step, (Value, Reduction)) and step.var in found:
            found |= free_vars(step.value)
    return {v.name for v in found}


def _without_fractions(line: str, placing: Container[str]) -> str:
    """A line, with a sign for each fraction if it computes a value that is not ``placing`` others; what a
    read fills with stays."""
    word, *rest = line.split(maxsplit=2)
    if word != "let" or rest[0] in placing:
        return line
    return FRACTION.sub(lambda m: m[0] if m[0] in TELLING else "#", line)


@functools.lru_cache(maxsize=64)
def told_by(record: Target) -> list[str]:
    """The values of a record's fields, with sets sorted, so that their text is reproducible."""
    assert is_dataclass(record)
    values = [getattr(record, f.name) for f in fields(record)]
    return [repr(sorted(map(str, v)) if isinstance(v, frozenset) else v) for v in values]


@functools.cache
def files_digest() -> str:
    """A digest of the package's source files and tables, because another version may choose other
    schedules. It uses their content, not their dates, so that a cache can be moved to another machine."""
    root = str(Path(__file__).parents[2])
    seen = hashlib.blake2b(digest_size=16)
    paths = [f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names
             if name.endswith((".py", ".csv"))]
    for path in sorted(paths):  # os.walk and open: pathlib takes twice as long
        with open(path, "rb", buffering=0) as file:
            data = file.read()
        name = path[len(root):].replace(os.sep, "/")
        seen.update(f"{name} {len(data)}\n".encode())
        seen.update(data)
    return seen.hexdigest()

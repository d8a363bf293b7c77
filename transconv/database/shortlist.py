"""The database. The shortlist of a kernel, kept on disk: one process estimates a thousand configs,
others read the few that came first.

A record stands under a digest of all that the choice depends on: the algorithm, the problem, the target,
the tuned rows that have a say, and this package's own files. What is read back is held against the
rules of the chip like any row, and its kernel is checked like any other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass
from pathlib import Path

from transconv import __version__, knobs
from transconv.algorithm import Algorithm
from transconv.config import Config
from transconv.database import choice, store
from transconv.database.rows import group, machine, problem_text
from transconv.drawer import Content, Drawer
from transconv.problem import ConvProblem, Prop
from transconv.target import Target

SCHEMA = 1
DRAWER = Drawer("shortlists", SCHEMA, longest=1 << 16)


@dataclass(frozen=True, slots=True)
class Listed:
    """A config, why it stands where it stands, and whether tuning found it."""

    config: Config
    why: str
    tuned: bool


def shortlist(count: int, algorithm: Algorithm, target: Target, problem: ConvProblem,
              prop: Prop) -> list[Listed]:
    """The most promising configs, as ``choice.ranked`` has them. Raises ConfigError as it does."""
    key = "" if knobs.config() else _key(count, algorithm, target, problem, prop)
    if key and (found := _read(DRAWER.get(key), algorithm, target)):
        return found
    made = [Listed(c.config, c.why, c.row is not None)
            for c in choice.ranked(algorithm, target, problem, prop)[:count]]
    if key:
        DRAWER.put(key, {"configs": [{"config": str(k.config), "why": k.why, "tuned": k.tuned}
                                     for k in made], "problem": problem_text(problem), "prop": prop.value})
    return made


def _read(content: Content | None, algorithm: Algorithm, target: Target) -> list[Listed]:
    """The list of a record; none where one makes no sense."""
    try:
        found = [Listed(Config.parse(c["config"]), str(c["why"]), c["tuned"] is True)
                 for c in (content or {})["configs"]]
    except (KeyError, TypeError, ValueError, AttributeError):  # a ConfigError is a ValueError
        return []
    return found if all(choice.believable(k.config, algorithm, target) for k in found) else []


def _key(count: int, algorithm: Algorithm, target: Target, problem: ConvProblem,
         prop: Prop) -> str:
    groups = dict.fromkeys(group(p, prop.value, machine(target))
                           for p in (problem, problem.with_layout("axb")))
    rows = [sorted(map(astuple, store.rows_of(name))) for name in groups]
    told = (__version__, count, str(algorithm), problem_text(problem), prop.value, _told(target),
            rows, _files())
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _told(record: object) -> list[str]:
    """The fields of a record, sets in order."""
    assert is_dataclass(record)
    values = [getattr(record, f.name) for f in fields(record)]
    return [repr(sorted(map(str, v)) if isinstance(v, frozenset) else v) for v in values]


@functools.cache
def _files() -> Sequence[tuple[str, int, int]]:
    """The files that choose: another version of them may choose otherwise."""
    root = Path(__file__).parents[1]
    return [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns)
            for p in sorted(root.rglob("*.py"))]

"""Finds a point where a rewrite of the simplifier changes the value.

A witness (see ``simplify/fixpoint.py``) is shown every rewrite of a pass that is replayed, inner
nodes first, and computes both sides at points that the facts allow (see ``bisect/points.py``). So the
first unsound step is found, not what later steps made of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import transconv.simplify
from transconv.ir import Array, Expr, readable
from transconv.simplify import Facts, fixpoint, multiple_of, range_of, witnessed
from transconv.verify.bisect.points import AssignedPoints

_FOLDER = str(Path(transconv.simplify.__file__).parent)


class Unsound(Exception):
    """A rewrite that changes the value. ``rule``: the name of the rule, or of the analysis that
    told it something false; ``place``: the line that made the wrong expression."""

    def __init__(self, rule: str, before: str, after: str, at: str, facts: str,
                 place: str = "") -> None:
        where = f" ({place})" if place else ""
        super().__init__(f"{rule}{where}: {before} became {after}, wrong at {at}"
                         + (f", where {facts} holds" if facts else ""))
        self.rule, self.before, self.after, self.at, self.place = rule, before, after, at, place


@contextmanager
def audited(seed: int = 0) -> Iterator[Audit]:
    """Check every rewrite within ``with``; raises Unsound at the first that is wrong."""
    audit = Audit(np.random.default_rng(seed))
    with witnessed(audit.look):
        yield audit


def rule_of(rewrite: Callable[[], object], seed: int = 0) -> str:
    """The rule of the simplifier that makes a rewrite wrong, in words; empty if none does."""
    try:
        with audited(seed):
            rewrite()
    except Unsound as unsound:
        return str(unsound)
    except Exception:  # it fails by itself, which has been told
        return ""
    return ""


class Audit:
    """A witness that checks. ``checked`` rewrites, and those ``skipped`` for want of a point."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.checked = self.skipped = 0
        self._seen: set[tuple[Expr, Expr, Facts]] = set()

    def look(self, rule: str, before: Expr, after: Expr, facts: Facts) -> None:
        """Raises Unsound."""
        key = before, after, facts
        if key in self._seen:
            return
        self._seen.add(key)
        points = AssignedPoints.draw((before, after), facts, self.random)
        if points is None:
            self.skipped += 1
            return
        old = points.value(before)
        if old is None:
            self.skipped += 1
            return
        self.checked += 1
        self._analyses(before, old, points, facts)
        new = old if after is before else points.value(after)
        if new is None:
            self.skipped += 1
        elif (wrong := points.differ(old, new)) is not None:
            raise Unsound(
                rule, f"`{readable(before)}`", f"`{readable(after)}`",
                f"{points.text(wrong)}: {_at(old, wrong)} became {_at(new, wrong)}",
                points.given(facts), _origin(before, after, facts) if rule != "settle" else "")

    def _analyses(self, e: Expr, values: Array, points: AssignedPoints, facts: Facts) -> None:
        """What the simplifier believes of a value."""
        if not e.dtype.is_integer:
            return
        found, n = range_of(e, facts), multiple_of(e, facts)
        outside = (values < found.low) | (values > found.high)
        odd = (values % n != 0) if n else values != 0
        for bad, name, claim in ((outside, "range_of", f"{found.lo}..{found.hi}"),
                                 (odd, "multiple_of", f"a multiple of {n}")):
            if (wrong := points.first(bad)) is not None:
                raise Unsound(name, f"`{readable(e)}`", claim,
                              f"{points.text(wrong)}: it is {_at(values, wrong)}",
                              points.given(facts))


def _at(values: Array, where: int) -> str:
    return f"{values.flat[0] if values.size == 1 else values[where]:g}"


def _origin(before: Expr, after: Expr, facts: Facts) -> str:
    """The function and line of the simplifier that first returned the wrong expression: the rule
    is applied once more, traced."""
    found: list[str] = []

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_FOLDER):
            return None
        if event == "return" and value is after and not found:
            name = Path(frame.f_code.co_filename).name
            found.append(f"{frame.f_code.co_name}, simplify/{name}:{frame.f_lineno}")
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        fixpoint._step(before, facts)
    except Unsound:
        pass  # the witness observes this call
    finally:
        sys.settrace(earlier)
    return found[0] if found else ""

"""Plans on disk compared with what the passes make of their questions now.

A record (``plan_cache.py``) has the question that it answers. The plan is made again, its schedules chosen
and its kernels lowered, and every field of the record has to be as it would be written now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transconv.runtime import check_records, compiler, plan_cache
from transconv.runtime.compilation.plan_request import PlanRequest
from transconv.runtime.plans import Plan
from transconv.selection import files_digest
from transconv.support import Content, StageError, TransconvError

MOST = 5  # differences of one record that are told


@dataclass(frozen=True)
class Compared:
    """Plans on disk: how many are as the passes make them; those that are not, or that nobody reads as
    others may have written them, each with what is wrong (``wrong``); those that cannot be compared here,
    each with the reason (``left``)."""

    same: int
    wrong: tuple[tuple[str, tuple[str, ...]], ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        head = (
            f"{self.same} plans are as the passes make them; {len(self.wrong)} are not; "
            f"{len(self.left)} are not compared"
        )
        told = [f"wrong: {name}: {line}" for name, lines in self.wrong for line in lines]
        return "\n".join([head, *told, *(f"not compared: {name}: {why}" for name, why in self.left)])


def compare() -> Compared:
    """Make all plans on disk again. Raises ValueError where this process keeps none."""
    if not plan_cache.keeps():
        raise ValueError(
            "plans are neither read nor kept with TRANSCONV_VERIFY, TRANSCONV_DUMP, "
            "TRANSCONV_DEBUG=2, TRANSCONV_SCHEDULE, or with passes or words from outside"
        )
    same, wrong, left = 0, list[tuple[str, tuple[str, ...]]](), list[tuple[str, str]]()
    for name in plan_cache.DRAWER.keys():
        if reason := plan_cache.DRAWER.why_ignored(name):
            wrong.append((name, (f"{reason}; it is never executed",)))
            continue
        content = plan_cache.DRAWER.get(name) or {}
        try:
            question = _question(name, content)
        except (*plan_cache.UNREADABLE, ImportError, TransconvError) as error:
            left.append((name, str(error)))
            continue
        told = _told(content, question)
        if told:
            more = [f"and {len(told) - MOST} more"] if len(told) > MOST else []
            wrong.append((f"{name}: {question}".splitlines()[0], (*told[:MOST], *more)))
        else:
            same += 1
    return Compared(same, tuple(wrong), tuple(left))


def _question(name: str, content: Content) -> PlanRequest:
    """The question of a record. Raises ValueError or Unsupported, with the reason, where it has no answer
    here."""
    if content["files"] != files_digest():
        raise ValueError("it is of another version of transconv")
    job = content["question"]
    if job["front"] not in sys.modules and not job["front"].startswith("transconv."):
        raise ValueError(f"its front end {job['front']} is not loaded")
    found = PlanRequest.of_job(job)
    if plan_cache.key(found.workload, found.target, found.deterministic) != name:
        raise ValueError("it was made with other settings, tuned rows or versions: no call here reads it")
    found.workload.refuse()  # a kernel written in Python: its function is where it is called
    return found


def _told(content: Content, question: PlanRequest) -> list[str]:
    """Where a record differs from the plan that is made now."""
    try:
        keys = [str(s["digest"]) for s in content["steps"]]
        rejected, tuned = int(content["rejected"]), bool(content["tuned"])
        if any(map(check_records.is_wrong, keys)) or check_records.is_passed_over(keys, rejected, tuned):
            return []  # no call reads it, and the next one that asks replaces it
        made = compiler.build(question.workload, question.target, None, None, question.deterministic, Plan)
        plan_cache.read(
            content, question.workload, question.target, question.deterministic, Plan, lambda: made
        )
    except (*plan_cache.UNREADABLE, TransconvError, StageError) as error:
        return [f"it is no plan, or none can be made: {error}".splitlines()[0]]
    return [*_apart("", content, json.loads(json.dumps(plan_cache.content_of(made))))]


def _apart(at: str, found: Any, made: Any) -> Iterator[str]:
    """The places in which two JSON values differ."""
    if isinstance(found, dict) and isinstance(made, dict):
        for key in sorted({*found, *made}):
            yield from _apart(f"{at}.{key}" if at else key, found.get(key), made.get(key))
    elif isinstance(found, list) and isinstance(made, list) and len(found) == len(made):
        for n, pair in enumerate(zip(found, made, strict=True)):
            yield from _apart(f"{at}[{n}]", *pair)
    elif found != made:
        yield f"{at} is {_short(found)}, the passes make {_short(made)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

"""The child of compilation/async_compile.py: ``python -m transconv.runtime.compilation.compile_child``
reads requests as lines of JSON, makes their plans, compiles the kernels into Triton's cache, and answers
with the outcome."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import time
from contextlib import suppress
from typing import IO, Any

from transconv.backend_triton import Miscompiled, pretend, reason_of, serve
from transconv.compute import Workload
from transconv.runtime import check_records, compiler, plan_cache
from transconv.runtime.compilation.plan_request import PlanRequest, Room
from transconv.runtime.plans import Plan, PlanStep
from transconv.runtime.steps import estimated
from transconv.selection import files_digest
from transconv.support import TransconvError, Unsupported
from transconv.target import Target

NICE = 15  # lower priority than the program that runs meanwhile
COLLECT = 32  # requests after which the interpreter looks for cycles: that takes a tenth of the time else

_jobs = itertools.count(1)


def main() -> None:
    """Answer requests until the input ends."""
    with suppress(OSError):
        os.nice(NICE)
    gc.disable()
    serve(answer)


def answer(job: dict[str, Any], _noise: IO[bytes] | None = None) -> dict[str, Any]:
    """Make and compile the plan of a request; where it asks for the ``rank`` of schedules alone, these are
    listed, and their time is estimated; where for the ``start``, what all need is imported, and a plan
    that it names is made for that alone. In the answer, ``wrong``: kernels that failed to compile and were
    replaced by the next best ones. Requests that belong together (``batch``) have an answer ``each``; who
    has no room (``most``) is ``left``. Raises Unsupported if no kernel is left, and as ``build``."""
    if "batch" in job:
        return _each(job["batch"], Room(job["most"]))
    started = time.perf_counter()
    if job.get("start"):
        importlib.import_module("triton.compiler")
        importlib.import_module("sympy.polys.rings")  # the simplifier's, for the first task's kernels
        files_digest()
        if "problem" in job:
            _rehearse(job)
        gc.freeze()
        return {}
    workload, target = _request(job)
    if job.get("rank"):
        _look_for_cycles()
        with suppress(TransconvError):  # it is on disk as well
            estimated(workload, target)
        return {"seconds": round(time.perf_counter() - started, 3)}
    return _made(job, workload, target, started, Room(0))


def _each(jobs: list[dict[str, Any]], room: Room) -> dict[str, Any]:
    """The answers to requests that belong together; an error is that of its request."""
    found: list[dict[str, Any]] = []
    for job in jobs:
        if room.is_full:
            found.append({"left": True})
            continue
        try:
            found.append(_made(job, *_request(job), time.perf_counter(), room))
        except Exception as error:
            found.append({"reason": reason_of(error)})
    return {"each": found}


def _made(
    job: dict[str, Any], workload: Workload, target: Target, started: float, room: Room
) -> dict[str, Any]:
    """The answer to a request whose plan is made and compiled, as far as there is room."""
    _look_for_cycles()
    pretend(target.backend, target.arch, target.warp_size)
    patient = not job.get("hurried")
    if "made" in job:
        return _compiled_as_made(job, workload, target, started)
    plan = compiler.plan(workload, target, None, job["deterministic"], Plan)
    wrong: list[dict[str, Any]] = []
    spilled: list[tuple[str, int]] = []
    for _ in range(compiler.MOST_REJECTED + check_records.MOST_SPILT):
        if not room.takes(plan.digests):
            return {"left": True, "wrong": wrong, "spilled": spilled}
        found = _compile(plan, job["aligned"], patient)
        if found is None and (more := compiler.spills(plan)):
            spilled += more
            compiler.adopt({"spilled": more})
            plan = compiler.replan(plan)
            continue
        if found is None:
            room.there |= plan.digests
            return {
                "kernels": len(plan.steps),
                "wrong": wrong,
                "spilled": spilled,
                "schedule": str(plan.schedule),
                "seconds": round(time.perf_counter() - started, 3),
            }
        wrong.append(found)
        compiler.adopt({"wrong": [found]})
        plan = compiler.replan(plan)
    raise Unsupported(
        "miscompiled", f"{compiler.MOST_REJECTED} plans do not compile: {wrong[-1]['reason']}"
    )


def _compiled_as_made(
    job: dict[str, Any], workload: Workload, target: Target, started: float
) -> dict[str, Any]:
    """The answer to a request for the texts of a plan whose schedules were given."""

    def again() -> Plan:
        raise Unsupported("compile:failed", "a plan of given schedules is compiled as it is")

    plan = plan_cache.read(job["made"], workload, target, job["deterministic"], Plan, again)
    if found := _compile(plan, job["aligned"], True):
        raise Unsupported("miscompiled", found["reason"])
    return {"kernels": len(plan.steps), "seconds": round(time.perf_counter() - started, 3)}


def _look_for_cycles() -> None:
    """Sometimes, in place of the interpreter's own way."""
    if next(_jobs) % COLLECT == 0:
        gc.collect()


def _request(job: dict[str, Any]) -> tuple[Workload, Target]:
    question = PlanRequest.of_job(job)
    return question.workload, question.target


def _rehearse(job: dict[str, Any]) -> None:
    """Import and parse what a first plan needs, by making and compiling one, which is not kept."""
    with suppress(Exception):  # a request meets it if it is about that
        workload, target = _request(job)
        pretend(target.backend, target.arch, target.warp_size)
        _compile(
            compiler.plan(workload, target, None, job["deterministic"], Plan, keeps=False),
            job["aligned"],
            False,
        )


def _compile(plan: Plan, aligned: bool, patient: bool) -> dict[str, Any] | None:
    """Compile each kernel. Returns a report of the first that fails, or None."""
    for step in plan.steps:
        try:
            step.triton.compile(aligned, patient)
        except Miscompiled as error:
            return _wrong(step, aligned, error.why, True)
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "triton":
                raise
            return _wrong(step, aligned, f"{type(error).__name__}: {error}", False)
    return None


def _wrong(step: PlanStep, aligned: bool, reason: str, keep: bool) -> dict[str, Any]:
    return {
        "kernel": check_records.variant(step.digest, aligned),
        "function": step.triton.function,
        "reason": reason[:1000],
        "schedule": str(step.schedule),
        "keep": keep,
    }


if __name__ == "__main__":
    main()

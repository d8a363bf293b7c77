"""Plans whose kernels are compiled, and processes that compile in the background.

    now          the plan is made and its kernels are compiled in this process, unless a process has begun
                 to do so ahead of the request (``ahead``), for which it then waits
    background   if kernels are not compiled, the request is refused ("compiling") while a process compiles
                 them; later requests get the plan, one new plan at a time, with a pause after each
    never        if kernels are not compiled, the request is refused ("compile:never")
    text         the plan is made in this process, for somebody who reads it; nothing is compiled

A process writes the plan (``plan_cache.py``) and the machine code (Triton's cache) to disk, where later
requests find them. Failures are remembered with their reason. If results must be deterministic,
``background`` is ``now``: results must not change while a program runs. As many processes compile beside a
program as it has processors to spare."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transconv.backend_triton import BACKENDS, Compilers
from transconv.backend_triton import expect as expect_kernels
from transconv.compute import Workload
from transconv.runtime import compiler, first_run_check, plan_cache
from transconv.runtime.compilation import rehearsal_thread
from transconv.runtime.compilation.plan_request import (
    COMPILING,
    NEVER,
    Batch,
    PlanRequest,
    Waiting,
    collect,
    is_collecting,
)
from transconv.runtime.plans import Plan
from transconv.schedule import Schedule
from transconv.selection import files_digest
from transconv.support import Unsupported, knobs, lasting, soon_turns
from transconv.target import Target

MODULE = "transconv.runtime.compilation.compile_child"
START = {"start": True}  # a process imports what it needs: meanwhile the program may take the jobs
LOOK_S = 0.5  # how often who waits for a process looks whether there still is one
PAUSE_S = 0.03  # between two kernels that calls take over from processes
ENVIRONMENT = {
    "TRITON_INTERPRET": None,
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}  # a compiling process does not use the GPU
log = logging.getLogger("transconv.ready")
Made = TypeVar("Made", bound=Plan)


@dataclass(slots=True)
class _PendingRequest:
    """The state of a request that a process compiles: whether it is done (or forgotten), why it failed,
    whether its plan was ``taken`` over here, whether a missing record was logged (``told``), whether the
    process ``died`` of it, whether it was handed over ahead of the request (``early``), whether calls may
    wait for it (``hurried``); the ``device`` on which its kernels are made ready before it is done, if
    there is one, its plan's ``kind`` and the ``sizes`` of the call, where these are arguments, whether its
    first call has nothing left to do (``fit``), and whether another plan answers that meanwhile
    (``patient``); ``take`` is the pool's, ``ended`` is set when it is done."""

    done: bool = False
    taken: bool = False
    reason: str = ""
    told: bool = False
    died: bool = False
    early: bool = False
    hurried: bool = False
    device: Any = None
    kind: type[Plan] = Plan
    sizes: tuple[int, ...] = ()
    fit: bool = False
    patient: bool = False
    take: Callable[[], bool] = lambda: False
    ended: threading.Event = field(default_factory=threading.Event)

    def over(self) -> bool:
        """Whether a request that was refused in the background may be answered otherwise."""
        return self.done and (self.taken or self.fit or time.monotonic() >= _next)


_lock = threading.Lock()
_asked: dict[PlanRequest, _PendingRequest] = {}
_pool: Compilers | None = None
_next = 0.0  # when the next kernel may be taken over


def ready(
    workload: Workload,
    target: Target,
    schedule: Schedule | None,
    deterministic: bool,
    kind: type[Made],
    aligned: bool,
    mode: str,
    sizes: Sequence[int] = (),
    later: int = 0,
) -> Made:
    """The plan of a request, by the mode; ``sizes``: those of the call, where they are arguments of its
    kernels; ``later``: how many plans may answer the same call, which processes compile before. Raises as
    ``build``; Unsupported if the kernels are not compiled yet, or could not be compiled."""
    global _next
    question = PlanRequest(workload, target, deterministic, aligned)
    if is_collecting() and schedule is None:
        collect(Batch((question,)))
        raise Unsupported(COMPILING, "the call is only looked at")
    asked = _asked.get(question)
    if asked is not None and asked.died and schedule is None:  # as this one would
        raise Unsupported("compile:failed", f"{question}: {asked.reason}")
    if mode == "background" and deterministic:
        mode = "now"
    if mode in ("now", "text") or schedule is not None or not compiles(target):
        if asked is not None and asked.early and schedule is None and mode != "text":
            _wait(question, asked)
        made = compiler.known(workload, target, schedule, deterministic, kind)
        if made is None:  # as compiler.plan does, with one frame less
            made = compiler.build(workload, target, schedule, None, deterministic, kind)
            made = compiler.added(made, workload, target, schedule, deterministic, kind)
        return made
    if asked is not None and not asked.done:
        raise Waiting("a process compiles it", asked.over)
    if asked is not None and mode == "background" and not asked.over():
        raise Waiting("another kernel was just taken over", asked.over)
    # A process looks on disk, too: where another kernel answers meanwhile, the call leaves it that.
    patient = asked is None and mode == "background" and _is_patient(tuple(sizes), later)
    found = None if patient and not compiler.is_made(question, kind) else there(question, kind)
    if found is not None:
        if asked is not None and not (asked.taken or asked.fit):
            # What could not be made ready before is loaded and checked by the call that gets it: not all
            # calls of one step of a program are to wait for theirs.
            asked.taken, _next = True, time.monotonic() + PAUSE_S
        return found
    if mode == "never":
        raise Unsupported(NEVER, 'its kernel is not compiled, and transconv.config.compile is "never"')
    return _begin(question, kind, tuple(sizes), later)


def ahead(
    questions: Iterable[PlanRequest], kind: type[Plan], workers: int, hurried: bool = True
) -> list[Callable[[], bool]]:
    """Have processes, at most ``workers``, compile the kernels of requests that are about to be made and
    have none; of each that waits for them, whether it may be answered by now. Failures are forgotten:
    whoever makes the request compiles, and meets the same error. ``hurried``: calls may wait for the
    kernels; otherwise a kernel counts as compiled when what starts it is built as well, which another
    process may be at."""
    waits = []
    for question in questions:
        asked = _asked.get(question)
        if asked is None and compiles(question.target) and there(question, kind) is None:
            with _lock:
                asked = _asked.get(question)
                if asked is None:
                    log.debug("compiling ahead: %s", question)
                    asked = _PendingRequest(
                        early=True,
                        hurried=hurried,
                        kind=kind,
                        device=None if hurried else rehearsal_thread.device_of(question.target),
                    )
                    _submit(question, asked, workers)
        if asked is not None and not asked.done:
            waits.append(asked.over)
    return waits


def begin_processes(like: PlanRequest | Target, workers: int) -> None:
    """Start processes, at most ``workers``, for requests that are about to be made; none if kernels are
    not compiled, or a plan is on disk. Each rehearses with a request ``like`` them, if one is known: the
    first kernel of a process takes twice as long as others."""
    target = like if isinstance(like, Target) else like.target
    if (
        compiles(target)
        and plan_cache.DRAWER.path("plan")
        and next(plan_cache.DRAWER.items(), None) is None
    ):
        with _lock:
            if _pool is None:
                expect_kernels()
                pool = compilers(workers)
                pool.first = START if isinstance(like, Target) else START | like.job
                pool.begin()
                pool.first = START


def withdraw(questions: Iterable[PlanRequest]) -> None:
    """Forget requests that were handed over ahead of need, as far as no process has begun them."""
    with _lock:
        for question in questions:
            asked = _asked.get(question)
            if asked is not None and asked.early and not asked.done and asked.take():
                _asked.pop(question).done = True  # who waits for it asks again


def expect() -> None:
    """Begin to read what the first request in the background needs, in a thread of its own."""
    threading.Thread(target=_digest_files, daemon=True, name="transconv-files").start()


def _digest_files() -> None:
    with soon_turns:
        files_digest()


def died(question: PlanRequest, reason: str) -> None:
    """Remember that the process that compiled a request died of it."""
    with _lock:
        _asked[question] = _PendingRequest(done=True, reason=reason, died=True)


def state(question: PlanRequest) -> str:
    """Why a request has no kernel now: ``compiling``, or why it could not be compiled. Empty if it was
    never made, or if its kernels are compiled."""
    asked = _asked.get(question)
    return "" if asked is None else asked.reason if asked.done else COMPILING


def was_awaited(question: PlanRequest) -> bool:
    """Whether a process compiled a request while its calls were answered otherwise."""
    asked = _asked.get(question)
    return asked is not None and asked.done and not (asked.reason or asked.hurried)


def is_ready(question: PlanRequest) -> bool:
    """Whether the kernels of a request are compiled."""
    return not compiles(question.target) or there(question, Plan) is not None


def compiles(target: Target) -> bool:
    """Whether kernels for a target are compiled; those for the interpreter are not."""
    return target.backend in BACKENDS


def again(questions: Iterable[PlanRequest]) -> None:
    """Forget the failures of these requests, because their kernels may be compiled now."""
    with _lock:
        for question in questions:
            if question in _asked and _asked[question].done:
                del _asked[question]


def planned(question: PlanRequest, kind: type[Made]) -> Made | None:
    """The plan, whether its kernels are compiled or not, if this process or another one has made it."""
    told = (question.workload, question.target, None, question.deterministic, kind)
    if plan_cache.keeps():
        return compiler.known(*told)
    return compiler.plan(*told)  # there are no records, so the text is made here


def there(question: PlanRequest, kind: type[Made]) -> Made | None:
    """The plan, if each of its kernels is compiled."""
    found = planned(question, kind)
    if found is None or not all(s.triton.is_ready(question.aligned) for s in found.steps):
        return None
    return found


def _begin(question: PlanRequest, kind: type[Made], sizes: tuple[int, ...], later: int) -> Made:
    """Give a request to a compiling process, once. Raises Unsupported until it is done."""
    with _lock:
        asked = _asked.get(question)
        if asked is None:
            asked = _PendingRequest(
                kind=kind, sizes=sizes, device=rehearsal_thread.device_of(question.target)
            )
            log.info("compiling in the background: %s", question)
            _submit(question, asked, later=later)
    if not asked.done:
        raise Waiting("a process compiles it", asked.over)
    if asked.reason:
        raise Unsupported("compile:failed", asked.reason)
    if not asked.told:
        asked.told = True
        log.warning(
            "%s: what was compiled in the background is not found on disk; it is compiled here", question
        )
    return compiler.plan(question.workload, question.target, None, question.deterministic, kind)


def _is_patient(sizes: tuple[int, ...], later: int) -> bool:
    """Whether another kernel answers the calls of a request that no process was given yet."""
    pool = _pool
    return pool is not None and pool.any_size and pool.is_patient({"later": later, "one_size": not sizes})


def _submit(question: PlanRequest, asked: _PendingRequest, workers: int = 0, later: int = 0) -> None:
    """Give a request to a process; the caller has the lock."""
    if _pool is None and question.target.backend in BACKENDS:
        expect_kernels()
    _asked[question] = asked
    when = {
        "hurried": asked.hurried,
        "later": later,
        "any_size": bool(asked.sizes),
        "one_size": not (asked.sizes or asked.hurried),
    }
    job = question.job | {name: value for name, value in when.items() if value}
    pool = compilers(workers)
    asked.patient = not asked.early and pool.is_patient(job)
    asked.take = pool.submit(job, lambda answer: _answered(question, answer))


def _wait(question: PlanRequest, asked: _PendingRequest) -> None:
    """Until a process has compiled a request; not if none has begun, as it is then compiled here."""
    if asked.done:
        return
    if asked.take():
        with _lock:
            _asked.pop(question, None)
        return
    began = time.monotonic()
    while not asked.ended.wait(LOOK_S) and _asked.get(question) is asked:
        pass  # the processes may have been ended
    log.debug("waited %.3f s: %s", time.monotonic() - began, question)


def _answered(question: PlanRequest, answer: dict[str, Any]) -> None:
    asked = _asked.get(question)
    if asked is None:
        return
    compiler.adopt(answer)
    reason = str(answer.get("reason", ""))
    if asked.early and reason:
        log.info("not compiled ahead: %s: %s", question, reason)
        with _lock:
            _asked.pop(question, None)
    elif reason:
        log.warning("not compiled: %s: %s", question, reason)
    else:
        log.info("compiled: %s in %.1f s", question, answer.get("seconds", 0.0))
    if reason or asked.device is None:
        _end(asked, reason)
    else:
        rehearsal_thread.thread.add(
            asked.device, partial(_make_ready, question, asked), partial(_end, asked), asked.patient
        )


def _make_ready(question: PlanRequest, asked: _PendingRequest) -> None:
    """Do for a compiled request what its first call would."""
    began = time.perf_counter()
    with lasting():
        plan = there(question, asked.kind)
    rehearsal_thread.thread.rest()
    if plan is not None:
        asked.fit = first_run_check.rehearse(plan, asked.device, question.aligned, asked.sizes)
        log.debug("made ready in %.3f s: %s", time.perf_counter() - began, question)


def _end(asked: _PendingRequest, reason: str = "") -> None:
    asked.reason, asked.done = reason, True
    asked.ended.set()


def compilers(workers: int = 0) -> Compilers:
    """The processes: as many as ``workers`` (0: as compile beside a program), if there are as many
    jobs."""
    global _pool
    workers = workers or beside()
    if _pool is None:
        _pool = Compilers(MODULE, ENVIRONMENT, workers, START)
    _pool.workers = workers
    return _pool


def close() -> None:
    """End the processes. Requests that they have not finished are compiled when they are made again."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
        for question in [q for q, a in _asked.items() if not a.done]:
            _asked.pop(question).done = True  # who waited for it asks again
    if pool is not None:
        pool.close()


def forget() -> None:
    """End the processes and forget all requests and failures."""
    global _next
    close()
    _asked.clear()
    _next = 0.0


def _forked() -> None:
    """After a fork, the processes and the thread belong to the parent."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()
    for asked in _asked.values():
        asked.done = True
    _asked.clear()
    rehearsal_thread.thread.begin_anew()


atexit.register(close)
atexit.register(lambda: rehearsal_thread.thread.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


ENOUGH, MOST = 4, 31  # cores for which processes compile ahead of need, and these processes
FEWEST, MOST_BESIDE = 2, 16  # processes that compile in the background
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processors in each period


def cores() -> int:
    """How many cores this process may use: of those that it may run on, as many as its container's share
    of time is worth."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _worth()))


def _worth() -> int:
    try:
        quota, period = map(int, QUOTA.read_text().split())
        return quota // period
    except (OSError, ValueError, ZeroDivisionError):  # no container, or one without a quota: "max"
        return sys.maxsize


def helpers() -> int:
    """How many processes may compile what this one will soon ask for: one for each core but its own, at
    most ``MOST``, as far as other processes of the same launcher leave them. None with fewer than
    ``ENOUGH`` cores, or where they could not leave what they make."""
    share = cores() // knobs.local_processes()
    if share < ENOUGH or not plan_cache.keeps() or plan_cache.DRAWER.path("plan") is None:
        return 0
    return min(MOST, share - 1)


def beside() -> int:
    """How many processes may compile while the program computes: for half of the cores, as far as other
    processes of the same launcher leave them. Calls that launch small kernels are as slow as the core they
    run on, which shares its memory and often its units with another."""
    return min(MOST_BESIDE, max(FEWEST, cores() // knobs.local_processes() // 2))

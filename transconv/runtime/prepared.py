"""Beside the compiler. Many questions at once: their schedules ranked or their kernels compiled by
processes, and a report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from transconv.backend_triton import Compilers, expect
from transconv.errors import TransconvError
from transconv.runtime import compiler, kept, readiness
from transconv.runtime.estimates import is_estimated
from transconv.runtime.plans import Plan
from transconv.runtime.processors import cores
from transconv.runtime.questions import Question
from transconv.runtime.readiness import ENVIRONMENT, MODULE

FEW = 2  # kernels that are compiled here before a process has started
log = logging.getLogger("transconv.ready")


@dataclass(frozen=True)
class Prepared:
    """The report of ``prepare``. ``problems``: texts of the problems; ``there``: how many of them had
    compiled kernels before; ``kernels``: how many were compiled; ``failures``: problems without a kernel,
    each with the reason; ``left``: the number of calls that torch computes, by reason."""

    problems: tuple[str, ...]
    there: int
    kernels: int
    seconds: float
    failures: tuple[tuple[str, str], ...] = ()
    left: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        head = (f"{len(self.problems)} problems, {self.there} of them with kernels before; "
                f"{self.kernels} kernels compiled in {self.seconds:.1f} s; {len(self.failures)} failures")
        return "\n".join([head, *(f"  {p}: {why}" for p, why in self.failures),
                          *(f"  {n} calls are torch's: {why}" for why, n in self.left)])

    def mapping(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def prepare(questions: Iterable[Question], workers: int, step: Callable[[], None] | None = None,
            left: tuple[tuple[str, int], ...] = ()) -> Prepared:
    """Compile the kernels of all questions in ``workers`` processes, and wait for them. ``step`` is called
    after each question. Failures are in the report."""
    started = time.perf_counter()
    step = step or (lambda: None)
    asked = list(dict.fromkeys(questions))
    failures: list[tuple[str, str]] = []
    waiting: list[Question] = []
    for question in asked:
        try:
            if readiness.compiles(question.target) and not readiness.is_ready(question):
                waiting.append(question)
                continue
            _made_here(question)
        except TransconvError as error:
            failures.append((str(question), str(error)))
        step()
    there = len(asked) - len(waiting) - len(failures)
    answers = _compiled(waiting, workers, step) if waiting else []
    for question, answer in zip(waiting, answers, strict=True):
        compiler.adopt(answer)
        if "reason" in answer:
            failures.append((str(question), str(answer["reason"])))
    readiness.again(waiting)
    return Prepared(tuple(map(str, asked)), there, sum(a.get("kernels", 0) for a in answers),
                    round(time.perf_counter() - started, 3), tuple(failures), left)


def _made_here(question: Question) -> None:
    compiler.plan(question.workload, question.target, None, question.deterministic, Plan)


def _compiled(questions: list[Question], workers: int,
              step: Callable[[], None]) -> list[dict[str, Any]]:
    """The answers, in the order of the questions."""
    expect()
    pool = Compilers(MODULE, ENVIRONMENT, min(workers, len(questions)))
    try:
        return _Jobs(questions, pool).answers(step)
    finally:
        pool.close()


class _Jobs:
    """Questions that were handed to processes, all at once."""

    def __init__(self, questions: Sequence[Question], pool: Compilers, rank: bool = False) -> None:
        self.pool, self.ended = pool, threading.Semaphore(0)
        self.found: list[dict[str, Any]] = [{} for _ in questions]
        for at, question in enumerate(questions):
            job = question.job | {"rank": True} if rank else question.job
            pool.submit(job, partial(self._take, at))

    def _take(self, at: int, answer: dict[str, Any]) -> None:
        self.found[at] = answer
        self.ended.release()

    def answers(self, step: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Waits for all; those that are left are empty if the processes are ended meanwhile."""
        for _ in self.found:
            while not self.ended.acquire(timeout=1.0):
                if self.pool.closed:
                    return self.found
            step()
        return self.found


class Begun:
    """Questions whose kernels processes compile, while this one does something else."""

    def __init__(self, questions: Sequence[Question], workers: int) -> None:
        self.questions = questions
        log.info("compiling %d problems in %d processes", len(questions), workers)
        self.jobs = _Jobs(questions, readiness.compilers(workers))

    def wait(self) -> None:
        """Until all are done. A question of which a process died is refused from then on; where another
        failed, the call that needs the kernel meets the same error."""
        for question, answer in zip(self.questions, self.jobs.answers(), strict=True):
            compiler.adopt(answer)
            if answer.get("died"):
                log.warning("not compiled: %s: %s", question, answer["reason"])
                readiness.died(question, str(answer["reason"]))


def begin(questions: Iterable[Question]) -> Begun | None:
    """Have processes, one for each core, compile the kernels of all questions that have none, each once.
    None where they would gain nothing: there is one core, or hardly a kernel, or no folder in which they
    could leave what they make."""
    waiting = [q for q in _many(questions) if not _is_ready(q)]
    return Begun(waiting, min(cores(), len(waiting))) if len(waiting) > FEW else None


def rank(questions: Iterable[Question]) -> None:
    """Have processes, one for each core, rank the schedules of questions that have no estimate, and wait:
    they leave both on disk. Does nothing where ``begin`` begins nothing."""
    waiting = [q for q in _many(questions) if not is_estimated(q.workload, q.target)]
    if len(waiting) > FEW:
        log.info("ranking the schedules of %d problems in processes", len(waiting))
        _Jobs(waiting, readiness.compilers(min(cores(), len(waiting))), rank=True).answers()


def _many(questions: Iterable[Question]) -> list[Question]:
    """Those that processes may answer; none where they would gain nothing."""
    found = [q for q in dict.fromkeys(questions) if readiness.compiles(q.target)]
    if len(found) <= FEW or cores() < 2 or kept.DRAWER.path("plan") is None:
        return []
    return found


def _is_ready(question: Question) -> bool:
    try:
        return readiness.is_ready(question)
    except TransconvError:  # the call that needs it is refused
        return True

"""Beside the compiler. Many questions at once: their kernels compiled by processes, and a report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from transconv.backend_triton import Compilers
from transconv.errors import TransconvError
from transconv.runtime import compiler, readiness
from transconv.runtime.plans import Plan
from transconv.runtime.readiness import ENVIRONMENT, MODULE, Question


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
    answers = _compiled(waiting, workers, step)
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
    answers: list[dict[str, Any]] = [{} for _ in questions]
    if not questions:
        return answers
    ended = threading.Semaphore(0)
    pool = Compilers(MODULE, ENVIRONMENT, min(workers, len(questions)))

    def done(at: int) -> Callable[[dict[str, Any]], None]:
        def take(answer: dict[str, Any]) -> None:
            answers[at] = answer
            ended.release()
        return take

    try:
        for at, question in enumerate(questions):
            pool.submit(question.job, done(at))
        for _ in questions:
            ended.acquire()
            step()
    finally:
        pool.close()
    return answers

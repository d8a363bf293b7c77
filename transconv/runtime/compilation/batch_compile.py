"""Batches of plans: schedules ranked or kernels compiled for requests by processes, and a report; plans on
disk compared with what the passes make of their questions now."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from transconv.backend_triton import Compilers, expect
from transconv.runtime import check_records, compiler, plan_cache
from transconv.runtime.compilation import async_compile
from transconv.runtime.compilation.async_compile import cores
from transconv.runtime.compilation.plan_request import Batch, PlanRequest, Room
from transconv.runtime.plans import Plan
from transconv.runtime.steps import is_estimated
from transconv.selection import files_digest
from transconv.support import Content, StageError, TransconvError

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
        head = (
            f"{len(self.problems)} problems, {self.there} of them with kernels before; "
            f"{self.kernels} kernels compiled in {self.seconds:.1f} s; {len(self.failures)} failures"
        )
        return "\n".join(
            [
                head,
                *(f"  {p}: {why}" for p, why in self.failures),
                *(f"  {n} calls are torch's: {why}" for why, n in self.left),
                *([] if self.problems else ["  no call here has a kernel: transconv.explain says why"]),
            ]
        )

    def mapping(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def prepare(
    batches: Iterable[Batch],
    workers: int,
    ended: Callable[[PlanRequest, bool], None] | None = None,
    left: tuple[tuple[str, int], ...] = (),
) -> Prepared:
    """Compile the kernels of all requests in ``workers`` processes, and wait for them; those of a batch in
    one, as far as there is room, and the batches with the most work first. ``ended`` is called with each
    request that is done, while processes are at others, and with whether it has a plan. Failures are in
    the report."""
    started = time.perf_counter()
    asked = list(dict.fromkeys(batches))
    report = _Report(ended or (lambda *_: None))
    waiting = [batch for batch in asked if not report.is_there(batch)]
    if waiting:
        expect()
        pool = async_compile.compilers(min(workers, len(waiting)))
        try:
            report.compile(sorted(waiting, key=lambda batch: batch.work, reverse=True), pool)
        except BaseException:  # Ctrl-C: nothing goes on
            async_compile.close()
            raise
    async_compile.again(q for batch in waiting for q in batch.questions)
    return Prepared(
        tuple(str(q) for b in asked for q in b.questions),
        report.there,
        report.kernels,
        round(time.perf_counter() - started, 3),
        tuple(report.failures),
        left,
    )


class _Report:
    """What became of requests so far."""

    def __init__(self, ended: Callable[[PlanRequest, bool], None]) -> None:
        self.ended = ended
        self.there, self.kernels = 0, 0
        self.failures: list[tuple[str, str]] = []
        self.before: set[PlanRequest] = set()  # with kernels, in a batch that is not complete

    def is_there(self, batch: Batch) -> bool:
        """Whether no request of a batch has to be compiled: each has its kernels, or there is no room for
        them, or it has failed."""
        room, done = Room(batch.most), list[tuple[PlanRequest, bool]]()
        failed: list[tuple[str, str]] = []
        for question in batch.questions:
            try:
                plan = None if room.is_full else _there(question)
            except TransconvError as error:
                failed.append((str(question), str(error)))
                done.append((question, False))
                continue
            if plan is None and not room.is_full:
                self.before |= {q for q, has_plan in done if has_plan}
                return False
            takes = plan is not None and room.takes(plan.digests)
            if plan is not None and takes:
                room.there |= plan.digests
            done.append((question, takes))
        self.failures += failed
        self.there += len(done) - len(failed)
        for each in done:
            self.ended(*each)
        return True

    def compile(self, batches: Sequence[Batch], pool: Compilers) -> None:
        """Have processes answer batches. The requests of one of which a process died are asked anew, each
        alone."""
        while batches:
            alone = list[Batch]()
            for at, answer in _Jobs([b.job for b in batches], pool).ended():
                questions = batches[at].questions
                if answer.get("died") and len(questions) > 1:
                    alone += [Batch((q,)) for q in questions]
                    continue
                for question, said in zip(
                    questions, answer.get("each") or (answer,) * len(questions), strict=True
                ):
                    self.answered(question, said)
            batches = alone

    def answered(self, question: PlanRequest, answer: dict[str, Any]) -> None:
        """Record the answer to a request."""
        compiler.adopt(answer)
        if question in self.before:
            self.there += 1
        else:
            self.kernels += answer.get("kernels", 0)
        if "reason" in answer:
            self.failures.append((str(question), str(answer["reason"])))
        self.ended(question, not answer.keys() & {"reason", "left"})


def _there(question: PlanRequest) -> Plan | None:
    """The plan, if its kernels are there or need not be compiled."""
    if async_compile.compiles(question.target):
        return async_compile.there(question, Plan)
    return compiler.plan(question.workload, question.target, None, question.deterministic, Plan)


class _Jobs:
    """Jobs that were handed to processes, all at once."""

    def __init__(self, jobs: Sequence[dict[str, Any]], pool: Compilers) -> None:
        self.pool, self.left = pool, len(jobs)
        self.found: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        for at, job in enumerate(jobs):
            pool.submit(job, partial(self._take, at))

    def _take(self, at: int, answer: dict[str, Any]) -> None:
        self.found.put((at, answer))

    def ended(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each with its answer, as they end; no more if the processes are ended meanwhile."""
        while self.left:
            try:
                yield self.found.get(timeout=1.0)
                self.left -= 1
            except Empty:
                if self.pool.closed:
                    return


class BatchCompile:
    """Questions whose kernels processes compile, while this one does something else."""

    def __init__(self, jobs: Mapping[PlanRequest, dict[str, Any]], workers: int) -> None:
        self.questions = [*jobs]
        log.info("compiling %d problems in %d processes", len(jobs), workers)
        self.jobs = _Jobs([*jobs.values()], async_compile.compilers(workers))

    @classmethod
    def of_made(cls, plans: Iterable[Plan]) -> BatchCompile | None:
        """``begin`` for plans whose schedules were given, and whose tensors are aligned: processes are
        handed the texts, and compile each once."""
        texts: dict[frozenset[str], Plan] = {}
        for plan in plans:
            if not all(s.triton.is_ready(True) for s in plan.steps):
                texts.setdefault(frozenset(plan.digests), plan)
        each = {PlanRequest(p.workload, p.target, p.deterministic): p for p in texts.values()}
        waiting = sorted(_many(each), key=_work, reverse=True)
        return _begun({q: q.job | {"made": plan_cache.content_of(each[q])} for q in waiting})

    def wait(self) -> None:
        """Until all are done. A question of which a process died is refused from then on; where another
        failed, the call that needs the kernel meets the same error."""
        for at, answer in self.jobs.ended():
            question = self.questions[at]
            compiler.adopt(answer)
            if answer.get("died"):
                log.warning("not compiled: %s: %s", question, answer["reason"])
                async_compile.died(question, str(answer["reason"]))


def begin(questions: Iterable[PlanRequest]) -> BatchCompile | None:
    """Have processes, one for each core, compile the kernels of all questions that have none, each once.
    None where they would gain nothing: there is one core, or hardly a kernel, or no folder in which they
    could leave what they make. The longest are begun first, so that no process is at one of them when
    the others are out of work."""
    waiting = sorted((q for q in _many(questions) if not _is_ready(q)), key=_work, reverse=True)
    return _begun({q: q.job for q in waiting})


def _begun(jobs: Mapping[PlanRequest, dict[str, Any]]) -> BatchCompile | None:
    return BatchCompile(jobs, min(cores(), len(jobs))) if len(jobs) > FEW else None


def rank(questions: Iterable[PlanRequest]) -> None:
    """Have processes, one for each core, rank the schedules of questions that have no estimate, and wait:
    they leave both on disk, before they compile what others wait for. Does nothing where ``begin`` begins
    nothing."""
    waiting = [q for q in _many(questions) if not is_estimated(q.workload, q.target)]
    if len(waiting) > FEW:
        log.info("ranking the schedules of %d problems in processes", len(waiting))
        jobs = _Jobs(
            [q.job | {"rank": True, "urgent": True} for q in waiting],
            async_compile.compilers(min(cores(), len(waiting))),
        )
        for _ in jobs.ended():
            pass


def _many(questions: Iterable[PlanRequest]) -> list[PlanRequest]:
    """Those that processes may answer; none where they would gain nothing."""
    found = [q for q in dict.fromkeys(questions) if async_compile.compiles(q.target)]
    if len(found) <= FEW or cores() < 2 or plan_cache.DRAWER.path("plan") is None:
        return []
    return found


def _work(question: PlanRequest) -> tuple[int, int]:
    """How long a question takes, beside others: products, and what else is computed."""
    made = question.workload.computations
    return sum(c.factors is not None for c in made), len(made)


def _is_ready(question: PlanRequest) -> bool:
    try:
        return async_compile.is_ready(question)
    except TransconvError:  # the call that needs it is refused
        return True


# -- plans on disk --------------------------------------------------------------------------------

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
    """Make all plans on disk again. A record (``plan_cache.py``) has the question that it answers: its
    schedules are chosen and its kernels lowered, and every field has to be as it would be written now.
    Raises ValueError where this process keeps none."""
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

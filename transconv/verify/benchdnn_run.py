"""A job run in a worker process, as a row with benchdnn's status word; of all jobs lines, a summary, a
report in JSON.

Every plan that the job names is built, run on fresh data between guards, and judged; the row says
how many there were and which of them failed. What the compiler refuses is UNIMPLEMENTED with its
reason; a plan whose kernels gave wrong sums before is a failure, although users never get it.
The words and the last line are benchdnn's. A failure is followed by the command that repeats it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

from transconv.compute import Alone, parse
from transconv.conv import CompiledDirection, ConvProblem, Prop, bias_sums
from transconv.ir import DTYPES
from transconv.runtime import Plan, build
from transconv.support import AddressError, ProblemError, ScheduleError, Unsupported, __version__, files
from transconv.target import Target, detect
from transconv.verify.benchdnn_job import INVALID, NEXT, UNIMPLEMENTED
from transconv.verify.benchdnn_requests import BenchdnnRequest
from transconv.verify.case import ProblemCase, warm
from transconv.verify.computation import ComputationCase
from transconv.verify.data import poison
from transconv.verify.judgement import LEAST_NONZERO, Judgement
from transconv.verify.machine import executable, is_fatal, synchronize

Row = dict[str, Any]
# Products that Triton's interpreter, and that of the IR, sum in about a minute.
INTERPRETED, REPLAYED = 1 << 29, 1 << 25


def work(
    problem: str,
    prop: str,
    epilogue: str = "",
    bia: str = "",
    mode: str = "C",
    data: str = "exact+float",
    shift: int = 0,
    schedules: str = "best",
    deterministic: bool = False,
    seed: int = 0,
    target: str = "",
    numpy: bool = False,
) -> Row:
    """One job (see benchdnn_job.py). The row has ``status`` and ``reason``; ``schedule``, ``kernels``,
    ``plans`` (how many were checked), ``rejected`` (better schedules that were known to be wrong);
    ``failures`` as (schedule, reason); the worst errors; ``seconds``."""
    import torch

    start = time.perf_counter()
    try:
        if bia and Prop(prop) is Prop.BWD_W:
            row = _sums(ConvProblem.parse(problem), bia, mode, data, seed, target, numpy)
            return row | {"seconds": time.perf_counter() - start}
        case = ProblemCase(
            ConvProblem.parse(problem),
            Prop(prop),
            epilogue,
            bia=bia,
            shift=shift,
            deterministic=deterministic,
            numpy=numpy,
        )
        if target:
            chip = Target.parse(target)
            case.target = chip if numpy else executable(chip, case.where)
        row = _run(case, mode, data, schedules, seed)
    except Unsupported as error:
        # Not refused, but wrong: the first results of all its kernels were.
        wrong = error.reason == "miscompiled"
        row = _ended("FAILED" if wrong else UNIMPLEMENTED, str(error), cause=error.reason)
    except AddressError as error:
        row = _ended("FAILED", str(error))
    except ScheduleError as error:
        row = _ended(UNIMPLEMENTED if schedules == "best" else INVALID, str(error))
    except (ProblemError, ValueError) as error:
        row = _ended(INVALID, str(error))
    except torch.OutOfMemoryError as error:
        row = _ended("SKIPPED", f"not enough memory: {str(error).splitlines()[0][:120]}", fatal=True)
    if torch.cuda.is_available() and not row.get("fatal"):
        torch.cuda.empty_cache()
    return row | {"seconds": time.perf_counter() - start}


def _ended(status: str, reason: str, **more: Any) -> Row:
    return {"status": status, "reason": " ".join(reason.split())[:500], **more}


def _run(case: ProblemCase, mode: str, data: str, schedules: str, seed: int) -> Row:
    most = REPLAYED if case.numpy else INTERPRETED
    if case.where == "cpu" and mode != "I" and case.problem.macs_padded > most:
        return _ended(
            "SKIPPED",
            f"too large for the interpreter, which takes {most:.1g} products "
            "at most (--mb=1 makes the problem smaller)",
        )
    row: Row = {"status": "PASSED", "reason": "", "plans": 0, "failures": []}
    for texts in _plans(case, schedules):
        first = not row["plans"]
        row["plans"] += 1
        try:
            compiled = case.plan_of(texts) if texts else case.proven()
            if first:
                row.update(config=_text(compiled), kernels=len(compiled.steps), rejected=compiled.rejected)
            found = _STEPS[mode](case, compiled, data, seed, first)
        except Exception as error:
            kind = type(error).__name__
            if isinstance(error, ProblemError):
                raise
            if kind == "OutOfMemoryError" or (
                isinstance(error, (Unsupported, ScheduleError)) and not _ranked(schedules)
            ):
                raise
            if kind == "OutOfResources" and _ranked(schedules):  # users get the next candidate
                row["too_large"] = row.get("too_large", 0) + 1
                continue
            found = {"reason": " ".join(f"{kind}: {error}".split())[:300]}
            row |= {"fatal": True} if is_fatal(error) else {}
        _note(row, texts, found)
        if row.get("fatal"):
            break
    if row["failures"]:
        row.update(status="FAILED", reason=_told(row))
    elif mode in "IR":
        row["status"] = {"I": "INITIALIZED", "R": "EXECUTED"}[mode]
    elif "nonzero" in row and row["nonzero"] < LEAST_NONZERO:
        row.update(status="MISTRUSTED", reason=f"only {row['nonzero']:.0%} of the answer is not 0")
    return row


def _sums(p: ConvProblem, bia: str, mode: str, data: str, seed: int, target: str, numpy: bool) -> Row:
    """The gradient of a bias: one kernel, with the plan that a user gets."""
    text = bias_sums(p.dst, p.shapes["dst"], DTYPES[bia])
    row: Row = {"status": "PASSED", "reason": "", "plans": 1, "failures": []}
    for kind in data.split("+"):
        case = ComputationCase(parse(text), kind, seed)
        if case.where == "cpu" and mode != "I" and prod(p.shapes["dst"]) > REPLAYED:
            return _ended(
                "SKIPPED", f"too large for the interpreter, which adds {REPLAYED:.1g} terms at most"
            )
        chip = Target.parse(target) if target else detect()
        chip = chip if numpy else executable(chip, case.where)
        plan = build(Alone(case.compute), chip, None, None, False, Plan)
        row |= {"config": str(plan.steps[0].schedule), "kernels": len(plan.steps)}
        if mode == "I":
            return (
                row
                | {"status": "INITIALIZED"}
                | ({"compile_s": warm(plan)} if case.where == "cuda" else {})
            )
        kernels = [s.kernel for s in plan.steps]
        judged = case.interpreted(*kernels) if numpy else case.launched(plan, case.where)
        row[f"{kind}_err"] = judged.max_error
        if judged.problem and mode != "R":
            row["failures"].append(("", f"{kind}: {judged.problem}"))
    if row["failures"]:
        row.update(status="FAILED", reason=_told(row))
    return row | ({"status": "EXECUTED"} if mode == "R" else {})


def _ranked(schedules: str) -> bool:
    return schedules == "all" or schedules.isdecimal()


def _plans(case: ProblemCase, schedules: str) -> Iterator[Sequence[str]]:
    """The schedules of every plan to check; none for the plan that a user gets, which may come from
    a tuning database and is always among them, unless schedules are given."""
    if schedules == "best" or _ranked(schedules):
        yield ()
        if schedules != "best":
            yield from case.choices(None if schedules == "all" else int(schedules))
    else:
        yield tuple(schedules.split(NEXT))


def _text(compiled: CompiledDirection) -> str:
    texts = [str(step.schedule) for step in compiled.steps]
    return texts[0] if len(set(texts)) == 1 else NEXT.join(texts)


def _initialise(case: ProblemCase, compiled: CompiledDirection, data: str, seed: int, first: bool) -> Row:
    return {"compile_s": warm(compiled)} if case.where == "cuda" else {}


def _execute(case: ProblemCase, compiled: CompiledDirection, data: str, seed: int, first: bool) -> Row:
    case.fill(data.partition("+")[0], seed)
    case.launch(compiled)
    synchronize()
    return {}


def _compare(case: ProblemCase, compiled: CompiledDirection, data: str, seed: int, first: bool) -> Row:
    """Judge on the asked data. Of many plans, those after the first share exact data and answer."""
    made: Row = {"answers": case.answers}
    reasons = []
    for kind in data.split("+"):
        shared = kind == "exact" and not first
        found = case.same(compiled, seed) if shared else case.judge(compiled, kind, seed)
        made |= _columns(kind, found, shared)
        if not found.right:
            reasons.append(f"{kind}: {found.reason}")
    return made | {"reason": "; ".join(reasons)}


def _columns(kind: str, found: Judgement, shared: bool) -> Row:
    made: Row = {f"{kind}_err": found.max_err}
    if kind == "float":
        made |= {"of_bound": found.of_bound, "rms": found.rms}
    elif not shared:
        made["nonzero"] = found.nonzero
    return made


def _twice(case: ProblemCase, compiled: CompiledDirection, data: str, seed: int, first: bool) -> Row:
    """Whether two runs on the same random data give the same bits."""
    case.fill("float", seed)
    result = case.tensors[case.prop.result]
    results = []
    for _ in range(2):
        result.poison()
        case.launch(compiled)
        synchronize()
        results.append(result.memory.view(poison(result.memory.dtype)[0]).clone())
    wrong = int((results[0] != results[1]).sum())
    unwritten = int(result.view.isnan().sum())
    reasons = [f"{wrong} elements differ between two runs"] if wrong else []
    reasons += [f"{unwritten} elements are NaN"] if unwritten else []
    return {"reason": "; ".join([*reasons, *case.strayed(compiled)])}


_STEPS = {"I": _initialise, "R": _execute, "C": _compare, "B": _twice}


def _note(row: Row, texts: Sequence[str], found: Row) -> None:
    """Take what one plan gave into the row: worst errors, and a failure if it is one."""
    for name, value in found.items():
        if name in ("reason", "nonzero"):
            continue
        row[name] = max(row[name], value) if name in row and value == value else value
    if "nonzero" in found:
        row["nonzero"] = found["nonzero"]
    if found.get("reason"):
        row["failures"].append((NEXT.join(texts), found["reason"]))


def _told(row: Row) -> str:
    _, reason = row["failures"][0]
    several = (
        f"{len(row['failures'])} of {row['plans']} schedules fail, the first: " if row["plans"] > 1 else ""
    )
    return f"{several}{reason}"


STATUSES = (
    "PASSED",
    "SKIPPED",
    "MISTRUSTED",
    "UNIMPLEMENTED",
    "INVALID_ARGUMENTS",
    "FAILED",
    "LISTED",
    "INITIALIZED",
    "EXECUTED",
)
COUNTED = STATUSES[:7]  # in benchdnn's last line, in its order; what was only run has passed
BAD = ("FAILED", "INVALID_ARGUMENTS")
DOUBTFUL = (*BAD, "UNIMPLEMENTED", "MISTRUSTED", "SKIPPED")  # what --strict does not let pass
MOST_TOLD = 3  # failing schedules of one problem that are printed


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What came of a request; ``row`` is the worker's (see benchdnn_run.py)."""

    place: int
    request: BenchdnnRequest
    status: str
    reason: str = ""
    row: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """``12:FAILED (reason) command``, and one more command for each other failing schedule."""
        failures: list[tuple[str, str]] = self.row.get("failures", [])
        schedule = failures[0][0] if self.status == "FAILED" and failures else ""
        told = f" ({self.reason})" if self.reason else ""
        yield f"{self.place}:{self.status}{told} {self.request.repeat(schedule)}"
        for schedule, reason in failures[1:MOST_TOLD]:
            yield f"    also ({reason}) {self.request.repeat(schedule)}"
        if len(failures) > MOST_TOLD:
            yield f"    and {len(failures) - MOST_TOLD} more failing schedules; see --json"

    def entry(self) -> dict[str, Any]:
        """The result as JSON has it."""
        failures = [
            {"schedule": c, "reason": r, "repeat": self.request.repeat(c)}
            for c, r in self.row.get("failures", [])
        ]
        more = {k: v for k, v in self.row.items() if k not in ("status", "reason", "fatal", "trace")}
        return {
            "place": self.place,
            "status": self.status,
            "reason": self.reason,
            "repeat": self.request.repeat(),
            "read": self.request.where,
            **more,
            "failures": failures,
        }


@dataclass(slots=True)
class BenchdnnReport:
    """The results of a run in the order of the requests, and what had no effect."""

    remarks: dict[str, str]
    results: list[RequestOutcome] = field(default_factory=list)
    asked: int = 0  # problems, those that were not reached too
    stopped: int = 0  # the exit code of a run that was stopped

    @property
    def counts(self) -> Counter[str]:
        return Counter(r.status for r in self.results)

    def last_line(self) -> str:
        """``tests:N passed:N ...``; problems that were only made or run count as passed."""
        counts = self.counts
        counts["PASSED"] += counts["INITIALIZED"] + counts["EXECUTED"]
        return f"tests:{len(self.results)} " + " ".join(
            f"{word.lower()}:{counts[word]}" for word in COUNTED
        )

    def reasons(self) -> list[tuple[str, str, int]]:
        """(status, reason, how often) of everything that was not checked."""
        found = Counter(
            (r.status, r.reason)
            for r in self.results
            if r.status in ("SKIPPED", "UNIMPLEMENTED", "INVALID_ARGUMENTS")
        )
        return [(status, reason, n) for (status, reason), n in found.most_common()]

    def summary(self) -> Iterator[str]:
        """The lines after the last problem."""
        for status, reason, n in self.reasons():
            yield f"{status} {n}: {reason}"
        for option, reason in self.remarks.items():
            yield f"no effect: {option}: {reason}"
        plans = sum(r.row.get("plans", 0) for r in self.results)
        too_large = sum(r.row.get("too_large", 0) for r in self.results)
        rejected = sum(r.row.get("rejected", 0) for r in self.results)
        if plans > len(self.results):
            yield (
                f"{plans} plans were checked"
                + (f", {too_large} of them take more than the device has" if too_large else "")
            )
        answers = Counter(r.row["answers"] for r in self.results if "answers" in r.row)
        for named, n in answers.most_common():
            yield f"{n} problems beside {named}"
        if rejected:
            yield (
                f"{rejected} better schedules were passed over: their first results were wrong "
                "(--schedules=all shows them)"
            )
        if self.stopped:
            yield f"stopped: {len(self.results)} of {self.asked} problems have ended"
        yield self.last_line()

    def code(self, strict: bool = False) -> int:
        """0 if nothing failed, else 1; ``strict``: also if anything was not checked. 130 or 143 of a
        run that was stopped."""
        return self.stopped or int(any(self.counts[word] for word in (DOUBTFUL if strict else BAD)))

    def write(self, path: Path, command: str) -> None:
        """Everything as JSON."""
        results = sorted(self.results, key=lambda r: r.place)
        content = {
            "command": command,
            "machine": machine(),
            "summary": self.last_line(),
            "counts": dict(self.counts),
            "asked": self.asked,
            "stopped": bool(self.stopped),
            "reasons": [{"status": s, "reason": r, "count": n} for s, r, n in self.reasons()],
            "no_effect": self.remarks,
            "results": [r.entry() for r in results],
        }
        files.replace_named(path, json.dumps(content, indent=1, default=str) + "\n")


def machine() -> dict[str, str]:
    """What the results were made with."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": name, **packages()}


def packages() -> dict[str, str]:
    """The versions of this package and those below it; empty where there is none."""
    found = {"transconv": __version__}
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found

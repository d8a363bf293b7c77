"""Runs a job in a worker process and returns a row with benchdnn's status word.

Every plan that the job names is built, run on fresh data between guards, and judged; the row says
how many there were and which of them failed. What the compiler refuses is UNIMPLEMENTED with its
reason; a plan whose kernels gave wrong sums before is a failure, although users never get it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transconv.conv import ConvProblem, Prop
from transconv.errors import ProblemError, ScheduleError, Unsupported
from transconv.verify.benchdnn.attributes import INVALID, UNIMPLEMENTED
from transconv.verify.benchdnn.job import NEXT
from transconv.verify.pool import is_fatal

if TYPE_CHECKING:
    from transconv.conv import CompiledDirection
    from transconv.verify.case import ProblemCase
    from transconv.verify.judgement import Judgement

Row = dict[str, Any]
# Products that Triton's interpreter, and that of the IR, sum in about a minute.
INTERPRETED, REPLAYED = 1 << 29, 1 << 25


def work(problem: str, prop: str, epilogue: str = "", bia: str = "", mode: str = "C",
         data: str = "exact+float", shift: int = 0, schedules: str = "best", deterministic: bool = False,
         seed: int = 0, target: str = "", numpy: bool = False) -> Row:
    """One job (see benchdnn/job.py). The row has ``status`` and ``reason``; ``schedule``, ``kernels``,
    ``plans`` (how many were checked), ``rejected`` (better schedules that were known to be wrong);
    ``failures`` as (schedule, reason); the worst errors; ``seconds``."""
    import torch

    from transconv.target import Target
    from transconv.verify.case import ProblemCase
    from transconv.verify.machine import executable

    start = time.perf_counter()
    try:
        case = ProblemCase(ConvProblem.parse(problem), Prop(prop), epilogue, bia=bia, shift=shift,
                    deterministic=deterministic, numpy=numpy)
        if target:
            chip = Target.parse(target)
            case.target = chip if numpy else executable(chip, case.where)
        row = _run(case, mode, data, schedules, seed)
    except Unsupported as error:
        # Not refused, but wrong: the first results of all its kernels were.
        wrong = error.reason == "miscompiled"
        row = _ended("FAILED" if wrong else UNIMPLEMENTED, str(error), cause=error.reason)
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
        return _ended("SKIPPED", f"too large for the interpreter, which takes {most:.1g} products "
                      "at most (--mb=1 makes the problem smaller)")
    row: Row = {"status": "PASSED", "reason": "", "plans": 0, "failures": []}
    for texts in _plans(case, schedules):
        first = not row["plans"]
        row["plans"] += 1
        try:
            compiled = case.plan_of(texts) if texts else case.proven()
            if first:
                row.update(config=_text(compiled), kernels=len(compiled.steps),
                           rejected=compiled.rejected)
            found = _STEPS[mode](case, compiled, data, seed, first)
        except Exception as error:
            kind = type(error).__name__
            if isinstance(error, ProblemError):
                raise
            if kind == "OutOfMemoryError" or (isinstance(error, (Unsupported, ScheduleError))
                                              and not _ranked(schedules)):
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
    elif "nonzero" in row and row["nonzero"] < _least():
        row.update(status="MISTRUSTED", reason=f"only {row['nonzero']:.0%} of the answer is not 0")
    return row


def _least() -> float:
    from transconv.verify.judgement import LEAST_NONZERO

    return LEAST_NONZERO


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
    from transconv.verify.case import warm

    return {"compile_s": warm(compiled)} if case.where == "cuda" else {}


def _execute(case: ProblemCase, compiled: CompiledDirection, data: str, seed: int, first: bool) -> Row:
    from transconv.verify.machine import synchronize

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
    from transconv.verify.data import poison
    from transconv.verify.machine import synchronize

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
    schedule, reason = row["failures"][0]
    several = f"{len(row['failures'])} of {row['plans']} schedules fail, the first: " \
        if row["plans"] > 1 else ""
    return f"{several}{reason}"

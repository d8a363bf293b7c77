"""``report``: an HTML page about a problem's kernels, with the measured times of a CSV file that
``python -m bench time`` wrote."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from os.path import isfile
from pathlib import Path

from transconv.backend_triton import Answer, CompileFailure, CompileJob, compile_offline
from transconv.cli.arguments import computations, options, ranges
from transconv.cli.show import ShownStep, why
from transconv.compute import Alone, Workload
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.report import LARGEST, LabeledTime, Section, Subject, write_page
from transconv.runtime import Plan, Planned, build, job_of
from transconv.schedule import Schedule
from transconv.support import ProblemError, ScheduleError, StageError, TransconvError, one_line
from transconv.target import CARDS, Target
from transconv.tuning.table import Row, header, number, read

TEXTS = ("ptx", "sass", "amdgcn")
MOST = 8  # problems of a list
ABOUT = {Prop.FWD: "forward", Prop.BWD_D: "data gradient", Prop.BWD_W: "weight gradient"}


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "report",
        "write an HTML page that shows a problem's kernels",
        "Writes one self-contained HTML page. It shows what a tile reads and stores, the schedule, why\n"
        "other schedules are refused, the grid of tiles, shared memory, the roles of warps, what each\n"
        "pass changed, the source next to its machine code, and times on a roofline. FILE is a list of\n"
        "problems, a computation as text, or a CSV file of `python -m bench time` with measured times.",
        (
            f"report {options.EXAMPLE} dt=bf16 tag=nhwc --target sm_90 -o kernel.html",
            "report bench/computes/max_pool.txt --target sm_90 -o max_pool.html",
            "report bench/results/h200_layers_bf16_nhwc.csv --limit 3 -o layers.html",
        ),
        report,
    )
    options.add_problem(made, or_file=True)
    options.add_props(made, "all")
    made.add_argument(
        "-o",
        "--out",
        required=True,
        type=ranges.output,
        metavar="FILE.html",
        help="the page to write; replaced only when the new page is complete",
    )
    options.add_chip(made)
    options.add_epilogue(made)
    made.option(
        "--times",
        "CSV",
        "measured times of these problems, a file of `python -m bench time`",
        None,
        _times,
    )
    made.option(
        "--limit",
        "N",
        f"the most problems of a list to show, up to 50 (default: {MOST})",
        MOST,
        ranges.at_least(1, 50),
    )
    made.flag("--no-compile", "omit the machine code")
    made.option("--timeout", "S", "seconds to compile one kernel (default: 120)", 120, ranges.limit)
    options.add_schedule(made)


def _times(text: str) -> Path:
    if not isfile(text):
        raise argparse.ArgumentTypeError(f"'{text}' is no file; expected a CSV file of `bench time`")
    return Path(text)


def report(words: argparse.Namespace) -> int:
    found = computations.asked(words)
    if found:
        groups = {c.name: [_Question(Alone(c), "", None)] for c in found}
        left_out = 0
    else:
        asked, left_out = _asked(words)
        groups = _grouped(asked, options.epilogue(words))
    target, given = options.chip(words.target), options.schedule(words)
    made = [_section(questions, target, given, words) for questions in groups.values()]
    if not any(s.subjects for s in made):
        name, reason = next((r for s in made for r in s.refusals), ("", "nothing was asked for"))
        raise ScheduleError(f"{name}: {reason}")
    compiled = [_compiled(s, words) for s in made]
    title = made[0].title if len(made) == 1 else f"{len(made)} problems of {words.problem[0]}"
    remarks = (
        []
        if not left_out
        else [f"The first {len(made)} problems are shown; {left_out} more are left out (--limit)."]
    )
    size = write_page(words.out, compiled, title, remarks)
    plans = sum(len(s.subjects) for s in made)
    print(
        f"{words.out}: {size / 1e6:.2f} MB, {plans} {'plan' if plans == 1 else 'plans'}"
        + (f"; {left_out} problems are left out (--limit)" if left_out else "")
    )
    if size > LARGEST:
        print(f"the page is larger than {LARGEST / 1e6:g} MB; --limit makes it smaller", file=sys.stderr)
    return 0


# -- the request --------------------------------------------------------------------------------------


class _Question:
    """A workload, its heading, and its measured times."""

    def __init__(self, workload: Workload, title: str, row: MeasuredProblem | None) -> None:
        self.workload, self.title, self.row = workload, title, row


def _asked(words: argparse.Namespace) -> tuple[list[MeasuredProblem], int]:
    """Problems with directions and rows, at most ``--limit`` problems; how many were left out. Raises
    ProblemError, ValueError and OSError."""
    first = words.problem[0]
    rows = asked_of(words.times) if words.times else []
    if len(words.problem) == 1 and isfile(first) and is_times(Path(first)):
        for option in ("dtype", "layout", "epilogue"):
            if getattr(words, option):
                raise ProblemError(
                    f"--{option} is given, and the rows have their own in {first}; "
                    "expected the table without it"
                )
        every = [a for a in asked_of(Path(first)) if a.prop in options.props(words)]
        if not every:
            raise ProblemError(f"{first} has no row with --prop {words.prop}; expected at least one")
    else:
        every = [MeasuredProblem(p, prop) for p, prop in options.problems(words)]
    every = list({(a.problem, a.prop, a.epilogue): a for a in every}.values())
    every = [
        next(
            (
                replace(r, problem=a.problem)
                for r in rows
                if not a.row and r.same(a) and r.epilogue == _epilogue(a.prop, words)
            ),
            a,
        )
        for a in every
    ]
    kept = list(dict.fromkeys(a.problem for a in every))
    shown = {*kept[: words.limit]}
    return [a for a in every if a.problem in shown], len(kept) - len(shown)


def _epilogue(prop: Prop, words: argparse.Namespace) -> str:
    return "" if prop is Prop.BWD_W else str(options.epilogue(words))


def _grouped(asked: Sequence[MeasuredProblem], epilogue: Epilogue) -> dict[str, list[_Question]]:
    groups: dict[str, list[_Question]] = {}
    for a in asked:
        own = Epilogue.parse(a.epilogue) if a.epilogue else epilogue
        used = own if a.prop is not Prop.BWD_W else Epilogue()
        groups.setdefault(str(a.problem), []).append(
            _Question(ConvWorkload(a.problem, a.prop, used), ABOUT[a.prop], a)
        )
    return groups


# -- the sections -------------------------------------------------------------------------------------


def _section(
    questions: Sequence[_Question], target: Target, given: Schedule | None, words: argparse.Namespace
) -> Section:
    subjects, refusals = [], []
    for q in questions:
        try:
            subjects.append(_subject(q, target, given, words))
        except StageError:
            raise
        except TransconvError as error:
            refusals.append((q.title or q.workload.title, one_line(str(error))))
    first = questions[0].workload
    if isinstance(first, ConvWorkload):
        return Section(str(first.problem), _facts(first.problem), tuple(subjects), tuple(refusals))
    return Section(first.title, (), tuple(subjects), tuple(refusals))


def _facts(p: ConvProblem) -> tuple[tuple[str, str], ...]:
    facts = [
        ("work", f"{p.flops() / 1e9:.3g} GFLOP, {p.bytes_moved() / 1e6:.3g} MB"),
        ("types", " ".join(dict.fromkeys(str(s.dtype) for s in p.specs.values()))),
        ("groups", str(p.g) if p.g > 1 else ""),
        ("stride", "x".join(map(str, p.stride))),
        ("dilation", "x".join(map(str, p.dilation))),
        *((name, f"{p.shapes[name]} in memory {s.layout}") for name, s in p.specs.items()),
    ]
    return tuple((name, text) for name, text in facts if text)


def _subject(q: _Question, target: Target, given: Schedule | None, words: argparse.Namespace) -> Subject:
    remarks: list[str] = []
    schedule, plan = given, None
    if given is None and q.row is not None and q.row.schedule:
        try:
            schedule = Schedule.parse(q.row.schedule)
            plan = build(q.workload, target, schedule, None, False, Plan)
        except TransconvError as error:
            schedule = None
            remarks.append(
                f"The measured schedule ({q.row.schedule}) is not legal on {target}: {error}. "
                "The one that would be chosen is shown."
            )
    if plan is None:
        plan = build(q.workload, target, schedule, None, False, Plan)
    planned = _planned(plan)
    times, told = times_of(q.row, target) if q.row is not None else ((), ())
    about = (
        f"{q.workload.direction}: {_tensors(q.workload)}, on {target}."
        if q.workload.direction
        else (f"{_tensors(q.workload)}, on {target}.")
    )
    return Subject(
        q.title or q.workload.title,
        about,
        q.workload,
        target,
        planned,
        plan,
        {w.schedule: tuple(_entries(why(w))) for w in _works(q.workload, planned, target)},
        (),
        times,
        (*remarks, *told),
        _command(q, target, words),
    )


def _planned(plan: Plan) -> Planned:
    """The computations of a plan; of a launch that does all stride phases, each phase."""
    phases = [c for c in plan.workload.computations if c.phase and all(x.size for x in c.axes)]
    made: Planned = []
    for step in plan.steps:
        whole = bool(phases) and step.compute.does == "compute" and not step.compute.phase
        made += [(c, step.schedule) for c in (phases if whole else [step.compute])]
    return made


def _tensors(workload: Workload) -> str:
    read = [t.name for c in workload.computations for t in c.tensors]
    stored = [w.view.tensor.name for c in workload.computations for w in c.writes]
    given = [t.name for t in workload.tensors if t.name in read and t.name not in stored]
    return (
        f"{', '.join(dict.fromkeys(n for n in stored if n in {t.name for t in workload.tensors}))} "
        f"from {' and '.join(given)}"
    )


def _works(workload: Workload, planned: Planned, target: Target) -> Iterator[ShownStep]:
    """One computation for each schedule; an empty one has no reasons."""
    seen = {s: c for c, s in reversed(planned) if c.does == "compute" and all(x.size for x in c.axes)}
    return (ShownStep(workload, c, s, target) for s, c in seen.items())


def _entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Lines with headings, continued below one another, as pairs."""
    head, text = "", ""
    for line in lines:
        if line[:10].strip() and text:
            yield head, text
            text = ""
        head = line[:10].strip() or head
        text = f"{text} {line[10:].strip()}".strip()
    if text:
        yield head, text


def _command(q: _Question, target: Target, words: argparse.Namespace) -> str:
    if not isinstance(q.workload, ConvWorkload):
        return f"transconv show {shlex.join(words.problem)} --target {target}"
    made = [
        "transconv",
        "show",
        str(q.workload.problem),
        "--prop",
        q.workload.direction,
        "--target",
        str(target),
    ]
    if words.schedule:
        made += ["--schedule", words.schedule]
    return shlex.join(made)


# -- machine code -------------------------------------------------------------------------------------


def _compiled(section: Section, words: argparse.Namespace) -> Section:
    """The section with the machine code of its plans."""
    if words.no_compile:
        return section
    jobs: list[CompileJob] = [
        replace(job_of(step, s.target), keep=TEXTS) for s in section.subjects for step in s.plan.steps
    ]
    answers: list[Answer] = []
    if section.subjects and section.subjects[0].target.backend != "interpreter":
        answers = compile_offline(jobs, words.timeout, workers=2)
    else:
        answers = [
            CompileFailure(j.function, j.target, "an interpreter has no machine code") for j in jobs
        ]
    left = iter(answers)
    return replace(
        section,
        subjects=tuple(
            replace(s, answers=tuple(next(left) for _ in s.plan.steps)) for s in section.subjects
        ),
    )


NEEDED = ("problem", "prop", "ours_us")
# Other implementations that were timed, by column.
NEIGHBOURS = {
    "cudnn_cl_us": "cuDNN, channels last",
    "cudnn_nchw_us": "cuDNN, channels first",
    "cudnn_fused_us": "cuDNN, fused",
    "inductor_us": "torch.compile",
    "gemm_us": "matrix product of the same size",
    "onednn_cl_us": "oneDNN, channels last",
    "onednn_nchw_us": "oneDNN, channels first",
}


@dataclass(frozen=True)
class MeasuredProblem:
    """A direction of a problem, with the row that measured it, if there is one."""

    problem: ConvProblem
    prop: Prop
    row: Row = field(default_factory=dict, hash=False)

    @property
    def epilogue(self) -> str:
        return str(self.row.get("epilogue", ""))

    @property
    def schedule(self) -> str:
        return str(self.row.get("config") or self.row.get("schedule") or "")

    def same(self, other: MeasuredProblem) -> bool:
        return (self.problem, self.prop) == (other.problem, other.prop)


def is_times(path: Path) -> bool:
    """Whether a file is such a table: its name says so, or its first line does."""
    if path.suffix.lower() == ".csv":
        return True
    try:
        return set(NEEDED) <= {*header(path)}
    except ValueError:
        return False


def asked_of(path: Path) -> list[MeasuredProblem]:
    """The rows of a file. Raises ValueError for one that is no such table, OSError."""
    columns = header(path)
    if missing := [c for c in NEEDED if c not in columns]:
        raise ValueError(f"{path} has no column '{missing[0]}'; expected a CSV file of `bench time`")
    return [_measured(row, f"{path}:{n}") for n, row in enumerate(read(path), 2)]


def _measured(row: Row, where: str) -> MeasuredProblem:
    try:
        return MeasuredProblem(ConvProblem.parse(row["problem"]), Prop(row["prop"]), row)
    except (TransconvError, ValueError, OverflowError) as error:
        raise ProblemError(f"{where}: {error}") from error


def times_of(asked: MeasuredProblem, target: Target) -> tuple[tuple[LabeledTime, ...], tuple[str, ...]]:
    """The measured times of a row, ours first, and remarks on them; none where another chip was
    measured."""
    row = asked.row
    if not row:
        return (), ()
    device = str(row.get("device", ""))
    chip = next((c for card, c in CARDS.items() if card in device.lower()), "")
    if chip and chip != target.name:
        return (), (f"The times of this problem are of {device}, not of {target}, and are not shown.",)
    versions = " ".join(f"{name} {row[name]}" for name in ("torch", "triton", "commit") if row.get(name))
    made = []
    for column, name in {"ours_us": "transconv", **NEIGHBOURS}.items():
        us = number(row, column)
        if us is not None and 0 < us < float("inf"):
            own = column == "ours_us"
            made.append(
                LabeledTime(name, us, own, False, f"{device}, {versions}".strip(", ") if own else "")
            )
    wrong = (
        ()
        if row.get("verdict", "right") == "right"
        else (f"The measured kernel was not right: {row.get('verdict')} {row.get('reason', '')}".rstrip(),)
    )
    return tuple(made), wrong

"""The data of a page: sections with subjects, each a plan with everything the page shows about it; of its
schedule the words, the alternatives with their estimates or refusals, and what its launches require.

Every stage of the compiler has the lines that it added and removed; unchanged lines are folded. Of kernel
and machine texts the lines that multiply and move data are marked and counted."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from transconv.backend_triton import Answer, grid_size, is_explicit, parameters
from transconv.compute import Compute, Workload, describe
from transconv.cost import estimate
from transconv.ir import Kernel, readable
from transconv.passes import EMIT, NAIVE, PROBLEM, SCHEDULE, TOGETHER, Form, forms, running, stages
from transconv.runtime import Plan, Planned
from transconv.schedule import Schedule, Scheduled, Word, why_not, words
from transconv.target import Target

Lines = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class LabeledTime:
    """A time in microseconds and its label; ``own``: a kernel of ours; ``from_estimate``: estimated, not
    measured; ``remark``: device and versions, or what else was compared."""

    name: str
    us: float
    own: bool = False
    from_estimate: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Subject:
    """One plan. ``title`` names it, ``about`` describes it in a sentence; ``planned``: every computation
    with its schedule, copies and second stages of sums included; ``reasons``: why each schedule was
    chosen, as (heading, text); ``answers``: the machine code of each launch, or why there is none, empty
    where nothing was compiled; ``times``: measured ones."""

    title: str
    about: str
    workload: Workload
    target: Target
    planned: Planned
    plan: Plan
    reasons: Mapping[Schedule, Lines] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    times: tuple[LabeledTime, ...] = ()
    remarks: tuple[str, ...] = ()
    command: str = ""

    @property
    def mains(self) -> list[tuple[Compute, Schedule]]:
        """The computations that do the work, without copies, second stages, and those of no elements."""
        return [(c, s) for c, s in self.planned if c.does == "compute" and all(x.size for x in c.axes)]

    @property
    def scheduled(self) -> list[Scheduled]:
        return [Scheduled(c, s, self.target) for c, s in self.mains]


@dataclass(frozen=True)
class Section:
    """The subjects of one problem, under one heading; ``facts``: names and values that describe it."""

    title: str
    facts: Lines
    subjects: tuple[Subject, ...]
    refusals: Lines = ()  # computations without a kernel, with reasons


MORE = {
    "merge": (2, 4, 8),
    "split_k": (2, 4),
    "stages": (2, 4, 6),
    "group_m": (1, 16),
    "order": (),
    "programs": (0,),
    "regs": (),
    "subtiles": (),
}
PACKS = ("", "a", "b", "c", "a.b", "a.b.c")


@dataclass(frozen=True)
class ScheduleWord:
    """A word of the schedule: its value, its meaning, whether the value is the default."""

    word: str
    value: str
    says: str
    usual: bool


@dataclass(frozen=True)
class AlternativeSchedule:
    """The schedule with one word changed: ``factor`` times the estimated time, or why it is not legal."""

    change: str
    factor: float | None
    reason: str


def explained(whole: Scheduled) -> list[ScheduleWord]:
    """Blocks first, then the words in the order of the table."""
    schedule, compute = whole.schedule, whole.grouped
    roles = {"M": "rows of the result", "N": "columns of the result", "K": "the sum", "B": "batches"}
    made = []
    for b in schedule.blocks:
        kind = compute.kind(b.first)
        what = "step of the sum" if kind == "K" else "tile"
        along = ", ".join(f"{a} ({compute.size(a)})" for a in b.axes)
        made.append(
            ScheduleWord(
                str(b),
                str(b.extent),
                f"{b.extent} positions along {along} make one {what}; "
                f"{'they are' if len(b.axes) > 1 else 'it is'} {roles[kind]}.",
                False,
            )
        )
    for word in words():
        value = schedule.word(word.name)
        made.append(ScheduleWord(word.name, str(value) or "none", word.says, value == word.default))
    return made


def others(whole: Scheduled) -> list[AlternativeSchedule]:
    """The schedule with each word at each of its other values, refusals with their reasons."""
    schedule, compute, target = whole.schedule, whole.compute, whole.target
    now = estimate(schedule, compute, target)
    made = []
    for word in words():
        for value in _values(word):
            if value == schedule.word(word.name):
                continue
            other = schedule.with_words(**{word.name: value})
            change = (
                str(value)
                if word.name == "unit"
                else f"{word.name}={value}"
                if value != ""
                else (f"no {word.name}=")
            )
            try:
                if reason := why_not(other, compute, target):
                    made.append(AlternativeSchedule(change, None, reason))
                else:
                    made.append(AlternativeSchedule(change, estimate(other, compute, target) / now, ""))
            except (ArithmeticError, LookupError) as error:
                made.append(AlternativeSchedule(change, None, f"there is no estimate: {error}"))
    return made


def _values(word: Word) -> tuple[object, ...]:
    if word.name == "pack":
        return PACKS
    return MORE.get(word.name, word.values if isinstance(word.values, tuple) else ())


def requirements(plan: Plan) -> list[tuple[str, str]]:
    """What each launch needs: programs, warps, aligned tensors, cleared memory."""
    made = []
    for tensor in plan.workload.tensors:
        sizes = " ".join(f"{d}={n}" for d, n in zip(tensor.dims, tensor.shape, strict=True))
        made.append((tensor.name, f"{tensor.dtype}, {sizes}, in memory {tensor.layout}"))
    for name, space in plan.workspaces.items():
        size = space.layout.span * space.dtype.bytes
        made.append((f"workspace {name}", f"{size} bytes of {space.dtype}"))
    for step in plan.steps:
        boxed = [p.tensor.name for p in parameters(step.kernel) if p.box is not None]
        needs = [f"{grid_size(step.kernel)} programs of {step.schedule.warps} warps"]
        if boxed:
            needs.append(
                f"descriptors of boxes for {', '.join(sorted(boxed))}, which begin at multiples "
                "of 16 bytes"
            )
        if is_explicit(step.kernel):
            needs.append("Gluon, with warps in roles")
        if step.zero is not None:
            needs.append(f"{step.zero.name} is cleared first")
        made.append((f"launch {step.compute.name}", "; ".join(needs)))
    return made


AROUND = 3  # lines shown beside those that changed


@dataclass(frozen=True)
class Shown:
    """One stage: its name and phrase, counts of lines added and removed, the text with these marked.
    ``note``: why there is no text."""

    name: str
    phrase: str
    added: int
    removed: int
    lines: Markup
    note: str = ""


def shown(
    whole: Scheduled, made: list[tuple[str, Kernel]], problem: str, joined: Kernel | None
) -> Iterator[Shown]:
    """Every stage in its order. ``joined``: the kernel of all stride phases, where there is one."""
    kernels_of, runs = dict(made), running()
    before: list[str] = []
    first, *_ = forms()
    for stage in stages():
        if stage is PROBLEM:
            yield Shown(stage.name, stage.phrase, 0, 0, escape(problem))
        elif stage is SCHEDULE:
            yield Shown(stage.name, stage.phrase, 0, 0, escape(str(whole.schedule)))
        elif isinstance(stage, Form):
            after = describe(stage.of(whole)).splitlines()
            yield _changed(stage.name, stage.phrase, before if stage is not first else [], after)
            before = after
        elif stage.name in kernels_of:
            after = readable(kernels_of[stage.name]).splitlines()
            old = [] if stage is NAIVE else before
            off = "switched off" if not runs.get(stage.name, True) else ""
            yield _changed(stage.name, stage.phrase, old, after, off)
            before = after
        elif stage is TOGETHER and joined is not None:
            yield _changed(stage.name, stage.phrase, before, readable(joined).splitlines())
        elif stage is TOGETHER:
            yield Shown(stage.name, stage.phrase, 0, 0, Markup(""), "nothing to put together")
        elif stage is EMIT:
            yield Shown(stage.name, stage.phrase, 0, 0, Markup(""), "the text is shown below")


def _changed(name: str, phrase: str, before: list[str], after: list[str], note: str = "") -> Shown:
    if not before:
        return Shown(name, phrase, 0, 0, escape("\n".join(after)))
    if before == after:
        return Shown(name, phrase, 0, 0, Markup(""), note or "unchanged")
    lines: list[Markup] = []
    added = removed = 0
    match = difflib.SequenceMatcher(None, before, after, autojunk=False)
    groups = list(match.get_grouped_opcodes(AROUND))
    at = 0
    for group in groups:
        if group[0][3] > at:
            lines.append(_skipped(group[0][3] - at))
        for kind, i, j, k, n in group:
            if kind == "equal":
                lines += [escape(x) for x in after[k:n]]
                continue
            lines += [Markup('<span class="gone">{}</span>').format(x) for x in before[i:j]]
            lines += [Markup('<span class="came">{}</span>').format(x) for x in after[k:n]]
            removed, added = removed + j - i, added + n - k
        at = group[-1][4]
    if at < len(after):
        lines.append(_skipped(len(after) - at))
    return Shown(name, phrase, added, removed, Markup("\n").join(lines))


def _skipped(count: int) -> Markup:
    return Markup('<span class="same">{}</span>').format(f"... {count} line{'s' * (count > 1)} as before")


# Kinds of lines by language: the first pattern that matches decides.
KINDS = {
    "matrix": "matrix products",
    "copy": "copies past the registers",
    "memory": "loads and stores",
    "shared": "shared memory",
    "spill": "spills",
}
MARKS: dict[str, tuple[tuple[str, str], ...]] = {
    "source": (
        ("matrix", r"\btl\.dot\b|warpgroup_mma\(|\bmma_v2\("),
        ("copy", r"\bfetch_box\(|\bsend_box\(|_(?:desc|box)\.(?:load|store)\("),
        ("memory", r"\btl\.(?:load|store|atomic_add)\(|\bgl\.(?:load|store)\("),
        ("shared", r"\bmbarrier\.|\.index\(.*\.(?:load|store)\("),
    ),
    "ptx": (
        ("matrix", r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)"),
        ("copy", r"\bcp\.(?:async|reduce)\.\S*"),
        ("spill", r"\b(?:ld|st)\.local\b"),
        ("memory", r"\b(?:ld|st|red|atom)\.(?:\w+\.)*global\S*"),
        ("shared", r"\b(?:ld|st)\.(?:\w+\.)*shared\S*|\b(?:ld|st)matrix\S*|\bmbarrier\.\S*"),
    ),
    "sass": (
        ("matrix", r"\b(?:[HQID]G?MMA|UTC\w*MMA)\b\S*"),
        ("copy", r"\b(?:UTMA\w+|UBLKCP|LDGSTS)\b\S*"),
        ("spill", r"\b(?:LDL|STL)\b\S*"),
        ("memory", r"\b(?:LDG|STG|RED|ATOMG)\b\S*"),
        ("shared", r"\b(?:LDS|STS|LDSM|STSM|SYNCS)\b\S*"),
    ),
    "amdgcn": (
        ("matrix", r"\bv_(?:mfma|smfmac|wmma|swmmac|dot)\w*"),
        ("copy", r"\b(?:global_load_lds|buffer_load\w*\b.*\blds)\b\S*"),
        ("spill", r"\bscratch_(?:load|store)\w*"),
        ("memory", r"\b(?:buffer|global|flat)_(?:load|store|atomic)\w*"),
        ("shared", r"\bds_\w+"),
    ),
}
NOISE = {
    "ptx": re.compile(r"^\s*(?://|\.loc\b|\.file\b|\.section\b)|^\s*$"),
    "amdgcn": re.compile(r"^\s*(?:;|\.loc\b|\.cfi_\S*|\.file\b|\.Ltmp\S*:)|^\s*$"),
    "sass": re.compile(r"^\s*$"),
    "source": re.compile(r"(?!)"),
}
DATA = re.compile(r"^\s*\.section\s+\.(?:rodata|debug|AMDGPU\.csdata)")  # after the code
CONTROL = re.compile(r"^[-0-9a-f:Y]+\t")  # of a line of SASS: when it may be issued
PYTHON = re.compile(
    r"(?P<comment>#.*$)|(?P<string>\"[^\"]*\"|'[^']*')|(?P<deco>^@\S+)|"
    r"\b(?P<word>def|for|in|if|else|elif|while|return|import|from|as|range|None|True|False|"
    r"and|or|not)\b"
)


@dataclass(frozen=True)
class ListedText:
    """A text to show: its lines, how often each kind of line occurs, and how many lines were left out
    for the size of the page."""

    language: str
    lines: Markup
    counts: tuple[tuple[str, str, int], ...]
    total: int
    left_out: int


def marked(text: str, language: str, most: int) -> ListedText:
    """A text of at most ``most`` bytes with its lines marked by kind, without debugging remarks."""
    noise = NOISE[language]
    lines: list[str] = []
    for line in text.expandtabs(4).splitlines() if language != "sass" else text.splitlines():
        if language in ("ptx", "amdgcn") and DATA.match(line):
            break
        if not noise.match(line):
            lines.append(CONTROL.sub("    ", line) if language == "sass" else line.rstrip())
    found: Counter[str] = Counter()
    made: list[Markup] = []
    size = 0
    for line in lines:
        kind = next((k for k, rule in MARKS[language] if re.search(rule, line)), "")
        if kind:
            found[kind] += 1
        if size < most:
            shown = _python(line) if language == "source" else escape(line)
            made.append(Markup('<span class="l {}">{}</span>').format(kind, shown) if kind else shown)
            size += len(made[-1]) + 1
    counts = tuple((kind, said, found[kind]) for kind, said in KINDS.items() if found[kind])
    return ListedText(language, Markup("\n").join(made), counts, len(lines), len(lines) - len(made))


def _python(line: str) -> Markup:
    """A line of Python with keywords, texts and comments in their colours."""
    made, at = Markup(""), 0
    for m in PYTHON.finditer(line):
        made += escape(line[at : m.start()])
        made += Markup('<i class="{}">{}</i>').format(str(m.lastgroup)[0], m.group())
        at = m.end()
    return made + escape(line[at:])

"""Pages of subjects, or of tables: templates rendered into one text that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from transconv.backend_triton import CompileFailure, Resources
from transconv.compute import describe
from transconv.ir import Kernel
from transconv.passes import lower
from transconv.report import grid, planes, roofline, subject, timeline
from transconv.report.planes import Plane, first_tile, plane_of, worth
from transconv.report.roofline import Bar
from transconv.report.subject import Section, Subject, explained, others, requirements
from transconv.report.timeline import SharedMemoryRing
from transconv.runtime import kernel_name
from transconv.schedule import Schedule, Scheduled
from transconv.support import __version__, replace_named

if TYPE_CHECKING:
    from jinja2 import Environment


LARGEST = 3_000_000  # bytes of a page
CODE = 1_300_000  # of them for kernel and machine texts
MOST_STAGED, MOST_PICTURED = 4, 6  # computations of a plan whose stages, and views, are shown


def write_page(path: Path, sections: Sequence[Section], title: str, remarks: Sequence[str] = ()) -> int:
    """Write the page, whole or not at all; its size in bytes. Raises OSError."""
    made = page(sections, title, remarks)
    replace_named(path, made)
    return len(made.encode())


def page(sections: Sequence[Section], title: str, remarks: Sequence[str] = ()) -> str:
    """The page as a text of at most ``LARGEST`` bytes. Omitted first are the ends of long kernel and
    machine texts, then stages, then the last sections; the page says so."""
    made = _fitting(sections, title, remarks)
    kept = len(sections)
    while (size := len(made.encode())) > LARGEST and kept > 1:
        kept = max(1, min(kept - 1, int(kept * LARGEST / size)))
        said = f"{len(sections) - kept} problems are left out, for the size of the page."
        made = _fitting(sections[:kept], title, [*remarks, said])
    return made


def _fitting(sections: Sequence[Section], title: str, remarks: Sequence[str]) -> str:
    """The page with as many of its texts and stages as fit; with none where it is too long even so."""
    shown = [(section, [_Shown(s) for s in section.subjects]) for section in sections]
    texts = sum(3 * len(s.plan.steps) for section in sections for s in section.subjects)
    for code, staged in ((CODE, MOST_STAGED), (CODE // 4, MOST_STAGED), (CODE // 4, 1), (CODE // 16, 0)):
        for _, subjects in shown:
            for s in subjects:
                s.most, s.staged = code // max(1, texts), staged
        made = _rendered(shown, title, remarks)
        if len(made.encode()) <= LARGEST:
            break
    return made


def _rendered(shown: Sequence[tuple[Section, list[_Shown]]], title: str, remarks: Sequence[str]) -> str:
    template = environment().get_template("page.html.j2")
    return (
        template.render(
            title=title,
            sections=shown,
            remarks=remarks,
            version=__version__,
            style=template_text("style.css"),
            script=template_text("script.js"),
            chips=dict.fromkeys(roofline.chip(s.target) for _, subjects in shown for s in subjects),
            kinds=subject.KINDS,
        )
        + "\n"
    )


@cache
def environment() -> Environment:
    """Of the templates."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def template_text(name: str) -> Markup:
    """A file of the folder of templates."""
    return Markup((files("transconv.report") / "templates" / name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Pictured:
    """A computation with the planes of its views, reads first."""

    title: str
    about: str
    planes: tuple[tuple[Plane, Markup, str], ...]


class _Shown:
    """A subject with the properties that the templates use."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.most, self.staged = subject, CODE, MOST_STAGED
        self.kernels: dict[Scheduled, list[tuple[str, Kernel]]] = {}
        self.target = subject.target
        self.title, self.about, self.plan = subject.title, subject.about, subject.plan
        self.wholes = subject.scheduled
        self.roof = roofline.roof_of(subject)
        self.times = [*([roofline.estimated(subject)] if self.wholes else []), *subject.times]

    @property
    def pictures(self) -> list[Pictured]:
        return [self._pictured(w, i) for i, w in enumerate(self.wholes[:MOST_PICTURED])]

    @property
    def not_pictured(self) -> list[str]:
        return [w.compute.name for w in self.wholes[MOST_PICTURED:]]

    def _pictured(self, whole: Scheduled, hue: int) -> Pictured:
        seen = whole.grouped
        tile = first_tile(seen, whole.schedule)
        views = [(r.view, False) for r in seen.reads] + [(w.view, True) for w in seen.writes]
        found = []
        for view, stored in dict.fromkeys(views):
            plane = plane_of(view, seen, tile, stored, hue if seen.phase else 0)
            if plane is not None and worth(plane):
                found.append((plane, planes.draw(plane), planes.said(plane)))
        return Pictured(whole.compute.name, describe(whole.compute), tuple(found))

    @property
    def schedules(self) -> list[tuple[Schedule, list[Scheduled]]]:
        """Each schedule once, with the computations that have it."""
        found: dict[Schedule, list[Scheduled]] = {}
        for w in self.wholes:
            found.setdefault(w.schedule, []).append(w)
        return list(found.items())

    explained, others = staticmethod(explained), staticmethod(others)

    @property
    def requirements(self) -> list[tuple[str, str]]:
        return requirements(self.plan)

    def lowered(self, whole: Scheduled) -> list[tuple[str, Kernel]]:
        if whole not in self.kernels:
            name = kernel_name(self.subject.workload, whole.compute, whole.schedule, self.target)
            self.kernels[whole] = lower(
                whole.compute, whole.schedule, self.target, name, self.subject.workload.math
            )
        return self.kernels[whole]

    def launched(self, whole: Scheduled) -> Kernel:
        """The kernel that is launched for a computation: its own, or that of all stride phases."""
        own = (s.kernel for s in self.plan.steps if s.compute.name == whole.compute.name)
        return next(own, None) or self.joined or self.lowered(whole)[-1][1]

    @property
    def joined(self) -> Kernel | None:
        """The kernel of all stride phases, where one launch does them."""
        return next(
            (
                s.kernel
                for s in self.plan.steps
                if any(w.compute.phase for w in self.wholes)
                and s.compute.does == "compute"
                and not s.compute.phase
            ),
            None,
        )

    def dealt(self, whole: Scheduled) -> Markup:
        return grid.draw(whole, dict(self.lowered(whole)).get("gridwise"))

    def memory(self, whole: Scheduled) -> Markup | None:
        found = self.rings(whole)
        return timeline.draw_memory(found, self.target.shared_bytes) if found else None

    def rings(self, whole: Scheduled) -> list[SharedMemoryRing]:
        return timeline.rings(self.launched(whole)) or timeline.implied(whole)

    def timeline(self, whole: Scheduled) -> tuple[timeline.Timeline, Markup] | None:
        line = timeline.play(self.launched(whole), whole)
        return (line, timeline.draw(line)) if line is not None else None

    @property
    def stages(self) -> list[tuple[str, list[subject.Shown]]]:
        problem = f"{self.subject.workload} {self.subject.workload.direction} on {self.target}".strip()
        return [
            (w.compute.name, list(subject.shown(w, self.lowered(w), problem, self.joined)))
            for w in self.wholes[: self.staged]
        ]

    @property
    def not_staged(self) -> list[str]:
        return [w.compute.name for w in self.wholes[self.staged :]]

    @property
    def launches(self) -> list[KernelReport]:
        answers: list[object] = [*self.subject.answers] or [None] * len(self.plan.steps)
        return [
            KernelReport(
                s.compute.name,
                subject.marked(s.source, "source", self.most),
                a,
                tuple(
                    subject.marked(a.texts[k], k, self.most)
                    for k in ("ptx", "sass", "amdgcn")
                    if k in a.texts
                )
                if isinstance(a, Resources)
                else (),
            )
            for s, a in zip(self.plan.steps, answers, strict=True)
        ]

    @property
    def roofline(self) -> Markup:
        return roofline.draw(self.roof, self.times)

    @property
    def bars(self) -> list[Bar]:
        return roofline.bars(self.roof, self.times)


@dataclass(frozen=True)
class KernelReport:
    """A kernel's text, the result of its compile, and machine texts."""

    name: str
    source: subject.ListedText
    answer: object
    texts: tuple[subject.ListedText, ...]

    @property
    def resources(self) -> Resources | None:
        return self.answer if isinstance(self.answer, Resources) else None

    @property
    def failure(self) -> CompileFailure | None:
        return self.answer if isinstance(self.answer, CompileFailure) else None


@dataclass(frozen=True, slots=True)
class PrintedTable:
    """A table of a page. Cells are texts, or numbers aligned to the right; ``remarks`` are printed
    above."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    remarks: tuple[str, ...] = ()


def tables_page(title: str, tables: Sequence[PrintedTable], remarks: Sequence[str] = ()) -> str:
    """The page as a text of HTML that needs no other file. Cells are escaped; None is shown as a dash."""
    template = environment().get_template("tables.html.j2")
    return (
        template.render(
            title=title,
            tables=tables,
            remarks=remarks,
            version=__version__,
            style=template_text("style.css"),
            script=template_text("script.js"),
        )
        + "\n"
    )

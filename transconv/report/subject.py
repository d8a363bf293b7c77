"""The data of a page: sections with subjects, each a plan with everything the page shows about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transconv.backend_triton import Answer
from transconv.compute import Compute, Workload
from transconv.runtime import Plan, Planned
from transconv.schedule import Schedule, Scheduled
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

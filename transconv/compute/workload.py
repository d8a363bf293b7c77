"""What a plan computes, and what a tuned row is about: the computations of one question, by its names.

A front end (convolution is one) describes its questions as workloads. The rooms that choose schedules and
make plans ask a workload for what is below, and know no front end. A computation by itself is one, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transconv.compute.compute import Compute, why_not_lowered
from transconv.compute.kernels import kernels
from transconv.errors import ScheduleError
from transconv.ir import Tensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Found:
    """What a check saw. ``checked``: sampled elements with a finite answer; ``telling``: those with
    a sum that is not zero; ``varied``: whether both operands held more than one value; ``wrong``:
    coordinates of wrong elements; ``reason``: empty if there are none."""

    checked: int
    telling: int
    varied: bool
    wrong: tuple[tuple[int, ...], ...]
    reason: str

    @property
    def weak(self) -> bool:
        """Whether a wrong kernel could have passed: zeros or constants, or almost no numbers."""
        return not self.varied or self.telling * 8 < self.checked or self.checked < 16


class Workload(ABC):
    """A question that plans answer; two are equal if one plan answers both. ``str`` of it is for people
    and for the digests in kernel names."""

    prefix = ""  # what the names of its kernels begin with

    @property
    def direction(self) -> str:
        """Which of a front end's questions about one text, in a word."""
        return ""

    @property
    def kind(self) -> str:
        """What is done to sums before they are stored. Empty: nothing; ``point``: arithmetic on each
        element; ``res``: another tensor is read too."""
        return ""

    # -- what is computed ------------------------------------------------------------------------

    @property
    @abstractmethod
    def computations(self) -> tuple[Compute, ...]:
        """The computations whose stores together are the result."""

    @property
    @abstractmethod
    def math(self) -> str:
        """How f32 is multiplied."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What a call hands over, in its order."""

    @property
    @abstractmethod
    def result(self) -> str:
        """The name of the tensor that is stored."""

    @abstractmethod
    def refuse(self) -> None:
        """Raises Unsupported, ProblemError or ScheduleError where no plan can answer."""

    def named(self, name: str) -> Compute | None:
        """The computation of a name."""
        return next((a for a in self.computations if a.name == name), None)

    # -- how it is called ------------------------------------------------------------------------

    @property
    @abstractmethod
    def shape_text(self) -> str:
        """Its sizes in short, for the names of kernels."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What a plan is for, in messages about tensors."""

    @property
    def lines(self) -> tuple[str, ...]:
        """What stands above the text of each kernel; empty: which computation it is, and of what."""
        return ()

    # -- what tuned rows say about it ------------------------------------------------------------

    @property
    @abstractmethod
    def text(self) -> str:
        """The key of its rows, beside direction and kind."""

    def group(self, machine: str) -> str:
        """What rows must share to say anything about each other, as a name that files may have; empty
        where no row speaks of such workloads."""
        return ""

    def like(self, text: str) -> Workload | None:
        """The same question about another text; None for one that cannot be read."""
        return None

    def distance(self, other: Workload) -> float | None:
        """How unlike two workloads are; 0: the same text, None: they cannot be compared."""
        return None

    def innermost(self) -> Workload | None:
        """The same over tensors whose features lie innermost, as copies have them; None if these do."""
        return None

    # -- whether a result is right ---------------------------------------------------------------

    @abstractmethod
    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> Found:
        """Compare elements of a result with what should be there."""

    def part_of(self, at: Sequence[int]) -> tuple[int, ...]:
        """Which part of the result an element belongs to: see ``Compute.part``."""
        return ()


@dataclass(frozen=True, slots=True)
class Alone(Workload):
    """A computation by itself. No row speaks of it, and only its own meaning says what it stores."""

    compute: Compute

    @property
    def computations(self) -> tuple[Compute, ...]:
        made = kernels(self.compute)
        return (self.compute,) if made == (self.compute,) else made

    @property
    def math(self) -> str:
        return self.compute.math

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.compute.tensors

    @property
    def result(self) -> str:
        return self.compute.c.tensor.name

    def refuse(self) -> None:
        for compute in self.computations:
            if reason := why_not_lowered(compute):
                raise ScheduleError(f"{compute.name}: {reason}")

    @property
    def shape_text(self) -> str:
        return "".join(f"{x.name}{x.size}" for x in self.compute.axes)

    @property
    def title(self) -> str:
        return self.compute.name

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(str(self.compute).splitlines())

    @property
    def text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return " ".join(" ".join(str(self.compute).split()).split())

    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> Found:
        raise NotImplementedError(f"{self.compute.name}: a computation alone is not checked at samples; "
                                  "see python -m transconv check")

"""Workload: the computations that one plan computes, with the names of their problem and direction.

A front end (convolution is one) describes what it wants computed as workloads. The packages that choose
schedules and make plans use only a workload's interface, and know no front end. A single computation is a
workload, too.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transconv.compute.compute import Compute, why_not_lowered
from transconv.compute.kernels import kernels
from transconv.compute.sampled import Found, examine
from transconv.compute.sized import why_not_any_size
from transconv.errors import ScheduleError
from transconv.ir import Tensor

if TYPE_CHECKING:
    import torch


COMPUTE = "compute_"
"""How the groups of tuned rows of computations begin."""


class Workload(ABC):
    """A question that plans answer; two are equal if one plan answers both. ``str`` of it is for people
    and for the digests in kernel names."""

    prefix = ""  # what the names of its kernels begin with

    @property
    def direction(self) -> str:
        """Which of a front end's questions about one text, in a word."""
        return ""

    @property
    def behind(self) -> str:
        """What is done to sums before they are stored, as a text that its front end reads."""
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
        """The name of the tensor that is stored, the first of several."""

    @property
    def results(self) -> tuple[str, ...]:
        """The names of all tensors that are stored."""
        return (self.result,)

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

    by_user = True  # whether TRANSCONV_SCHEDULE speaks of it

    def about(self, compute: Compute) -> Workload:
        """The workload that rows about one of its computations are of."""
        return self

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
    """A computation by itself. Its own meaning says what it stores."""

    compute: Compute

    by_user = False

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

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.view.tensor.name for w in self.compute.writes))

    def refuse(self) -> None:
        if self.compute.named and len(self.computations) > 1:
            raise ScheduleError(f"{self.compute.name}: sizes that are arguments: it takes "
                                f"{len(self.computations)} kernels, and memory between them; expected "
                                "what one kernel computes")
        for compute in self.computations:
            if reason := why_not_lowered(compute) or why_not_any_size(compute):
                raise ScheduleError(f"{compute.name}: {reason}")

    @property
    def shape_text(self) -> str:
        return "".join(f"{x.name}{x.size if x.extent is None else ''}" for x in self.compute.axes)

    @property
    def title(self) -> str:
        return self.compute.name

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(str(self.compute).splitlines())

    @property
    def text(self) -> str:
        return str(self.compute)

    def about(self, compute: Compute) -> Workload:
        """Each of its kernels is tuned by itself."""
        return self if compute == self.compute else Alone(compute)

    def group(self, machine: str) -> str:
        """A group of its own: rows say nothing about other computations."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()
        return f"{re.sub('[^A-Za-z0-9_]+', '-', machine)}_{COMPUTE}{digest}"

    def like(self, text: str) -> Workload | None:
        return self if text == self.text else None

    def distance(self, other: Workload) -> float | None:
        return 0.0 if other == self else None

    def __str__(self) -> str:
        return " ".join(" ".join(str(self.compute).split()).split())

    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> Found:
        return examine(self.compute, tensors)

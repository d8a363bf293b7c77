"""Workload: the computations that one plan computes, with the names of their problem and direction.

Front ends, such as that of convolutions, describe their problems as workloads. The packages that choose
schedules and make plans use only this interface and know no front end. A single computation is a workload,
too.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transconv.compute.compute import Compute
from transconv.compute.kernel_split import kernels
from transconv.compute.one_kernel import why_not_lowered
from transconv.compute.semantics.sampled_points import SampleOutcome
from transconv.compute.semantics.sampled_statistics import examine
from transconv.compute.symbolic_compute import why_not_any_size
from transconv.ir import Tensor, sizes_told
from transconv.support import ScheduleError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TorchText:
    """What torch computes in a workload's place, as lines of Python for files that check themselves.

    ``program`` defines ``product(a, b)``: the sums of products in f64, of tensors named ``factors``, each
    of at most ``terms`` products. ``behind`` continues ``want``, the sums, and ``bound``, what rounding
    explains of their errors, with what follows on them; ``eps`` is the spacing of the sums' type."""

    factors: tuple[str, str]
    terms: int
    eps: float
    program: tuple[str, ...]
    behind: tuple[str, ...] = ()


COMPUTE = "compute_"
"""The prefix of the groups of tuned rows of computations."""


class Workload(ABC):
    """What a plan computes; equal workloads have the same plan. ``str`` of it is used in messages and in
    the digests in kernel names."""

    prefix = ""  # of the names of its kernels

    @property
    def direction(self) -> str:
        """One word that distinguishes the workloads of one text, such as a direction; may be empty."""
        return ""

    @property
    def options(self) -> tuple[str, ...]:
        """The words of a command line that name the workload, beside its text."""
        return ()

    @property
    def behind(self) -> str:
        """The operations on sums before they are stored, as a text that its front end parses."""
        return ""

    @property
    def kind(self) -> str:
        """The class of operations on sums before they are stored. Empty: none; ``point``: arithmetic on
        each element; ``res``: also reads a tensor of the result's shape."""
        return ""

    # -- computations ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def computations(self) -> tuple[Compute, ...]:
        """The computations whose stores together are the result."""

    @property
    @abstractmethod
    def math(self) -> str:
        """The precision of products of f32: tf32, tf32x3 or ieee."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of a call, in order."""

    @property
    @abstractmethod
    def result(self) -> str:
        """The name of the first tensor that is stored."""

    @property
    def results(self) -> tuple[str, ...]:
        """The names of all tensors that are stored."""
        return (self.result,)

    @abstractmethod
    def refuse(self) -> None:
        """Raise Unsupported, ProblemError or ScheduleError if there can be no plan."""

    def named(self, name: str) -> Compute | None:
        """The computation of this name, or None."""
        return next((a for a in self.computations if a.name == name), None)

    def prepares(self, compute: Compute) -> bool:
        """Whether a computation stores what a later one reads, instead of a part of the result. Schedules
        that callers give are not for it."""
        return False

    # -- names -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def shape_text(self) -> str:
        """Its sizes, in short, for the names of kernels."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A name for messages about tensors."""

    @property
    def meaning(self) -> str:
        """What it computes, as a sentence; empty if its computation's text says it."""
        return ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The comment lines above the text of each kernel; by default, its computation and workload."""
        return ()

    # -- tuned rows ------------------------------------------------------------------------------

    by_user = True  # whether TRANSCONV_SCHEDULE applies to it

    def about(self, compute: Compute) -> Workload:
        """The workload under which one of its computations is tuned."""
        return self

    @property
    @abstractmethod
    def text(self) -> str:
        """The key of its rows, with direction and kind."""

    def group(self, machine: str) -> str:
        """The name of the group of rows whose workloads can be compared, usable as a file's name; empty if
        such workloads have no rows."""
        return ""

    def like(self, text: str) -> Workload | None:
        """The workload of another text, with this direction and kind; None if it cannot be parsed."""
        return None

    def distance(self, other: Workload) -> float | None:
        """The distance of two workloads; 0: the same text, None: they cannot be compared."""
        return None

    @property
    def lacks(self) -> frozenset[str]:
        """The axes of one position that schedules of its rows may name, and its computation does not
        have."""
        return frozenset()

    def innermost(self) -> Workload | None:
        """The workload with features innermost in all tensors, as in copies; None if they already are."""
        return None

    # -- results ---------------------------------------------------------------------------------

    @abstractmethod
    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> SampleOutcome:
        """Compare elements of a result with their f64 values."""

    @property
    def torch_text(self) -> TorchText | None:
        """What torch computes in its place; None if only the text of a computation says what it means."""
        return None

    def part_of(self, at: Sequence[int]) -> tuple[int, ...]:
        """The part of the result to which an element belongs (see ``Compute.part``)."""
        return ()


@dataclass(frozen=True, slots=True)
class Alone(Workload):
    """A single computation."""

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
        """Each of its kernels is tuned separately."""
        return self if compute == self.compute else Alone(compute)

    def group(self, machine: str) -> str:
        """A group of its own, because rows of other computations do not apply."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()
        return f"{re.sub('[^A-Za-z0-9_]+', '-', machine)}_{COMPUTE}{digest}"

    def like(self, text: str) -> Workload | None:
        return self if text == self.text else None

    def distance(self, other: Workload) -> float | None:
        return 0.0 if other == self else None

    def __str__(self) -> str:
        return " ".join(" ".join(str(self.compute).split()).split())

    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> SampleOutcome:
        told = sizes_told((t, tensors[t.name].shape) for t in self.compute.tensors)
        return examine(self.compute.at(**told), tensors)

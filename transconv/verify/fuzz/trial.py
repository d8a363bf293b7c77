"""A trial of the fuzzer, and its kinds: drawn from a seed and a number, written to and read from a line,
run, made simpler.

Trial ``i`` of a seed is the same on every machine. It is run in one of three ways: ``numpy``, kernels in
the interpreter of the IR; ``triton``, the emitted text in Triton's interpreter; ``device``, compiled
kernels on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from transconv.errors import ScheduleError, Unsupported

Row = dict[str, Any]
GOOD = ("passed", "refused", "resources")
MOST_STEPS = 1000  # of loops in Triton's interpreter, several ms each


def chance(rng: Random, one_in: int) -> bool:
    return rng.randrange(one_in) == 0


@dataclass(slots=True)
class TrialRun:
    """How a trial is run. ``number``: seeds its data; ``sets``: with how many sets of scales and zero
    points kernels run, where they are arguments; ``scratch``: a folder of the worker; ``row``: what is
    told."""

    way: str
    number: int = 0
    sets: int = 1
    scratch: str = ""
    target: str = "sm_90"
    row: Row = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Where emitted kernels run; a GPU's name is told."""
        if self.way == "device":
            import torch

            self.row["device"] = torch.cuda.get_device_name()
        return "cuda" if self.way == "device" else "cpu"

    def interpret(self) -> None:
        """Run in the interpreter of the IR instead."""
        self.way = self.row["way"] = "numpy"


class Trial(ABC):
    """A trial; ``str`` of it is its line. ``refusals``: errors that say that there is no such kernel."""

    refusals: tuple[type[Exception], ...] = (ScheduleError, Unsupported)

    @property
    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What the trial is about, to count by."""

    @abstractmethod
    def run(self, run: TrialRun) -> str:
        """What is wrong; empty if nothing is."""

    @abstractmethod
    def simpler(self) -> Iterator[Trial]:
        """Legal trials that differ from this one in one respect."""

    @property
    def switches(self) -> tuple[tuple[str, bool], ...]:
        """The passes that run or do not."""
        return ()

    def program(self) -> str:
        """The trial as a program; empty if its line says it all."""
        return ""


@dataclass(frozen=True, slots=True)
class TrialKind:
    """A kind of trials. ``worker``: the function that runs one, ``module:name``; ``drawn``: the trial of a
    seed, a number and a chip; ``read``: that of a line; ``corpus``: whether trials that have failed before
    run first."""

    name: str
    drawn: Callable[[int | str, int, str], Trial]
    read: Callable[[str], Trial]
    worker: str = "transconv.verify.fuzz.trial_run:work"
    corpus: bool = False

"""Kinds of trials, of convolutions and of computations: drawn, read from a line, made simpler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transconv.verify.fuzz import compute_shrinker, compute_trial, conv_trial, shrinker
from transconv.verify.fuzz.compute_trial import ComputeTrial
from transconv.verify.fuzz.conv_trial import ConvTrial

Either = ConvTrial | ComputeTrial


def drawn(seed: int | str, number: int, target: str = "sm_90", computes: bool = False,
          small: bool = False) -> Either:
    """Trial ``number`` of a seed, the same for everybody; computations bring the chip with them.
    ``small``: of convolutions with types of 8 bits alone."""
    return compute_trial.draw_trial(seed, number) if computes else conv_trial.draw_trial(
        seed, number, target, small)


def read(line: str) -> Either:
    """The trial of a line. Raises a TransconvError, one sentence."""
    return (ComputeTrial if compute_trial.LINE.fullmatch(line.strip()) else ConvTrial).parse(line)


def simpler(trial: Either) -> Iterator[Either]:
    """Legal trials that differ from this one in one respect."""
    return compute_shrinker.simpler(trial) if isinstance(trial, ComputeTrial) else shrinker.simpler(trial)


@dataclass(frozen=True, slots=True)
class TrialKind:
    """A kind of trials. ``worker``: the function that runs one, ``module:name``; ``drawn``: the trial of a
    seed, a number and a chip; ``read``: that of a line; ``simpler``: those that differ in one respect;
    ``asked``: the worker's words for drawn trials; ``corpus``: whether trials that have failed before run
    first; ``shown``: a trial as a program."""

    worker: str
    drawn: Callable[[int | str, int, str], Any]
    read: Callable[[str], Any]
    simpler: Callable[[Any], Iterator[Any]]
    name: str
    asked: tuple[tuple[str, Any], ...] = ()
    corpus: bool = False
    shown: Callable[[Any], str] = lambda trial: ""


CONVOLUTIONS = TrialKind(
    "transconv.verify.fuzz.trial_run:work", drawn, read, simpler, "convolutions", corpus=True
)
COMPUTES = TrialKind(
    "transconv.verify.fuzz.trial_run:work",
    lambda s, n, t: drawn(s, n, t, True),
    read,
    simpler,
    "computes",
    (("computes", True),),
    True,
)
SMALL_TYPES = TrialKind(
    "transconv.verify.fuzz.trial_run:work",
    lambda s, n, t: drawn(s, n, t, small=True),
    read,
    simpler,
    "small-types",
    (("small", True),),
)

"""Trials of both kinds, of convolutions and of computations: drawn, read from a line, made simpler."""

from __future__ import annotations

from collections.abc import Iterator

from transconv.verify import fuzz_compute, fuzz_trial, shrink, shrink_compute
from transconv.verify.fuzz_compute import ComputeTrial
from transconv.verify.fuzz_trial import Trial

Either = Trial | ComputeTrial


def drawn(seed: int | str, number: int, target: str = "sm_90", computes: bool = False) -> Either:
    """Trial ``number`` of a seed, the same for everybody; computations bring the chip with them."""
    return fuzz_compute.draw_trial(seed, number) if computes else fuzz_trial.draw_trial(
        seed, number, target)


def read(line: str) -> Either:
    """The trial of a line. Raises a TransconvError, one sentence."""
    return (ComputeTrial if fuzz_compute.LINE.fullmatch(line.strip()) else Trial).parse(line)


def simpler(trial: Either) -> Iterator[Either]:
    """Legal trials that differ from this one in one respect."""
    return shrink_compute.simpler(trial) if isinstance(trial, ComputeTrial) else shrink.simpler(trial)

"""Kernels as a kind of the fuzzer's trials."""

from __future__ import annotations

from transconv.kernel_trials.draw import draw_trial
from transconv.kernel_trials.shrink import simpler
from transconv.kernel_trials.trial import KernelTrial
from transconv.verify.fuzz.trial_kinds import TrialKind

KERNELS = TrialKind(
    "transconv.kernel_trials.run:work",
    lambda seed, number, target: draw_trial(seed, number),
    KernelTrial.parse,
    simpler,
    "kernels",
    shown=KernelTrial.program,
)
"""Drawn kernels; a failure is shown as a program."""

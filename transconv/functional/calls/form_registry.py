"""Calls whose kernels take sizes as arguments: the launches of a form for any size.

A form (compute/library/any_size.py) is the same for all sizes of a kind of call. It has a registry of
plans (runtime/registry.py): where one axis is reduced, each holds rows up to a length, and the last reads
them again in steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from transconv.calls import dynamic_sizes
from transconv.compute import Alone, library
from transconv.errors import Unsupported
from transconv.functional.calls.compiled_launch import deterministic, launch, program
from transconv.functional.calls.symbolic_bind import BoundText, texts
from transconv.runtime import ChosenPlan, Launch, Plan, PlanRequest, Registry
from transconv.torch_ops.calls.lower_call import or_unsupported, target_of

log = logging.getLogger("transconv.functional")

class FormRegistry(Registry[Plan]):
    """The plans of one form on a device. ``texts``: those of its questions."""

    def __init__(self, named: library.LibraryText, device: torch.device, aligned: bool) -> None:
        target, same = target_of(device), deterministic()
        self.texts = {PlanRequest(Alone(program(text).compute), target, same, aligned): text
                      for text in texts(named)}
        super().__init__([*self.texts], Plan, "call", named.head.removeprefix("compute "))


def chosen(named: library.LibraryText, device: torch.device, aligned: bool,
           mode: str) -> tuple[ChosenPlan[Plan], str]:
    """The plan for the sizes of a call, and its text. Raises Unsupported, with a reason, where there is
    none, or none yet as the mode has it."""
    registry = registry_of(named, device, aligned)
    with or_unsupported(registry.title):
        found: ChosenPlan[Plan] = registry.choose(tuple(named.sizes.values()), mode)
    return found, registry.texts[found.question]


def registry_of(named: library.LibraryText, device: torch.device, aligned: bool) -> FormRegistry:
    """The registry of a form. Raises Unsupported where there is none."""
    key = texts(named), device.type, device.index, aligned, deterministic()
    return dynamic_sizes.registry_of(key, lambda: FormRegistry(named, device, aligned))


class SizedLaunchChoice(NamedTuple):
    """The launch of a step and its text; ``any_size``: sizes are arguments of its kernels; ``waits``, if a
    process compiles another one: whether it may be chosen by now."""

    launch: Launch
    text: str
    any_size: bool = False
    waits: Callable[[], bool] | None = None


def launched(step: BoundText, exact: Callable[[], str], device: torch.device, aligned: bool,
             mode: str) -> SizedLaunchChoice:
    """What launches a step: kernels for any size, if it is bound for any. What has no form for any size,
    or sizes that no plan is for, gets a kernel for its exact sizes, of the text ``exact``. Raises as
    launch."""
    if step.named is not None:
        try:
            taken, text = chosen(step.named, device, aligned, mode)
            if log.isEnabledFor(logging.INFO):
                log.info("%s: %s", text.partition("\n")[0], taken.why)
            return SizedLaunchChoice(
                launch(text, device, aligned, mode).at(step.named.sizes), text, True, taken.waits
            )
        except Unsupported as error:
            if not dynamic_sizes.leaves_exact(error):
                raise
            log.info("%s: %s", step.named.head, error)
    text = exact()
    return SizedLaunchChoice(launch(text, device, aligned, mode), text)


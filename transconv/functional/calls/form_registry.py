"""Calls whose kernels take sizes as arguments: the texts of a form for any size, and their launches.

A form (compute/library/any_size.py) is the same for all sizes of a kind of call. It has a registry of
plans (runtime/registry.py): where one axis is reduced, each holds rows up to a length, and the last reads
them again in steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from transconv.calls import dynamic_sizes
from transconv.calls.dynamic_sizes import LIMIT
from transconv.compute import Alone, library
from transconv.functional.calls.compiled_launch import deterministic, launch, program
from transconv.runtime import ChosenPlan, Launch, Plan, PlanRequest, Registry
from transconv.support import Unsupported
from transconv.torch_ops.calls.lower_call import or_unsupported, target_of

if TYPE_CHECKING:
    from transconv.functional.calls.symbolic_bind import BoundText

log = logging.getLogger("transconv.functional")

MOST = 2**31 - 2**16  # elements of a tensor; with those of the last tile they fit 32 bits
REACHES = (128, 1024, 8192, MOST)  # the longest rows of each plan, where one axis is reduced
WIDEST = 2**20  # a dim of a tensor that windows slide over
# Examples: rows, elements of a row of any length, elements where nothing is reduced, a dim under windows.
ROWS, LONG, ELEMENTS, SIDE = 8192, 65536, 1 << 22, 64

_written: dict[str, tuple[str, ...]] = {}  # the texts of each form


def texts(named: library.LibraryText) -> tuple[str, ...]:
    """The texts of a form, one for each plan: they differ in their line of sizes."""
    found = _written.get(named.rest)
    if found is None:
        if len(_written) >= LIMIT:
            _written.clear()
        reaches = REACHES if len(named.summed) == 1 else (MOST,)
        found = _written[named.rest] = tuple(
            f"{named.head}\n    sizes  {', '.join(_said(named, reach))}\n{named.rest}"
            for reach in reaches)
    return found


def _said(named: library.LibraryText, reach: int) -> list[str]:
    """The sizes with examples and ranges, and what must hold for their products."""
    said, rows = [], len(named.sizes) - len(named.summed)
    for name in named.sizes:
        like, most = round((ROWS if named.summed else ELEMENTS) ** (1 / max(1, rows))), MOST
        if name in named.summed:
            like, most = round(min(reach, LONG) ** (1 / len(named.summed))), reach
        elif named.windows:
            like, most = SIDE, WIDEST
        said.append(f"{name}={like} in 1..{most}")
    return said + [f"{'*'.join(p)} <= {MOST}" for p in named.products if len(p) > 1]


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


"""Batches of drawn sizes through the kernel of a workload: each sample alone against the same inside.

    8 samples   results[3] of the batch   ==   results[0] of samples[3:4]     bit for bit, for all of them

Few samples have another plan than many, so parts of a batch are compared for which other plans are chosen.
A result without samples is a sum over them, such as a weight gradient. It is compared with that of the
same samples and some of zeros behind them, which add nothing: where the number of samples decides which
terms are added to which, it has other bits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from transconv.compute import Workload, fewest, in_bands
from transconv.runtime import Launch, Plan, PlanRequest, Wanted, build
from transconv.schedule import Schedule
from transconv.target import Target

FEWEST, MOST = 2, 160  # samples, so that plans for many have a part
ELEMENTS = 1 << 24  # of a drawn batch's largest tensor
ZEROS = 3  # samples of zeros at most
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_off(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements of two tensors have other bits; 0 and -0 are equal."""
    kind = INTEGERS[one.element_size()]
    a, b = ((t + 0 if t.is_floating_point() else t).contiguous().view(kind) for t in (one, other))
    return int((a != b).sum())


class BatchKernel:
    """A workload's kernels for any number of samples, and which tensors hold samples. ``plans``: the
    fewest samples of each plan; ``schedules``: one for one sample and one for more, or one for all, in
    place of the choice. Raises as ``build`` and ``of_any_batch``."""

    def __init__(
        self, workload: Workload, target: Target, device: str, schedules: Sequence[Schedule]
    ) -> None:
        self.workload, self.target, self.device = workload, target, torch.device(device)
        form, _ = workload.of_any_batch()
        self.plans = sorted({n for c in form.computations for n in fewest(in_bands(c))})
        self.schedules, self.launches = schedules, dict[Workload, Launch]()
        one, two = (self.shapes(n) for n in (1, 2))
        self.samples = {name for name in one if one[name] != two[name]}

    def at(self, count: int) -> Launch:
        """For so many samples."""
        form, sizes = self.workload.with_batch(count).of_any_batch()
        if form not in self.launches:
            given = (*self.schedules, None)[0 if count == 1 or len(self.schedules) < 2 else 1]
            plan = build(form, self.target, given, None, given is None, Plan)
            made = self.launches[form] = Launch(plan, aligned=True)
            made.request = PlanRequest(form, self.target, deterministic=True)
        return self.launches[form].at(sizes)

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Those of its tensors, for so many samples."""
        return {w.name: w.shape for w in self.at(count).operands()}

    def memory(self, wanted: Wanted) -> torch.Tensor:
        """For a tensor. A form for any number of samples has no other than strided ones."""
        strides = wanted.strides or ()
        return torch.empty_strided(wanted.shape, strides, dtype=wanted.elements, device=self.device)

    def drawn(self, count: int, rng: random.Random) -> dict[str, torch.Tensor]:
        """Operands of so many samples."""
        generator = torch.Generator("cpu").manual_seed(rng.randrange(1 << 30))
        found = {}
        for w in self.at(count).operands():
            made = self.memory(w)
            values = torch.randn(w.shape, generator=generator)
            found[w.name] = made.copy_(values if w.elements.is_floating_point else (values * 8).round())
        return found

    def results(self, operands: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
        """What the kernels make of operands."""
        launch, stored = self.at(count), self.workload.results
        tensors: list[Any] = []
        for w in launch.operands():
            laid = self.memory(w)
            tensors.append(laid if w.name in stored else laid.copy_(operands[w.name]))
        launch.start(tensors)
        return {w.name: t for w, t in zip(launch.operands(), tensors, strict=True) if w.name in stored}


def differing(
    workload: Workload,
    target: Target,
    device: str,
    batches: int,
    seed: int = 0,
    schedules: Sequence[Schedule] = (),
) -> Iterator[str]:
    """In words, what has other bits alone than inside of drawn batches; one empty line for each batch in
    which nothing has. ``schedules``: see ``BatchKernel``."""
    kernel, rng = BatchKernel(workload, target, device, schedules), random.Random(seed)
    one = max(prod(shape) for shape in kernel.shapes(1).values())
    most = max(FEWEST, min(MOST, ELEMENTS // max(1, one)))
    for _ in range(batches):
        least = max(FEWEST, rng.choice([n for n in kernel.plans if n <= most] or [most // 2]))
        count = rng.randint(least, min(most, 2 * least))
        found = list(_of_batch(kernel, count, most, rng))
        yield from found or [""]


def _of_batch(kernel: BatchKernel, count: int, most: int, rng: random.Random) -> Iterator[str]:
    """Each sample alone, and as many as other plans take at least; sums with zeros up to as many."""
    operands = kernel.drawn(count, rng)
    whole = kernel.results(operands, count)
    apart = {name: t for name, t in whole.items() if name in kernel.samples}
    begins = [(at, 1) for at in range(count)]
    begins += [(rng.randint(0, count - n), n) for n in kernel.plans if 1 < n < count]
    for at, number in begins if apart else ():
        part = kernel.results(_part(kernel, operands, at, at + number, number), number)
        for name, t in apart.items():
            step = len(t) // count
            if off := bits_off(part[name], t[at * step : (at + number) * step]):
                said = f"sample {at}" if number == 1 else f"samples {at} to {at + number - 1}"
                yield f"{name} of {said} of {count}: {off} elements of {part[name].numel()} differ"
    larger = [n for n in kernel.plans if count < n <= most]
    for total in (count + rng.randint(1, ZEROS), *larger) if len(apart) < len(whole) else ():
        again = kernel.results(_part(kernel, operands, 0, count, total), total)
        for name in whole.keys() - apart.keys():
            if off := bits_off(whole[name], again[name]):
                yield f"{name} of {count} samples and {total - count} of zeros: {off} elements differ"


def _part(
    kernel: BatchKernel, operands: Mapping[str, torch.Tensor], begin: int, end: int, count: int
) -> dict[str, torch.Tensor]:
    """Some samples of operands, with zeros up to ``count`` behind them."""
    whole, wanted = kernel.shapes(1), kernel.shapes(count)
    found = {}
    for name, t in operands.items():
        if name not in kernel.samples:
            found[name] = t
            continue
        step = whole[name][0]
        part = t[begin * step : end * step]
        found[name] = t.new_zeros(wanted[name])
        found[name][: len(part)] = part
    return found

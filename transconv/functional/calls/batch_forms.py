"""The forms of a call for any number of samples, in invariant mode.

Samples lie along the first dims of operands. A formula is bound twice, with other numbers of samples, and
each of its texts is written with that number as a name (compute/batch.py). What comes out must be the
same twice: then no number of the text hides how many samples there are, and all batches have one kernel.

    linear(x[5, 64], w[32, 64])  ->  x[8, 64], x[24, 64]  ->  sizes BATCH=4096, at BATCH=5

Which operands hold samples is tried: those whose first dim is as long as the first operand's, those of
them with as many dims, the first alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from transconv.compute import BATCH, of_any_batch, samples
from transconv.functional.calls.compiled_launch import TensorMemory, program
from transconv.functional.calls.symbolic_bind import BoundCall, bind
from transconv.support import Unsupported

COUNTS = (8, 24)
"""Numbers of samples that a call is bound with."""


class BatchForm(NamedTuple):
    """A text in which the number of samples is a name, and the sizes of a call."""

    text: str
    sizes: dict[str, int]


def forms(bound: BoundCall) -> list[BatchForm]:
    """Those of a call's texts, the forward one first. Raises Unsupported, with a reason, where a text has
    no form, or samples are not told from features."""
    why: Unsupported | None = None
    for held in holding(bound):
        try:
            return _forms(bound, held)
        except Unsupported as error:
            why = why or error
        except (RuntimeError, IndexError, ValueError):  # torch's, of sizes that do not fit
            continue
    raise why or Unsupported("invariant:samples", f"{bound.function.name}: no operand holds samples")


def holding(bound: BoundCall) -> Iterator[tuple[str, ...]]:
    """Operands that may hold samples, in the order in which they are tried."""
    memory = bound.memory
    shapes = {name: memory[name].shape for name in bound.operands}
    first = bound.operands[0]
    if not shapes[first]:
        return
    alike = [n for n, shape in shapes.items() if shape[:1] == shapes[first][:1]]
    ranked = [n for n in alike if len(shapes[n]) == len(shapes[first])]
    yield from dict.fromkeys((tuple(alike), tuple(ranked), (first,)))


def _forms(bound: BoundCall, held: Sequence[str]) -> list[BatchForm]:
    """The forms, where these operands hold samples."""
    count = bound.memory[held[0]].shape[0]
    rebound = [_with_samples(bound, held, n) for n in COUNTS]
    found = []
    for one, other in zip(*map(_texts, rebound), strict=True):
        made, again = (program(text).compute for text in (one, other))
        form = of_any_batch(made)
        if form != of_any_batch(again):
            raise Unsupported(
                "invariant:form", f"{bound.function.name}: its text has numbers of the batch: {form.name}"
            )
        told = samples(made).get(BATCH, 0), samples(again).get(BATCH, 0)
        if told[0] * COUNTS[1] != told[1] * COUNTS[0] or told[0] % COUNTS[0]:
            raise Unsupported(
                "invariant:form", f"{bound.function.name}: samples are no axis of {form.name}"
            )
        found.append(BatchForm(str(form), {BATCH: told[0] // COUNTS[0] * count} if told[0] else {}))
    return found


def _texts(bound: BoundCall) -> list[str]:
    return [step.text for step in (bound.forward, *bound.backward)]


def _with_samples(bound: BoundCall, held: Sequence[str], count: int) -> BoundCall:
    """The call with so many samples in these operands."""
    given = [
        torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta")
        for m in (
            resized(name, bound.memory[name], count) if name in held else bound.memory[name]
            for name in bound.operands
        )
    ]
    return bind(bound.function, bound.spread(given), bound.numbers, bound.wanted, any_size=True)


def resized(name: str, memory: TensorMemory, count: int) -> TensorMemory:
    """A dense tensor of so many samples, with its dims in the order in memory; of one sample with samples
    outermost. Raises Unsupported for one with gaps."""
    shape, strides = memory.shape, memory.strides
    alone = shape[0] == 1  # torch says any stride of a dim of one
    order = sorted(range(len(shape)), key=lambda d: (alone and d != 0, -strides[d], -shape[d], d))

    def dense(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(prod(sizes[d] for d in order[order.index(at) + 1 :]) for at in range(len(sizes)))

    if any(n > 1 and own != of for n, own, of in zip(shape, strides, dense(shape), strict=True)):
        raise Unsupported(
            "invariant:layout", f"{name} has gaps between its elements; expected a dense tensor"
        )
    more = (count, *shape[1:])
    return TensorMemory(more, dense(more), memory.dtype)

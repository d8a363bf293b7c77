"""Rows as a user adds them from outside the package: an operation, an element type, a word, a pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from transconv import ir
from transconv.compute import Compute, Op
from transconv.ir import DType, Kernel
from transconv.passes import Context, Pass
from transconv.schedule import Schedule, Word
from transconv.target import Target

BOUNDED = Op(
    "bounded",
    1,
    lambda x: ir.minimum(ir.maximum(x, ir.Const(-2.0, x.dtype)), ir.Const(2.0, x.dtype)),
    "torch.clamp",
    options=(("min", -2.0), ("max", 2.0)),
    exact=True,
    activation=True,
    gradient="torch.ops.aten.hardtanh_backward.default",
    gradient_with=(-2.0, 2.0),
    derivative=lambda x: (
        ir.select(
            (x > ir.Const(-2.0, x.dtype)) & (x < ir.Const(2.0, x.dtype)),
            ir.Const(1.0, x.dtype),
            ir.Const(0.0, x.dtype),
        ),
    ),
    spelled=(f"{__name__}.Bounded",),
    onednn=(("clip", -2, 2),),
)


class Bounded(torch.nn.Module):
    """A module that stands for the row whose options it has."""

    min, max = -2.0, 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(self.min, self.max)


F8 = DType(
    "f8e5m2z",
    "float",
    8,
    "float16",
    "float8e5b16",
    "float8_e5m2fnuz",
    "fp8e5b16",
    3,
    operand=True,
    result=True,
)


def _refuses_many(schedule: Schedule, compute: Compute, target: Target) -> str | None:
    if int(schedule.word("note")) > schedule.stages:
        return f"note={schedule.word('note')}: at most one note a stage ({schedule.stages})"
    return None


def noted(kernel: Kernel, context: Context) -> Kernel:
    count = int(context.schedule.word("note"))
    return replace(kernel, notes=(*kernel.notes, *(f"note {n} of mine" for n in range(count))))


NOTE = Word(
    "note",
    0,
    "So many notes are written above the kernel.",
    range(4),
    why_not=_refuses_many,
    propose=lambda c, compute, target: [c.with_words(note=1)],
    price=lambda us, c, compute, target: us / 2,
)
NOTING = Pass("noting", "the notes of the schedule", noted, optional=False)

"""Plans of convolutions: launches on src, wei and dst, cleared blocked padding, torch's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transconv.conv.epilogue import Epilogue
from transconv.conv.problem.conv_problem import ConvProblem, Prop
from transconv.conv.workload import ConvWorkload
from transconv.ir import f32
from transconv.runtime import Plan

NAMES = ("src", "wei", "dst")


@dataclass(slots=True)
class CompiledDirection(Plan):
    """The plan of one direction of a problem."""

    workload: ConvWorkload
    order: tuple[int, ...] = ()  # of src, wei, dst as arguments, if the plan is one kernel of these alone

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        if self.required:
            return
        result = getattr(self.problem, self.prop.result).layout
        shape = self.problem.shapes[self.prop.result]
        self.padding = result.padding(shape) if result.extents != shape else []
        if self.padding:
            return
        if len(self.steps) == 1 and not self.workspaces and self.steps[0].zero is None and (
                all(p in NAMES for p in self.steps[0].params)):
            self.order = tuple(NAMES.index(p) for p in self.steps[0].params)

    @property
    def problem(self) -> ConvProblem:
        """The problem."""
        return self.workload.problem

    @property
    def prop(self) -> Prop:
        """The direction."""
        return self.workload.prop

    @property
    def epilogue(self) -> Epilogue:
        """The operations on the sum before it is stored."""
        return self.workload.epilogue

    @property
    def obeys(self) -> frozenset[str]:
        """The numeric settings of torch that affect this plan: ``deterministic`` if it uses atomic
        additions; ``precision`` if the matrix unit multiplies float32, or would with another setting. Only
        depthwise problems never use the matrix unit."""
        p = self.problem
        found = {"deterministic" for s in self.steps if s.schedule.reduce == "atomic"}
        if any(getattr(p, n).dtype is f32 for n in self.prop.operands) and (
                not p.g == p.ic == p.oc or any(s.schedule.unit == "mma" for s in self.steps)):
            found.add("precision")
        return frozenset(found)

    def starter(self, device: int, aligned: bool, names: tuple[str, ...] = NAMES,
                spaces: bool = False) -> Callable[..., None] | None:
        """As ``Plan.starter``; also None if padding must be cleared after the launches."""
        return None if self.padding else Plan.starter(self, device, aligned, names, spaces)

    def launch(self, src: Any, wei: Any, dst: Any, **extra: Any) -> None:  # type: ignore[override]
        """Run on torch tensors that match the problem; the direction's result is written in place. Raises
        TensorError for tensors that do not match.

        ``extra``: ``bia`` and ``res``, if the epilogue reads them. Launches go to the current stream.
        Split sums and packed operands take workspaces from torch's allocator during the call. A plan with
        boxes needs tensors that begin at multiples of 16 bytes (``plan(..., aligned=True)``).
        """
        tensors = {"src": src, "wei": wei, "dst": dst, **extra}
        self.check(tensors)
        if self.order and not extra:
            given = (src, wei, dst)
            self.steps[0].launcher.start([given[i] for i in self.order])
            return
        self.run(tensors)
        if self.padding:
            self._clear_padding(tensors[self.prop.result])

    def _clear_padding(self, result: Any) -> None:
        """Store zeros where blocks reach beyond the result's shape, as oneDNN requires."""
        layout = getattr(self.problem, self.prop.result).layout
        blocks = result.as_strided([b.size for b in layout.blocks], [b.stride for b in layout.blocks],
                                   result.storage_offset() + layout.offset)
        for box in self.padding:
            blocks[box].zero_()

"""What the compiler hands out: the launches that compute one direction of one problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transconv import allocator
from transconv.algorithm import Algorithm
from transconv.backend_triton.launch import Launcher
from transconv.config import Config
from transconv.epilogue import Epilogue
from transconv.ir import Kernel, Tensor
from transconv.problem import ConvProblem, Prop
from transconv.target import Target


def torch_type(tensor: Tensor) -> Any:
    """torch's name for the elements of a workspace."""
    import torch

    return {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32,
            "f64": torch.float64}[tensor.dtype.name]


@dataclass(slots=True)
class Step:
    """One launch of a plan: a kernel, its text, and the config that shaped it."""

    algorithm: Algorithm
    config: Config
    kernel: Kernel
    source: str
    path: Path | None
    launcher: Launcher
    params: tuple[str, ...]
    digest: str  # under which its verdict is kept
    zero: Tensor | None = None  # cleared before the launch


@dataclass(slots=True)
class Compiled:
    """A plan: the launches that compute one direction of one problem. ``fixed``: the caller gave
    the config; ``rejected``: better configs that were passed over, their kernels being wrong; ``why``:
    what spoke for the config, in a sentence."""

    problem: ConvProblem
    prop: Prop
    target: Target
    config: Config
    epilogue: Epilogue
    steps: tuple[Step, ...]
    workspaces: dict[str, Tensor] = field(default_factory=dict)
    fixed: bool = False
    rejected: int = 0
    why: str = ""
    order: tuple[int, ...] = ()  # of src, wei, dst, if the plan is one kernel of these and no more

    def __post_init__(self) -> None:
        names = ("src", "wei", "dst")
        if len(self.steps) == 1 and not self.workspaces and self.steps[0].zero is None and (
                all(p in names for p in self.steps[0].params)):
            self.order = tuple(names.index(p) for p in self.steps[0].params)

    def starter(self, device: int, aligned: bool,
                names: tuple[str, ...] = ("src", "wei", "dst")) -> Callable[..., None] | None:
        """A function of the tensors ``names`` that starts the plan with nothing left to decide.

        None before the first launch on the device with tensors so ``aligned``. The caller sees to it
        that the device is the current one.
        """
        known = (*names, *self.workspaces)
        steps: list[tuple[Callable[..., None], int | None]] = []
        for step in self.steps:
            begin = None
            if all(p in known for p in step.params):
                begin = step.launcher.starter(device, aligned,
                                              tuple(known.index(p) for p in step.params))
            if begin is None:
                return None
            steps.append((begin, known.index(step.zero.name) if step.zero else None))
        if not steps:
            return None
        if len(steps) == 1 and not self.workspaces and steps[0][1] is None:
            return steps[0][0]
        spaces = [((spec.layout.span,), torch_type(spec)) for spec in self.workspaces.values()]
        empty = allocator.quickest()

        def run(*given: Any) -> None:
            for shape, dtype in spaces:
                given = (*given, empty(shape, (1,), dtype))
            for begin, zero in steps:
                if zero is not None:
                    given[zero].zero_()
                begin(*given)

        return run

    @property
    def obeys(self) -> frozenset[str]:
        """Which of torch's numeric switches matter to these launches: ``deterministic`` if the order of
        an addition is open, ``precision`` if the matrix unit multiplies float32, or would if the
        switch stood otherwise: only depthwise problems never have work for it."""
        p = self.problem
        found = {"deterministic" for s in self.steps if s.config.reduce == "atomic"}
        if any(getattr(p, n).dtype.name == "f32" for n in self.prop.operands) and (
                not p.g == p.ic == p.oc or any(s.config.unit == "mma" for s in self.steps)):
            found.add("precision")
        return frozenset(found)

    @property
    def source(self) -> str:
        return "\n\n".join(s.source for s in self.steps)

    def launch(self, src: Any, wei: Any, dst: Any, **extra: Any) -> None:
        """Run on torch tensors that match the problem; the direction's result is written in place.

        ``bia`` and ``res`` are what the epilogue reads. Launches go to the current stream; a split
        sum and the copies of packed operands take workspaces from torch's allocator for the time of
        the call. A plan with boxes needs tensors that begin at multiples of 16 bytes
        (``plan(..., aligned=True)``).
        """
        if self.order and not extra:
            given = (src, wei, dst)
            self.steps[0].launcher([given[i] for i in self.order])
            return
        tensors = {"src": src, "wei": wei, "dst": dst, **extra}
        for name, spec in self.workspaces.items():
            tensors[name] = src.new_empty(spec.layout.span, dtype=torch_type(spec))
        for step in self.steps:
            if step.zero is not None:
                tensors[step.zero.name].zero_()
            step.launcher([tensors[name] for name in step.params])

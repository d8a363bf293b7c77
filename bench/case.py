"""One direction of one problem on this machine: its plan, its tensors, and what is right.

Everything here runs inside worker processes; problems travel as text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from bench.data import GUARD, OPERANDS, RESULT, Guarded, allocate, fill, torch_dtype
from bench.oracle import PIECE, Judgement, after, judge, pieces
from transconv import trust
from transconv.compiler import Compiled, plan
from transconv.epilogue import Epilogue
from transconv.problem import ConvProblem, Prop
from transconv.target import Target, detect


def device() -> str:
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    return "cpu" if detect().backend == "interpreter" else "cuda"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def weight(p: ConvProblem) -> float:
    """An upper estimate of the GPU memory that a check needs, in bytes."""
    image = p.ic * prod(p.i) + p.oc * prod(p.o)
    piece = min(p.mb * image, max(PIECE, image))
    # Filling takes several times the tensors, comparing six f64 copies of a piece.
    return 10.0 * p.bytes_moved() + 6 * 8 * piece + 2**29


def epilogue_tensors(p: ConvProblem, prop: Prop, epilogue: str, mode: str,
                     where: str) -> dict[str, torch.Tensor]:
    """What an epilogue reads: ``bia`` per channel of the result, ``res`` like the result."""
    words, result = epilogue.split("+"), RESULT[prop]
    spec, shape = getattr(p, result), p.shapes[result]
    made = {}

    def values(like: torch.Tensor) -> torch.Tensor:
        if mode == "exact":
            return like.copy_(torch.randint(-8, 9, like.shape, device=where))
        return like.copy_(torch.randn(like.shape, device=where))

    if "bias" in words:
        made["bia"] = values(torch.empty(shape[1], dtype=torch_dtype(spec.dtype), device=where))
    if "res" in words:
        strides = spec.layout.strides()
        made["res"] = values(torch.empty_strided(shape, strides, dtype=torch_dtype(spec.dtype),
                                                 device=where))
    return made


@dataclass(slots=True)
class Case:
    """A problem with its tensors; plans for other configs share them."""

    problem: ConvProblem
    prop: Prop
    epilogue: str = ""
    where: str = field(default_factory=device)
    tensors: dict[str, Guarded] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    answer: torch.Tensor | None = None  # to the exact data, once `same` has asked for it

    @property
    def target(self) -> Target:
        return detect()

    def plan(self, config: str = "") -> Compiled:
        """Raises ConfigError or Unsupported, which are refusals, not failures."""
        return plan(self.problem, self.prop, self.target, config or None,
                    Epilogue.parse(self.epilogue))

    def proven(self, config: str = "", seed: int = 9) -> Compiled:
        """The plan that a user gets: one that gave a right result (see transconv.trust). A given
        config is taken as it is. Raises ConfigError or Unsupported."""
        compiled = self.plan(config)
        if config or trust.is_trusted(compiled):
            return compiled
        self.fill("float", seed)
        return trust.run(compiled, {n: t.view for n, t in self.tensors.items()} | self.extra)

    def fill(self, mode: str, seed: int = 0) -> None:
        if not self.tensors:
            self.tensors = allocate(self.problem, self.where)
        fill(self.tensors, self.problem, self.prop, mode, seed)
        self.extra = epilogue_tensors(self.problem, self.prop, self.epilogue, mode, self.where)

    def launch(self, compiled: Compiled) -> None:
        views = {name: t.view for name, t in self.tensors.items()}
        compiled.launch(**views, **self.extra)

    def judge(self, compiled: Compiled, mode: str, seed: int = 0) -> Judgement:
        """Run on fresh data and compare; guard bands must come out untouched."""
        self.fill(mode, seed)
        self.launch(compiled)
        synchronize()
        a, b = (self.tensors[n].view for n in OPERANDS[self.prop])
        result = self.tensors[RESULT[self.prop]]
        found = judge(self.problem, self.prop, a, b, result.view, mode, self.epilogue, self.extra)
        if not all(t.intact() for t in self.tensors.values()):
            found.reason = "; ".join(filter(None, [found.reason, "wrote outside the result"]))
        return found

    def same(self, compiled: Compiled) -> Judgement:
        """``judge`` on exact data for one config of many: data and answer are kept."""
        result = RESULT[self.prop]
        if self.answer is None:
            self.fill("exact")
            a, b = (self.tensors[n].view for n in OPERANDS[self.prop])
            found = [after(want, at, self.epilogue, self.extra)
                     for at, want in pieces(self.problem, self.prop, a, b)]
            kept = torch.empty_like(self.tensors[result].view)
            self.answer = kept if not found else kept.copy_(torch.cat(found))
        self.tensors[result].poison()
        self.launch(compiled)
        synchronize()
        got = self.tensors[result].view
        wrong = int((got != self.answer).sum())
        told = Judgement(max_err=float("nan") if wrong else 0.0)
        if wrong:
            told.reason = f"{wrong} elements are wrong"
        if not all(t.intact() for t in self.tensors.values()):
            told.reason = "; ".join(filter(None, [told.reason, "wrote outside the result"]))
        return told

    def release(self) -> None:
        """Give the tensors back."""
        self.tensors, self.extra, self.answer = {}, {}, None


def warm(compiled: Compiled) -> float:
    """Compile a plan's kernels into Triton's cache without launching them; returns seconds.

    The kernels are specialised as for tensors at addresses that are multiples of 16, which is what
    tensors without memory (of torch's ``meta`` device) look like to Triton.
    """
    from transconv.backend_triton.launch import describe
    from transconv.backend_triton.module import load

    start = time.perf_counter()
    for step in compiled.steps:
        launcher = step.launcher
        if not launcher.grid:
            continue
        function = load(launcher.source, launcher.function, launcher.path)
        args: list[Any] = [torch.empty(1, dtype=torch_dtype(t.dtype), device="meta")
                           for t in step.kernel.params]
        if launcher.boxes:
            args = [t if box is None else describe(t, *box)
                    for t, box in zip(args, launcher.boxes, strict=True)]
        function.warmup(*args, grid=(1,), num_warps=launcher.warps, num_stages=launcher.stages)
    return time.perf_counter() - start


assert GUARD * 2 % 256 == 0  # results stay as aligned as torch's allocator makes them

"""What a process of ``python -m bench integrations`` does: a model of another package as one side runs it.

Seconds of the first call, milliseconds of later ones, peak memory beside what the model holds, and how far
results are from those of f32 (of training: the loss after some steps, which all sides begin alike).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import transconv
from bench.graph_measures import in_full, of_report, timed
from bench.integration_models import SUBJECTS, Subject, Tensor
from bench.network_measures import relative
from bench.network_setting import TIMING, gpu
from bench.waves import take
from transconv.integrations.compiled_forward import compile_forward, compiled_forward

Row = dict[str, Any]
SIDES = ("eager", "inductor", "channels_last", "transconv")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
FEWEST, MOST, SECONDS = 5, 30, 4.0  # calls that are timed
STEPS = 5  # of training, whose last loss is kept

_held: dict[str, Run] = {}


def work(
    step: str, model: str, side: str, device: str, small: bool, share: tuple[int, int] = (0, 1)
) -> Row:
    """``prepare`` or ``time``, the last thing that a process does."""
    take(step, share)
    name = f"{model} {side}"
    if step == "prepare":
        if device == "cpu":  # only results are compared there
            transconv.config.cpu = "interpret"
        _held[name] = Run(SUBJECTS[model], side, device, small)
        return _held[name].prepared()
    with gpu(TIMING, exclusive=True):
        return _held[name].milliseconds() | {"fatal": True}


class Run:
    """A model as one side computes it."""

    def __init__(self, subject: Subject, side: str, device: str, small: bool) -> None:
        self.subject, self.side, self.device = subject, side, torch.device(device)
        self.narrow = torch.float32 if device == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        with self.device:
            self.model = subject.build(small)
            self.given = subject.given(small)
        self.row: Row = {}
        if subject.trains:
            self.model.train()
            self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-2, 0.99, nesterov=True)
            self.scaler = torch.amp.GradScaler(self.device.type, enabled=device != "cpu")
        else:
            self.infer()
        self.compile()

    def infer(self) -> None:
        """Keep the results of f32, and go on in a narrow type."""
        self.model.eval().requires_grad_(False)
        with in_full(), torch.no_grad():
            self.want = self.subject.call(copy.deepcopy(self.model), *self.given).float().cpu()
        self.model.to(self.narrow)
        self.given = tuple(t.to(self.narrow) if t.is_floating_point() else t for t in self.given)

    def compile(self) -> None:
        """Exchange the forwards of the parts, in place, or leave them. ``channels_last``: what diffusers'
        and timm's own pages advise, torch's compiler and weights that lie so."""
        for part in self.subject.parts(self.model):
            if self.side == "transconv":
                compile_forward(part)
            elif self.side != "eager":
                part.forward = torch.compile(part.forward)
            for weight in part.parameters() if self.side == "channels_last" else ():
                if weight.dim() in FORMATS:
                    weight.data = weight.data.contiguous(memory_format=FORMATS[weight.dim()])

    def call(self) -> Tensor:
        """A call, or a step of training and its loss."""
        if self.subject.trains:
            return self.step()
        with torch.no_grad():
            made: Tensor = self.subject.call(self.model, *self.given)
        return made

    def step(self) -> Tensor:
        """As nnU-Net's trainer has it, with a loss that looks at all results."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.float16, enabled=self.device.type != "cpu"):
            results = self.subject.call(self.model, *self.given)
            each = [
                torch.nn.functional.cross_entropy(y.float(), (self.given[0].mean() > y[:, 0]).long())
                for y in results
            ]
            loss = torch.stack([x / 2**n for n, x in enumerate(each)]).sum()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 12)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def prepared(self) -> Row:
        """All that is not a time of warm calls."""
        began = time.perf_counter()
        made = self.call()
        self.wait()
        self.row["first_s"] = time.perf_counter() - began
        if self.subject.trains:
            self.row["loss"] = float([made, *(self.call() for _ in range(STEPS - 1))][-1])
        else:
            self.row["rmse"] = relative(made.float().cpu(), self.want.double())
        if self.side == "transconv":
            self.row |= self.reported()
        return self.row

    def reported(self) -> Row:
        """What became of the graphs of all parts that were called."""
        forwards = [compiled_forward(part) for part in self.subject.parts(self.model)]
        rows = [of_report(transconv.graph.report(f.compiled)) for f in forwards if f and f.compiled]
        return {
            "ours": sum(r["ours"] for r in rows),
            "regions": sum(r["regions"] for r in rows),
            "note": "; ".join(r["note"] for r in rows)[:400],
        }

    def milliseconds(self) -> Row:
        call: Callable[[], object] = self.call
        for _ in range(2):
            call()
        self.row["held_MB"] = self.memory("memory_allocated")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        until = time.perf_counter() + (SECONDS if self.device.type == "cuda" else 0.0)
        while len(times) < FEWEST or (len(times) < MOST and time.perf_counter() < until):
            times.append(timed(call, self.device)[0])
        peak = self.memory("max_memory_allocated")
        return {"ms": median(times), "peak_MB": peak, "held_MB": self.row["held_MB"]}

    def memory(self, what: str) -> float:
        return getattr(torch.cuda, what)() / 1e6 if self.device.type == "cuda" else 0.0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

"""The timing helper of examples/gallery: a demonstration as torch, torch's compiler and transconv
compute it.

A script has one ``Demonstration``, and ``show(DEMONSTRATION)`` as its program: times of the three sides
and how far their results are from those of f32. ``python -m bench gallery`` runs all scripts in processes
of their own.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import transconv
from bench.environment import at_hand
from bench.graph_measures import in_full, of_report, timed
from bench.waves import take

Tensor = torch.Tensor
Row = dict[str, Any]
SIDES = ("eager", "compile", "ours")
FEWEST, MOST, SECONDS, LONGEST = 5, 30, 2.0, 8.0  # calls that are timed, of each side, and how long
FOLDER = "examples.gallery"
FLAT = 0.01  # of the largest gradient: smaller ones are held against that (a bias before a norm has none)

_held: dict[str, Trial] = {}


@dataclass(frozen=True)
class Demonstration:
    """``build(small)``: a model; ``given(small)``: the inputs of each of its calls, one after another;
    ``small``: tiny, for a CPU. ``thread``: where it is reported; ``reported``: what. ``trains``: a call is
    a forward and a backward pass; ``dynamic``: compiled for any size; ``convert``: what makes ours of a
    copy of the model, with the inputs, before it is compiled."""

    thread: str
    reported: str
    build: Callable[[bool], nn.Module]
    given: Callable[[bool], Sequence[tuple[Tensor, ...]]]
    trains: bool = False
    dynamic: bool | None = None
    convert: Callable[[nn.Module, Sequence[tuple[Tensor, ...]]], object] | None = None


def read(name: str) -> Demonstration:
    """That of a script. ``name``: the file's, without its end."""
    found: Demonstration = importlib.import_module(f"{FOLDER}.{name}").DEMONSTRATION
    return found


def work(step: str, name: str, device: str, small: bool, share: tuple[int, int] = (0, 1)) -> Row:
    """``prepare``: all first calls, and differences; ``time``: milliseconds, the last thing that a
    process does."""
    take(step, share)
    if step == "prepare":
        _held[name] = Trial(read(name), device, small)
        return _held[name].prepared()
    return _held[name].times() | {"fatal": True}


class Trial:
    """The three sides of a demonstration on a device."""

    def __init__(self, shown: Demonstration, device: str, small: bool) -> None:
        self.shown, self.device = shown, torch.device(device)
        if device == "cpu":  # only results are compared there
            transconv.config.cpu = "interpret"
        narrow = torch.float32 if device == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        with self.device:
            self.full = shown.build(small).train(shown.trains)
            self.calls = list(shown.given(small))
        self.exact = self.calls
        model = copy.deepcopy(self.full).to(narrow)
        self.calls = [
            tuple(t.to(narrow) if t.is_floating_point() else t for t in given) for given in self.calls
        ]
        if not shown.trains:
            model.requires_grad_(False)
        self.models: dict[str, Any] = {"eager": model}
        self.models["compile"] = torch.compile(copy.deepcopy(model), dynamic=shown.dynamic)
        ours = copy.deepcopy(model)
        if shown.convert is not None:
            shown.convert(ours, self.calls)
        self.models["ours"] = torch.compile(ours, backend="transconv", dynamic=shown.dynamic)

    def call(self, model: Any, calls: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """The results of all calls; of training also the gradients of the model's parameters."""
        if not self.shown.trains:
            with torch.no_grad():
                return [model(*given) for given in calls]
        made = []
        for given in calls:
            model.zero_grad(set_to_none=True)
            y = model(*given)
            y.float().square().mean().backward()
            made += [y.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]
        return made

    def prepared(self) -> Row:
        """Seconds of first calls, and the largest difference from f32 as a share of the largest element
        of each result or gradient."""
        with in_full():
            want = [t.double().cpu() for t in self.call(self.full, self.exact)]
        del self.full
        each = len(want) // len(self.calls)  # a call's result, and gradients behind it
        tops = [max(float(b.abs().max()), 1e-30) for b in want]
        least = FLAT * max((top for at, top in enumerate(tops) if at % each), default=0.0)
        tops = [max(top, least) if at % each else top for at, top in enumerate(tops)]
        row: Row = {}
        for side in SIDES:
            if side == "compile" and self.device.type == "cpu":
                continue  # torch's compiler needs one of C++ there, and nothing is timed
            began = time.perf_counter()
            with in_full() if self.device.type == "cpu" else nullcontext():  # f32 there, not tf32
                made = self.call(self.models[side], self.calls)
            self.wait()
            row[f"{side}_first_s"] = time.perf_counter() - began
            row[f"{side}_difference"] = max(
                float((a.double().cpu() - b).abs().max()) / top
                for a, b, top in zip(made, want, tops, strict=True)
            )
        found = of_report(transconv.graph.report(self.models["ours"]))
        return row | {"kernels": found["ours"], "regions": found["regions"]}

    def times(self) -> Row:
        """Milliseconds of the calls by each side, the median."""
        row: Row = {}
        for side in SIDES:
            model, each = self.models[side], list[float]()

            def call(model: Any = model) -> object:
                return self.call(model, self.calls)

            if side == "compile" and self.device.type == "cpu":
                continue
            began = time.perf_counter()
            call()
            while not each or (self.device.type == "cuda" and _goes_on(len(each), began)):
                each.append(timed(call, self.device)[0])
            row[f"{side}_ms"] = median(each)
        return row

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _goes_on(calls: int, began: float) -> bool:
    """Whether more calls are timed. ``began``: when the first one was."""
    took = time.perf_counter() - began
    return calls < MOST and took < (SECONDS if calls >= FEWEST else LONGEST)


def show(shown: Demonstration) -> None:
    """The program of a script: a line for each side. ``--small``: tiny, as a CPU has it anyway."""
    parser = argparse.ArgumentParser(description=shown.reported)
    parser.add_argument("--small", action="store_true", help="a few features")
    options, device = parser.parse_args(), at_hand()
    trial = Trial(shown, device, options.small or device == "cpu")
    row = trial.prepared() | (trial.times() if device != "cpu" else {})
    print(f"{shown.thread}\n    {shown.reported}")
    for side in SIDES:
        if f"{side}_difference" in row:
            ms = f"{row[f'{side}_ms']:9.3f} ms" if f"{side}_ms" in row else "not timed on a CPU"
            print(f"{side:8} {ms}  difference from f32 {row[f'{side}_difference']:.1e}")
    print(f"{row['kernels']} kernels of ours, {row['regions']} regions of torch")

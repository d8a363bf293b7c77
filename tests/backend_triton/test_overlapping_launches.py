"""Launches that overlap: a kernel accesses memory only after the kernels before it have ended."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.starts import start_of
from transconv.backend_triton.launch.bound_start import KernelStart
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.backend_triton.offline_compilation import CompileFailure, compile_offline
from transconv.conv import CompiledDirection, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.runtime import job_of
from transconv.target.records import TARGETS

KERNEL = SimpleNamespace(function="function", packed_metadata="packed", name="f")

EARLY = TARGETS["sm_90"]
LATE = replace(EARLY, features=EARLY.features - {"early"})
MEMORY = re.compile(r"(ld|st|red|atom|cp)\.[\w.:]*global|cp\.async\.bulk")
PLANS = [
    ("mb2ic64ih8oc64oh8kh3ph1 dt=f16 tag=nhwc", Prop.FWD, ""),
    ("mb2ic64ih8oc64oh8kh3ph1 dt=f16 tag=nhwc", Prop.BWD_W, "split_k=2"),  # explicit, and its sum
    ("mb2ic64ih8oc64oh8kh3ph1 dt=f16", Prop.FWD, ""),  # copies first
    ("g32mb2ic32ih8oc32oh8kh3ph1 dt=f32 tag=nhwc", Prop.BWD_D, ""),
    ("mb2ic3ih9oc8oh5kh3sh2ph1 dt=bf16", Prop.FWD, ""),
]


def planned(text: str, prop: Prop, words: str, target: Any = EARLY) -> CompiledDirection:
    p = ConvProblem.parse(text)
    schedule = f"ic:64 oc:64 oh:8 ow:8 | mma | a=box b=box via=gluon stages=2 {words}" if words else None
    return compiler.plan(p, prop, target, schedule)


@pytest.mark.every(6)
@pytest.mark.parametrize(("text", "prop", "words"), PLANS)
def test_the_wait_is_before_every_access(text: str, prop: Prop, words: str) -> None:
    plan = planned(text, prop, words)
    made = compile_offline([job_of(s, EARLY, "ptx", words=False) for s in plan.steps])
    for step, answer in zip(plan.steps, made, strict=True):
        assert not isinstance(answer, CompileFailure), answer
        entry = answer.texts["ptx"].partition(".entry")[2]
        wait, go = entry.find("griddepcontrol.wait;"), entry.find("griddepcontrol.launch_dependents;")
        first = MEMORY.search(entry)
        assert first is not None and 0 < wait < first.start(), step.source
        ours = step.schedule.split_k > 1 or step.does == "pack"  # what it writes the next kernel reads
        assert wait < go < first.start() if ours else go == -1, step.source


def test_explicit_kernels_lay_out_barriers_meanwhile() -> None:
    source = planned(*PLANS[1]).steps[0].source
    assert source.index("mbarrier.init") < source.index("gdc_wait()") < source.index("gl.warp_specialize")


@pytest.mark.parametrize(("text", "prop", "words"), PLANS)
def test_only_the_feature_changes_the_text(text: str, prop: Prop, words: str) -> None:
    with_it, without = (planned(text, prop, words, t) for t in (EARLY, LATE))
    for a, b in zip(with_it.steps, without.steps, strict=True):
        left = [x for x in a.source.splitlines() if "gdc_" not in x]
        assert left == b.source.splitlines() and "gdc_" not in b.source
        assert (a.triton.early, b.triton.early) == (True, False)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 2), (3, 0, 1, 2), (4, 3, 2, 1, 0)])
@pytest.mark.parametrize("early", [False, True])
def test_kept_kernels_are_started_early(
    monkeypatch: pytest.MonkeyPatch, early: bool, order: tuple[int, ...]
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    calls: list[tuple[Any, ...]] = []
    kernel = TritonKernel("", "f", None, 12, 4, 2, early=early)
    kernel.kept[0, True] = KernelStart(lambda *a: calls.append(a), KERNEL, early)
    begin = start_of(kernel, order, count=5)
    assert begin is not None
    begin(*(torch.zeros(4) for _ in range(5)))
    grid, _, _, _, _, cooperative, given, *_ = calls[0]
    assert (grid, cooperative, given) == (12, False, early)

"""Sums in loops whose rows exchange elements are refused; the GPU says which these are."""

from __future__ import annotations

import pytest
import torch

from transconv.backend_triton.launch import triton_kernel
from transconv.backend_triton.miscompiles import Blocked, reorders
from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.compute import parse
from transconv.runtime import Plan, build_compute, job_of
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS
from transconv.verify.computation import ComputationCase

ROWS = (
    "compute rows ;; sizes M=700 in 1..4096, K=40 in 1..4096 ;; tensor X f32 [{x}] ;; "
    "tensor C f32 [M] ;; axes m=M k=K ;; read x = X[{at}] ;; let s = {op}(x; k) ;; store C[m] = s"
)
ACROSS, ALONG = {"x": "K, M", "at": "k, m"}, {"x": "M, K", "at": "m, k"}
# A thread has elements of two rows in turn (the first two), of rows side by side, or of one row alone.
CASES = [
    (ROWS.format(**ACROSS, op="sum"), "m:64 k:8 | fma | stages=1 warps=1", True),
    (ROWS.format(**ACROSS, op="sum"), "m:256 k:4 | fma | stages=1 warps=2", True),
    (ROWS.format(**ALONG, op="sum"), "m:8 k:256 | fma | stages=1 warps=2", False),
    (ROWS.format(**ALONG, op="sum"), "m:64 k:4 | fma | stages=1 warps=1", False),
    (ROWS.format(**ACROSS, op="sum"), "m:32 k:8 | fma | stages=1 warps=1", False),
]


def planned(text: str, schedule: str) -> Plan:
    return build_compute(parse(text), TARGETS["sm_90"], Schedule.parse(schedule))


def test_sums_in_loops() -> None:
    chip = TARGETS["sm_90"]
    found = compile_offline(
        [job_of(s, chip, words=False) for text, said, _ in CASES for s in planned(text, said).steps]
    )
    for answer, (_, said, wrong) in zip(found, CASES, strict=True):
        assert isinstance(answer, Resources)
        assert ("takes elements of other rows" in answer.flaw) == wrong, said


def test_registers_of_a_thread() -> None:
    """Two rows of eight elements a thread: the rows move fastest in one layout, slowest in the other."""
    tile = Blocked((1, 1), (32, 1), (1, 1), (0, 1))
    assert tile.held((64, 8), 3)[:4] == [(3, 0), (35, 0), (3, 1), (35, 1)]
    wide = Blocked((1, 4), (1, 32), (2, 2), (1, 0))
    assert wide.held((2, 256), 33) == [(0, 132), (0, 133), (0, 134), (0, 135)]
    assert not reorders("") and not reorders(
        "tt.reshape %x allow_reorder : tensor<4xf32, #a> -> tensor<2x2xf32, #b>"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("text", "said", "wrong"), CASES)
def test_on_the_device(text: str, said: str, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is wrong there, and what is not is right."""
    monkeypatch.setattr(triton_kernel, "refuse", lambda *_: None)
    case = ComputationCase(parse(text).at(M=700, K=40))
    assert bool(case.launched(planned(text, said), "cuda").problem) == wrong

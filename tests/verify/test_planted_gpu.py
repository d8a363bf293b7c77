"""On a GPU: bisection tells errors of Triton's compiler from errors of transconv; here the text is
changed on its way to the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.verify import planted
from transconv.runtime import steps
from transconv.support import knobs
from transconv.target.records import detect
from transconv.verify.bisect.stage_search import blame

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or knobs.interpret(), reason="needs a GPU"),
]

ROLES = "mb:1 oh:8 ow:8 oc:64 ic:64 | a=box b=box via=gluon | stages=3 warps=4"
LARGE = "mb64ic64ih32oc64oh32kh3ph1 dt=f16 tag=axb"


def spoiled(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    honest = steps.emit

    def emit(*words: object) -> str:
        text = honest(*words)  # type: ignore[arg-type]
        assert change(text) != text
        return change(text)

    monkeypatch.setattr(steps, "emit", emit)


@pytest.mark.parametrize("schedule", [planted.GATHER, ""], ids=["gather", "chosen"])
def test_right_kernels(schedule: str) -> None:
    for text in (planted.PLAIN, LARGE):
        found = blame(text, "fwd", detect(), schedule)
        assert not found and found.verdict.startswith("right"), found.text


def test_a_kernel_that_is_compiled_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, lambda text: text.replace("acc = tl.dot(a, b, acc", "acc = tl.dot(a, b, acc * 2"))
    found = blame(planted.PLAIN, "fwd", detect(), planted.GATHER)
    assert found.stage == "compiler" and "emit        right" in found.text
    assert "Triton or ptxas" in found.verdict


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="explicit kernels are for sm_90",
)
def test_a_bug_in_the_gluon_emitter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not blame(LARGE, "fwd", detect(), ROLES)
    spoiled(monkeypatch, lambda text: text.replace(".to(gl.float16)", ".to(gl.float16) + 1"))
    found = blame(LARGE, "fwd", detect(), ROLES)
    assert found.stage == "compiler" and "the Gluon emitter" in found.verdict

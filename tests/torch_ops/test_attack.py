"""A share of the drawn calls of attack.py, and that a difference would be seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.torch_ops import attack
from tests.torch_ops.attack_around import ANY_STRIDES, AROUND
from tests.torch_ops.attack_subjects import SUBJECTS

CALLS = 6  # of each function; `make check-all` makes 300


@pytest.fixture(autouse=True)
def switches() -> Any:
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    attack.prepare(interpreted=False)
    yield
    torch.backends.cudnn.conv.fp32_precision = before  # type: ignore[attr-defined]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
@pytest.mark.filterwarnings("ignore")
def test_odd_calls_end_as_torchs_do(subject: attack.Subject) -> None:
    assert [f"{n}: {call}: {told}" for n, call, told in attack.attacked(subject, 0, 0, CALLS)] == []


def test_differences_are_seen_and_calls_can_be_repeated() -> None:
    conv = next(s for s in SUBJECTS if s.name == "conv2d")
    for planted in (
        lambda *a, **k: F.conv2d(*a, **k) * 1.1,
        lambda *a, **k: F.conv2d(*a, **k).double(),
        lambda *a, **k: F.conv2d(*a, **k).transpose(-1, -2),
        lambda *a, **k: None,
    ):
        assert len([*attack.attacked(replace(conv, ours=planted), 0, 0, 24)]) >= 3
    first, again = (str(attack.drawn(conv, 3, 5)) for _ in range(2))
    assert first == again != str(attack.drawn(conv, 3, 6))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.filterwarnings("ignore")
def test_a_difference_is_seen_whatever_is_around_the_call(around: str) -> None:
    x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 2, 2)
    call = attack.Call([x, w], {}, around)
    wanted = attack.outcome(F.conv2d, call)
    for planted in (lambda *a: F.conv2d(*a) * 1.1, lambda *a: F.conv2d(*a).half(), lambda *a: None):
        if around != "fake" or planted(x, w) is None or planted(x, w).dtype is not x.dtype:
            assert attack.difference(attack.outcome(planted, call), wanted)
    assert not isinstance(wanted, Exception) and not attack.difference(
        attack.outcome(transconv.conv2d, call), wanted, around not in ANY_STRIDES
    )


def test_the_drawing_reaches_every_kind_of_call() -> None:
    conv = next(s for s in SUBJECTS if s.name == "conv2d")
    calls = [attack.drawn(conv, 0, n) for n in range(300)]
    assert {c.around for c in calls} == set(AROUND)
    texts = " ".join(map(str, calls))
    for word in ("meta", " neg", " grad", "Parameter", "float16", "int64", "torch.sparse", "nan", "same"):
        assert word in texts, word

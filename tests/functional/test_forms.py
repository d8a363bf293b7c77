"""Calls of a known form: bound for other sizes without torch, to what a call of them is bound to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv import functional as ours
from transconv.functional.calls import call_forms, dispatch, symbolic_bind
from transconv.functional.calls.call_forms import SymbolicTrace, Untraced
from transconv.functional.calls.route import FunctionCall
from transconv.functional.calls.symbolic_bind import BoundCall

CASES: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, c: ours.softmax(x, -1),
    "log_softmax": lambda x, c: ours.log_softmax(x, 1),
    "normalize": lambda x, c: ours.normalize(x),
    "layer_norm": lambda x, c: ours.layer_norm(x, x.shape[-2:], x[0, 0].detach().contiguous()),
    "rms_norm": lambda x, c: ours.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x, c: ours.group_norm(x, 2, c, c),
    "instance_norm": lambda x, c: ours.instance_norm(x, None, None, c),
    "batch_norm": lambda x, c: ours.batch_norm(x, c.detach().clone(), c.detach().abs(), c, None, True),
    "inference": lambda x, c: ours.batch_norm(x, c.detach().clone(), c.detach().abs(), c, None),
    "sum": lambda x, c: ours.sum(x, (0, 2), True),
    "mean": lambda x, c: ours.mean(x),
    "var": lambda x, c: ours.var(x, 1),
    "logsumexp": lambda x, c: ours.logsumexp(x, 3),
    "max_pool2d": lambda x, c: ours.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x, c: ours.avg_pool2d(x, 2, 1, 1, count_include_pad=False),
    "cross_entropy": lambda x, c: ours.cross_entropy(
        x, torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.int64), reduction="none"
    ),
}


def plain(made: BoundCall) -> list[Any]:
    """All that a call is bound to, but for the texts of its sizes."""
    made = replace(
        made,
        forward=replace(made.forward, text=""),
        backward=tuple(replace(s, text="") for s in made.backward),
    )
    return [getattr(made, f.name) for f in fields(made)]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call was of a known form; such a one is bound in both ways. torch computes."""
    found: list[bool] = []

    def made(f: Any, tensors: Any, numbers: Any, wanted: Any) -> FunctionCall:
        form = call_forms.find(f, tensors, numbers, wanted)
        whole = symbolic_bind.bind(f, tensors, numbers, wanted, True)
        found.append(form is not None)
        if form is None:
            call_forms.note(whole, tensors, numbers, wanted)
        else:
            assert plain(form) == plain(whole)
            exact = form.exact()
            assert [s.text for s in (exact.forward, *exact.backward)] == [
                s.text for s in (whole.forward, *whole.backward)
            ]
        return FunctionCall(None, "test", f.name)

    monkeypatch.setattr(dispatch, "_made", made)
    call_forms._forms.clear()
    yield found
    call_forms._forms.clear()


@pytest.mark.every(6)
@pytest.mark.parametrize("name", CASES)
def test_drawn_sizes_are_bound_as_without_a_form(name: str, known: list[bool]) -> None:
    rng = random.Random(name)
    for at in range(12):
        ones = 0.3 * (at % 4 == 3)
        shape = [
            2 * rng.randint(1, 4) if d == 1 else 1 if rng.random() < ones else rng.randint(3, 9)
            for d in range(4)
        ]
        x = torch.randn(shape)
        if at % 3 == 2:
            x = x.contiguous(memory_format=torch.channels_last)
        if at % 5 == 4:
            x = x[:, :, :, 1:]  # gaps, but for a single column
        c = torch.randn(shape[1])
        if at % 2 and name not in ("layer_norm", "cross_entropy"):
            x, c = x.requires_grad_(), c.requires_grad_()
        if x.numel() == 0 or not all(x.shape):
            continue
        try:
            CASES[name](x, c)
        except (RuntimeError, ValueError):  # torch's, of a call that has no result
            continue
    assert sum(known) >= 3, known


def test_wrong_calls_of_known_forms_raise_what_torch_raises(known: list[bool]) -> None:
    x, c = torch.randn(4, 6, 5, 7), torch.randn(6)
    cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any, Any]] = {
        "layer_norm": (ours.layer_norm, F.layer_norm, (x, (7,), torch.ones(7)), (x, (7,), torch.ones(8))),
        "group_norm": (ours.group_norm, F.group_norm, (x, 2, c), (x[:, :5].contiguous(), 2, c[:5])),
        "features": (ours.group_norm, F.group_norm, (x, 2, c), (x, 2, torch.ones(4))),
        "batch_norm": (ours.batch_norm, F.batch_norm, (x, c, c), (x, torch.ones(5), torch.ones(5))),
        "max_pool2d": (ours.max_pool2d, F.max_pool2d, (x, 5), (x[:, :, :4].contiguous(), 5)),
        "cross_entropy": (
            ours.cross_entropy,
            F.cross_entropy,
            (x, torch.zeros(4, 5, 7, dtype=torch.int64)),
            (x, torch.zeros(4, 7, 5, dtype=torch.int64)),
        ),
    }
    for mine, theirs, good, bad in cases.values():
        mine(*good)
        with pytest.raises((RuntimeError, ValueError)) as error:
            theirs(*bad)
        with pytest.raises(error.type):
            mine(*bad)


def test_a_new_size_asks_torch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of sizes that are bound by a form are torch's, and its function is not called for them."""
    transconv.config.sizes = "any"
    call_forms._forms.clear()
    norm = lambda x, w: ours.layer_norm(x, x.shape[1:], w)  # noqa: E731
    norm(torch.randn(3, 8), torch.randn(8))
    monkeypatch.setattr(symbolic_bind, "_results", None)
    for shape in ((5, 7), (2, 9)):
        x, w = torch.randn(shape), torch.randn(shape[1])
        torch.testing.assert_close(norm(x, w), F.layer_norm(x, x.shape[1:], w))
    transconv.config.sizes = "exact"


def test_a_trace_notes_what_was_asked_and_refuses_what_it_cannot_follow() -> None:
    trace = SymbolicTrace()
    a, b = trace.numbers("n", (6, 4))
    made = {"size": (2 * a - b // 3) % 5, "same": a}
    assert a > b and -a < 0 and f"{b}" == "4" and not a - 6
    at = trace.function({"n": 2}, made)
    assert at((6, 4)) == {"size": (12 - 1) % 5, "same": 6} == made
    assert at((7, 4)) is None and at((6, 5)) is None  # a - 6 was 0, b is in a text
    for wrong in (lambda: a / 2, lambda: a**2, lambda: {a: 1}, lambda: a & 1, lambda: float(a)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(Untraced):
        divmod(a, b)

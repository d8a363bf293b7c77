"""Streams of models that hold what is no weight, write in place, or run in several threads: torch's
results, or a refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from tests.distributed.test_streams import Says
from transconv.errors import Unsupported

Tensor = torch.Tensor


class Holding(nn.Module):
    """A model that reads numbers from wherever a module may hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.named, self.said = [2.0], {"a": 3.0}, SimpleNamespace(k=4.0)
        self.none: Any = None
        self.inner = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.listed[0] + self.named["a"] * self.said.k
        return y if self.none is None else y * self.none


CHANGES: dict[str, Callable[[Holding], Any]] = {
    "an element of a list": lambda m: m.listed.__setitem__(0, 5.0),
    "an entry of a dict": lambda m: m.named.update(a=7.0),
    "an attribute of an object": lambda m: setattr(m.said, "k", 9.0),
    "nothing that becomes a number": lambda m: setattr(m, "none", 2.0),
    "a hook": lambda m: m.register_forward_hook(lambda _m, _args, y: y * 2),
    "a hook of a part": lambda m: m.inner.register_forward_hook(lambda _m, _args, y: y + 1),
    "another forward": lambda m: setattr(m, "forward", lambda x: x * 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stream_sees_what_changed_before_it_began(name: str) -> None:
    model, x = Holding(), torch.randn(1, 2, 7)
    s = transconv.streaming(model)
    s(x)
    CHANGES[name](model)
    s.reset()
    torch.testing.assert_close(torch.cat([s(part) for part in x.split(3, 2)], 2), model(x))


def _in_place(does: Callable[[Tensor, Tensor], Any], before: torch.dtype) -> nn.Module:
    def says(x: Tensor) -> Tensor:
        y = (x * 2).to(before)
        does(y, x)
        return y

    return Says(says)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda y, x: y.add_(x),
    "mul_": lambda y, x: y.mul_(x),
    "lt_": lambda y, x: y.lt_(1.0),
    "clamp_": lambda y, x: y.clamp_(-1, 1),
    "unsqueeze_": lambda y, x: y.unsqueeze_(0),
    "squeeze_": lambda y, x: y.squeeze_(0),
}


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_keeps_type_and_shape(name: str, before: torch.dtype) -> None:
    model, x = _in_place(WRITES[name], before), torch.randn(1, 2, 7)
    s = transconv.streaming(model)
    try:
        found = torch.cat([s(part) for part in x.split(3, 2)], -1)
    except Unsupported as error:
        assert "in place" in str(error)
        return
    torch.testing.assert_close(found, model(x))


class Counting(nn.Module):
    def __init__(self, part: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        target = self.calls[:1] if self.part else self.calls
        target += 1
        return x * self.calls.sum()


@pytest.mark.parametrize("part", [False, True])
def test_models_that_write_to_their_tensors_are_refused_and_unchanged(part: bool) -> None:
    model = Counting(part)
    with pytest.raises(Unsupported, match="writes to its tensor 'calls'"):
        transconv.streaming(model)(torch.randn(1, 2, 7))
    assert not model.calls.any()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("heads", [(1, 6), (2, 3)], ids=str)
def test_upsampling_of_rows_that_lie_behind_one_another(mode: str, heads: tuple[int, int]) -> None:
    model = Says(lambda x: F.interpolate(x.reshape(1, heads[0], -1), scale_factor=2, mode=mode))
    x = torch.randn(1, 6, 7)
    s = transconv.streaming(Says(lambda x: model(x).reshape(1, 6, -1)))
    torch.testing.assert_close(
        torch.cat([s(part) for part in x.split([1, 4, 2], 2)], 2), model(x).reshape(1, 6, -1)
    )


def test_other_threads_run_models_while_a_stream_is_planned() -> None:
    busy = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(50)))
    model, x, failed, ends = nn.Sequential(*(nn.ReLU() for _ in range(20))), torch.randn(1, 2, 7), [], []

    def run() -> None:
        try:
            while not ends:
                busy(x)
        except IndexError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        torch.testing.assert_close(transconv.streaming(model)(x), model(x))
    ends.append(True)
    thread.join()
    assert not failed

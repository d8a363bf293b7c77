"""Weights of frozen models in graphs: copied once, and never old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transconv
from tests.torch_ops.test_inference import PACKED, WRITES, integers
from transconv.backend_triton import TritonKernel
from transconv.errors import TensorError
from transconv.functional.calls import compiled_launch
from transconv.graph import backend
from transconv.runtime import launch as runtime_launch
from transconv.schedule import Schedule
from transconv.torch_ops.conversion import inference

Tensor = torch.Tensor
SCHEDULE = Schedule.parse(PACKED.replace("pack=a.b", "pack=b"))


class Layer(torch.nn.Conv2d):
    """A layer whose kernel has more than the convolution. The attribute is what writes are about."""

    def __init__(self) -> None:
        super().__init__(16, 16, (1, 2), padding=1)
        self.requires_grad_(False)
        self.weight.copy_(integers(16, 16, 1, 2))
        assert self.bias is not None
        self.bias.copy_(integers(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() + 1


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How often a weight was copied since it was last asked; plans copy it."""
    seen: list[str] = []
    launch, ready = TritonKernel.run, runtime_launch.ready

    def counted(self: TritonKernel, tensors: list[Any], *sizes: Any) -> None:
        seen.append(self.function)
        launch(self, tensors, *sizes)

    def found() -> int:
        made = sum("pack_X1" in name for name in seen)
        seen.clear()
        return made

    def packed(workload: Any, target: Any, _: Any, *rest: Any) -> Any:
        product = any(c.b is not None for c in workload.computations)
        return ready(workload, target, SCHEDULE if product else None, *rest)

    monkeypatch.setattr(runtime_launch, "ready", packed)
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")  # else every use of a copy makes one to compare
    monkeypatch.setattr(TritonKernel, "run", counted)
    compiled_launch._launches.clear()
    yield found
    compiled_launch._launches.clear()
    inference._Weight.named.clear()


def compiled(layer: torch.nn.Module) -> Callable[[Tensor], bool]:
    """Whether a call is right."""
    run = torch.compile(layer, backend=backend, options={"rest": "eager"})

    def right(x: Tensor) -> bool:
        with torch.no_grad():
            return torch.equal(run(x), layer(x))

    return right


def test_the_weight_is_copied_once(copies: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Layer(), integers(2, 16, 2, 3)
    right = compiled(layer)
    assert right(x) and right(x) and copies() == 2, "who does not ask for it has a copy at every call"
    with transconv.inference(layer) as handle:
        assert handle.bytes == 0 and right(x) and copies() == 2, "a launch, and the copy that stays"
        assert all(right(x) for _ in range(3)) and copies() == 0 and handle.bytes == 16 * 16 * 2 * 4
        layer.weight.mul_(2)
        assert right(x) and copies() == 2 and right(x) and copies() == 0
        monkeypatch.setattr(inference, "is_capturing", lambda device: True)
        assert right(x) and copies() == 1, "a capture copies inside"
        monkeypatch.undo()
    copies()
    assert right(x) and handle.bytes == 0


@pytest.mark.slow
def test_no_write_that_torch_counts_yields_old_numbers(copies: Callable[[], int]) -> None:
    """One write after the other, each to a weight whose copy was read."""
    layer, x = Layer(), integers(2, 16, 2, 3)
    handle, right = transconv.inference(layer), compiled(layer)
    for name, write in WRITES.items():
        assert right(x) and right(x), name
        copies()
        assert right(x) and copies() == 0, name
        write(layer)
        assert right(x) and right(x), name
        layer.requires_grad_(False)
        handle.refresh()


def test_writes_past_the_counter_are_seen_by_verification(
    copies: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSCONV_VERIFY", "1")
    layer, x = Layer(), integers(2, 16, 2, 3)
    handle, right = transconv.inference(layer), compiled(layer)
    assert right(x)
    layer.weight.data.mul_(2)
    with pytest.raises(TensorError, match=r"weight: the copy .* call refresh\(\)"):
        right(x)
    handle.refresh()
    assert right(x)


def test_a_weight_that_the_graph_writes_to(copies: Callable[[], int]) -> None:
    """The copy of what was there before the call is dropped."""

    class Writes(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.weight.mul_(-1)
            return y

    layer, other = Writes(), Writes()
    other.load_state_dict(layer.state_dict())
    transconv.inference(layer)
    run = torch.compile(layer, backend=backend, options={"rest": "eager"})
    x = integers(2, 16, 2, 3)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x), other(x)) and torch.equal(layer.weight, other.weight)

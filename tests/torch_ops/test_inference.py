"""Weights of frozen models are copied once, and copied again after a change. Launches are counted in
Triton's interpreter, in the process that test_interpreted.py starts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv.backend_triton import TritonKernel
from transconv.calls import route_cache
from transconv.errors import TensorError
from transconv.support import knobs
from transconv.torch_ops.conversion import inference

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
PACKED = "mb.oh.ow:16 oc:16 ic:16 | mma | a=gather b=gather | pack=a.b stages=3 warps=4"
TRANSPOSED = "mb.ih.iw:16 ic:16 oc:16 | mma | a=gather b=gather | pack=a.b stages=3 warps=4"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How often a weight was copied since it was last asked; plans copy it."""
    seen: list[str] = []
    launch = TritonKernel.run

    def counted(self: TritonKernel, tensors: list[Any], *sizes: Any) -> None:
        seen.append(self.function)
        launch(self, tensors, *sizes)

    def copies() -> int:
        found = sum("pack_wei" in name for name in seen)
        seen.clear()
        return found

    monkeypatch.setenv("TRANSCONV_SCHEDULE", PACKED)
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")  # else every use of a copy makes one to compare
    monkeypatch.setattr(TritonKernel, "run", counted)
    transconv.config.cpu = "interpret"
    transconv.config.fallback = "error"
    yield copies
    inference._Weight.named.clear()


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float()


def frozen_conv(**kwargs: Any) -> torch.nn.Conv2d:
    layer = transconv.nn.Conv2d(16, 16, (1, 2), padding=1, **kwargs).requires_grad_(False)
    layer.weight.copy_(integers(16, 16, 1, 2))
    if layer.bias is not None:
        layer.bias.copy_(integers(16))
    return layer


def right(layer: Any, x: torch.Tensor) -> bool:
    return torch.equal(layer(x), F.conv2d(x, layer.weight, layer.bias, padding=1))


@interpreted
@pytest.mark.parametrize("bias", [False, True])
def test_the_weight_is_copied_once(launched: Callable[[], int], bias: bool) -> None:
    layer, x = frozen_conv(bias=bias), integers(1, 16, 2, 3)
    for _ in range(3):
        assert right(layer, x)
    assert launched() >= 3
    with transconv.inference(layer) as handle:
        assert handle.bytes == 0
        assert all([right(layer, x) for _ in range(5)]) and launched() == 1
        assert right(layer, integers(1, 16, 2, 2)) and right(layer, integers(1, 16, 2, 2))
        launched()  # the first result of a new kind of call
        assert right(layer, integers(16, 2, 3)) and launched() == 0  # no batch
        assert handle.bytes == 16 * 16 * 2 * 4
        assert f"1 weights (2048 bytes), 1 of them copied once in another order ({handle.bytes} " in (
            str(handle)
        )
    assert right(layer, x) and launched() == 1 and handle.bytes == 0


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.weight.mul_(2),
    "in inference mode": lambda m: torch.inference_mode()(lambda: m.weight.mul_(2))(),
    "a view": lambda m: m.weight[0].zero_(),
    "detached": lambda m: m.weight.detach().add_(1),
    "foreach": lambda m: torch._foreach_add_([m.weight], 1),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "assigned by load_state_dict": lambda m: m.load_state_dict(
        {k: v + 1 for k, v in m.state_dict().items()}, assign=True
    ),
    "another parameter": lambda m: setattr(
        m, "weight", torch.nn.Parameter(m.weight + 1, requires_grad=False)
    ),
    "swapped": lambda m: setattr(m.weight, "data", m.weight.data + 1),
    "swapped twice": lambda m: [setattr(m.weight, "data", m.weight.data + 1) for _ in range(8)],
    "cast and back": lambda m: [m.half(), m.weight.mul_(2), m.float()],
    "set_": lambda m: m.weight.set_(torch.ones_like(m.weight)),
    "an optimizer": lambda m: _trained(m),
}


def _trained(layer: Any) -> None:
    layer.weight.requires_grad_()
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    layer(integers(1, 16, 2, 3)).sum().backward()
    optimizer.step()
    layer.weight.grad = None


@pytest.mark.every(4)
@interpreted
@pytest.mark.parametrize("write", WRITES)
def test_no_write_that_torch_counts_yields_old_numbers(write: str, launched: Callable[[], int]) -> None:
    layer, x = frozen_conv(), integers(1, 16, 2, 3)
    handle = transconv.inference(layer)
    assert right(layer, x) and right(layer, x)
    WRITES[write](layer)
    assert right(layer, x) and right(layer, x)
    layer.requires_grad_(False)
    handle.refresh()
    launched()
    assert right(layer, x) and right(layer, x) and right(layer, x) and launched() == 1


@interpreted
def test_weights_that_came_to_require_gradients_are_copied_at_every_call(
    launched: Callable[[], int],
) -> None:
    layer, x = frozen_conv(), integers(1, 16, 2, 3)
    handle = transconv.inference(layer)
    assert right(layer, x)
    layer.requires_grad_()
    launched()
    assert right(layer, x) and right(layer, x) and launched() == 2
    with pytest.raises(ValueError, match="the weight of '' requires a gradient"):
        handle.refresh()
    assert right(layer, x)


@interpreted
def test_writes_past_the_counter_need_refresh_and_are_seen_by_verification(
    launched: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = frozen_conv(), integers(1, 16, 2, 3)
    handle = transconv.inference(layer)
    assert right(layer, x)
    layer.weight.data.mul_(2)
    handle.refresh()
    assert right(layer, x)
    monkeypatch.setenv("TRANSCONV_VERIFY", "1")
    handle.refresh()
    assert right(layer, x)
    layer.weight.data.mul_(2)
    with pytest.raises(TensorError, match=r"weight: the copy .* call refresh\(\)"):
        layer(x)
    handle.refresh()
    assert right(layer, x)


@interpreted
def test_copies_of_the_model_know_nothing_of_it(launched: Callable[[], int]) -> None:
    layer, x = frozen_conv(), integers(1, 16, 2, 3)
    keys = set(layer.state_dict())
    transconv.inference(layer)
    assert right(layer, x) and set(layer.state_dict()) == keys and not list(layer.buffers())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        other.weight.mul_(2)
        assert right(other, x) and right(layer, x)
    held = len(inference._Weight.named)
    del layer
    assert len(inference._Weight.named) == held - 1  # and its copies are freed


@pytest.mark.slow
@interpreted
def test_fused_transposed_and_compiled_calls_too(
    launched: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = integers(1, 16, 2, 3)
    model = torch.nn.Sequential(frozen_conv(), torch.nn.ReLU()).eval()
    fused = transconv.fold(model)
    transconv.inference(fused)
    assert torch.equal(fused(x), model(x))
    launched()
    for _ in range(3):
        assert torch.equal(fused(x), F.conv2d(x, model[0].weight, model[0].bias, padding=1).relu())
    assert launched() == 0
    layer = frozen_conv()
    transconv.inference(layer)
    assert right(layer, x)
    launched()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), layer(x)) and launched() == 0
        layer.weight.mul_(2)
        assert torch.equal(compiled(x), layer(x)) and right(layer, x)
    launched()
    monkeypatch.setenv("TRANSCONV_SCHEDULE", TRANSPOSED)
    deconv = transconv.nn.ConvTranspose2d(16, 16, (1, 2)).requires_grad_(False)
    deconv.weight.copy_(integers(16, 16, 1, 2))
    deconv.bias.copy_(integers(16))
    transconv.inference(deconv)
    for _ in range(4):
        assert torch.equal(deconv(x), F.conv_transpose2d(x, deconv.weight, deconv.bias))
    assert launched() == 1


@interpreted
def test_a_capture_copies_inside_of_the_graph(
    launched: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = frozen_conv(), integers(1, 16, 2, 3)
    transconv.inference(layer)
    assert right(layer, x) and right(layer, x)
    launched()
    monkeypatch.setattr(inference, "is_capturing", lambda device: True)
    assert right(layer, x) and launched() == 1


@interpreted
def test_threads_share_a_copy(launched: Callable[[], int]) -> None:
    layer = frozen_conv()
    transconv.inference(layer)
    xs = [integers(1, 16, 2, 3) for _ in range(12)]
    wanted = [F.conv2d(x, layer.weight, layer.bias, padding=1) for x in xs]
    assert right(layer, xs[0])
    launched()
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(layer, xs), wanted))
    assert launched() == 0


def test_what_cannot_be_watched_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.LazyConv2d(4, 1))
    with pytest.raises(ValueError, match="the weight of '0' requires a gradient, expected a frozen"):
        transconv.inference(model)
    model[0].requires_grad_(False)
    torch.nn.utils.parametrizations.weight_norm(model[0])
    with torch.inference_mode():
        model.append(torch.nn.Conv2d(3, 4, 1).requires_grad_(False))
    found = transconv.inference(model)
    assert found.skipped == {
        "0": "its weight is computed at every call",
        "1": "it has no weight before its first call",
        "2": "its weight was made under torch.inference_mode, where torch counts no writes",
    }
    assert str(found).startswith("0 weights (0 bytes), 0 of them copied")
    assert "computed at every call" in str(found)
    route_cache.forget()

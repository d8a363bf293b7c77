"""transconv.nn: modules that behave as torch's and compute with transconv's kernels."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv

NAMES = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")


def pair(name: str, *args: object, **kwargs: object) -> tuple[torch.nn.Module, torch.nn.Module]:
    theirs = getattr(torch.nn, name)(*args, **kwargs)
    ours = getattr(transconv.nn, name)(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


@pytest.mark.parametrize("name", NAMES)
def test_state_repr_and_results(name: str) -> None:
    ours, theirs = pair(name, 4, 6, 3, stride=2, padding=1, groups=2)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 4, *[7] * int(name[-2]))
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x[0]), theirs(x[0]))
    assert transconv.stats().total >= 2


@pytest.mark.parametrize("name", NAMES)
def test_pickle_deepcopy_and_save(name: str) -> None:
    ours, _ = pair(name, 4, 6, 3)
    x = torch.randn(2, 4, *[7] * int(name[-2]))
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(stored, weights_only=False),
    ):
        assert type(other) is type(ours)
        assert torch.equal(other(x), ours(x))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, (1, 0), "same"])
def test_padding_modes(mode: str, padding: object) -> None:
    ours, theirs = pair("Conv2d", 4, 6, 3, padding=padding, padding_mode=mode)
    x = torch.randn(2, 4, 6, 7)
    assert torch.equal(ours(x), theirs(x))


def test_output_size() -> None:
    ours, theirs = pair("ConvTranspose2d", 4, 6, 3, stride=3)
    x = torch.randn(2, 4, 5, 5)
    for size in ([15, 16], [2, 6, 17, 15]):
        assert torch.equal(ours(x, output_size=size), theirs(x, output_size=size))
    with pytest.raises(ValueError, match="requested an output size"):
        ours(x, output_size=[99, 99])


def test_transposed_padding_modes_are_refused_as_by_torch() -> None:
    ours, theirs = pair("ConvTranspose2d", 4, 6, 3)
    for module in (ours, theirs):
        module.padding_mode = "reflect"
        with pytest.raises(ValueError, match="Only `zeros` padding mode is supported"):
            module(torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize("name", NAMES)
def test_lazy_modules_become_ours(name: str) -> None:
    lazy = getattr(transconv.nn, f"Lazy{name}")(6, 3)
    theirs = getattr(torch.nn, f"Lazy{name}")(6, 3)
    assert repr(lazy) == repr(theirs)
    x = torch.randn(2, 4, *[7] * int(name[-2]))
    before = transconv.stats().total
    lazy(x)
    assert transconv.stats().total == before + 1  # the very first call is ours too
    theirs(x)
    assert type(lazy) is getattr(transconv.nn, name)
    theirs.load_state_dict(lazy.state_dict())
    assert torch.equal(lazy(x), theirs(x))


def test_parametrized_and_normed_weights() -> None:
    x = torch.randn(2, 4, 6, 6)
    for wrap in (
        torch.nn.utils.parametrizations.weight_norm,
        torch.nn.utils.parametrizations.spectral_norm,
    ):
        ours = wrap(pair("Conv2d", 4, 6, 3)[0]).eval()
        wanted = torch.nn.functional.conv2d(x, ours.weight, ours.bias)
        torch.testing.assert_close(ours(x), wanted)


def test_data_parallel_meta_and_device_arguments() -> None:
    module = transconv.nn.Conv2d(4, 6, 3, device="meta", dtype=torch.bfloat16)
    x = torch.empty(2, 4, 6, 6, device="meta", dtype=torch.bfloat16)
    assert module(x).shape == (2, 6, 4, 4)
    module = module.to_empty(device="cpu")
    assert module(torch.randn(2, 4, 6, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_training_loop_follows_torchs() -> None:
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))
    losses: list[list[float]] = []
    for kind in (torch.nn, transconv.nn):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            kind.Conv2d(3, 8, 3, padding=1),
            torch.nn.ReLU(),
            kind.Conv2d(8, 8, 3, stride=2, groups=4),
            kind.ConvTranspose2d(8, 4, 2, stride=2),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("dilation", [1, 2, (3, 1)])
def test_output_size_counts_the_dilation(dilation: Any) -> None:
    theirs = torch.nn.ConvTranspose2d(2, 3, (3, 2), 2, 1, dilation=dilation)
    ours = transconv.nn.ConvTranspose2d(2, 3, (3, 2), 2, 1, dilation=dilation)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 2, 5, 6)
    plain = theirs(x).shape[2:]
    for more in (0, 1):
        size = [n + more for n in plain]
        assert list(ours(x, size).shape[2:]) == size
        torch.testing.assert_close(ours(x, size), theirs(x, size))
    with pytest.raises(ValueError, match="requested an output size"):
        ours(x, [n - 1 for n in plain])


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_fused_module_is_made_with_its_activation(dims: int) -> None:
    made = getattr(transconv.nn, f"FusedConv{dims}d")(4, 6, 3, padding=1, activation="silu")
    x, residual = torch.randn(2, 4, *[5] * dims), torch.randn(2, 6, *[5] * dims)
    plain = getattr(F, f"conv{dims}d")(x, made.weight, made.bias, padding=1)
    torch.testing.assert_close(made(x, residual), F.silu(plain + residual), rtol=1e-3, atol=1e-3)
    assert repr(made).endswith("padding=" + repr((1,) * dims) + ", activation=silu)")
    assert copy.deepcopy(made).activation == "silu"
    none = type(made)(4, 6, 3, padding=1)
    none.load_state_dict(made.state_dict())
    torch.testing.assert_close(none(x), plain, rtol=1e-3, atol=1e-3)
    with pytest.raises(RuntimeError, match="activation 'soft' is unknown; expected one of: relu, "):
        type(made)(4, 6, 3, activation="soft")

"""Patch embeddings and autoencoders of model servers: by stand-ins with their published signatures, and by
their own files."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from tests.integrations import server_signatures
from transconv.integrations import model_servers
from transconv.integrations.compiled_forward import compiled_forward, restore_forward

OWN = (pytest.mark.integrations, pytest.mark.slow)
SERVERS = [
    (server_signatures.vllm, model_servers.register_vllm),
    (server_signatures.sglang, model_servers.register_sglang),
    pytest.param(server_signatures.own_vllm, model_servers.register_vllm, marks=OWN),
    pytest.param(server_signatures.own_sglang, model_servers.register_sglang, marks=OWN),
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No module of a server, made up or its own, is left behind."""
    yield
    for name in [n for n in sys.modules if n.split(".")[0] in server_signatures.LAYERS]:
        del sys.modules[name]


@pytest.mark.parametrize(("server", "register"), SERVERS)
def test_layers_compute_by_kernels(
    server: Callable[..., Any], register: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = server(monkeypatch)
    server_signatures.registered(register)
    torch.manual_seed(0)
    two = layers.Conv2dLayer(3, 5, 4, stride=4)
    three = layers.Conv3dLayer(3, 6, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False)
    for parameter in (*two.parameters(), *three.parameters()):
        nn.init.normal_(parameter)
    x, y = torch.randn(2, 3, 8, 12), torch.randn(1, 3, 4, 8, 8)
    with torch.no_grad():
        found = two(x), three(y)
        want = F.conv2d(x, two.weight, two.bias, 4), F.conv3d(y, three.weight, None, (2, 4, 4))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert transconv.stats().native["fwd"] == 2 and not transconv.stats().fallback
    assert set(two.state_dict()) == {"weight", "bias"} and set(three.state_dict()) == {"weight"}


@pytest.mark.integrations
@pytest.mark.slow
@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_signatures_are_the_servers_own(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    getattr(server_signatures, f"own_{server}")(monkeypatch)
    for module, paths in server_signatures.SIGNATURES.items():
        if not module.startswith(server):
            continue
        for path in paths:
            found = inspect.signature(pkgutil.resolve_name(f"{module}:{path}"))
            told = server_signatures.signature(module, path)
            assert said(found) == said(told), path


def said(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; of enumerations the values."""
    each = signature.parameters.values()
    return [(p.name, p.kind, getattr(p.default, "value", p.default)) for p in each]


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server_signatures.vllm(monkeypatch)
    assert [c.__name__ for c in model_servers.register_vllm()] == [
        "TransconvConv2dLayer",
        "TransconvConv3dLayer",
    ]
    assert model_servers.register_vllm() == []
    with pytest.raises(TypeError, match="has no forward_cuda"):
        model_servers.layer_class(nn.Conv2d)


@pytest.mark.slow
def test_an_autoencoder_becomes_graphs() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.decoder = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
    model.requires_grad_(False)
    z = torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        want = model.decoder(z)
        assert model_servers.accelerate_autoencoder(model) == ["decoder"]
        torch.testing.assert_close(model.decoder(z), want, rtol=1e-3, atol=1e-3)
    made = compiled_forward(model.decoder)
    assert made is not None and made.compiled is not None
    assert transconv.graph.report(made.compiled).graphs
    restore_forward(model.decoder)
    assert model_servers.accelerate_autoencoder(nn.Conv2d(1, 1, 1)) == [""]

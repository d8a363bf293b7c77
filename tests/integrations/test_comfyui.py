"""The folder of nodes, loaded by its path as ComfyUI does it, with stand-ins for its VAE and ModelPatcher
that have the public methods which the nodes call."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transconv

FOLDER = Path(__file__).parents[2] / "transconv" / "integrations" / "comfyui"


class ModelPatcher:
    """ComfyUI's, as far as objects go: copies share the model, and patches hold while it is loaded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.object_patches: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}

    def clone(self) -> ModelPatcher:
        made = ModelPatcher(self.model)
        made.object_patches = self.object_patches.copy()
        return made

    def get_model_object(self, name: str) -> Any:
        return self.object_patches.get(name) or self.place(name)[2]

    def add_object_patch(self, name: str, obj: Any) -> None:
        self.object_patches[name] = obj

    def place(self, name: str) -> tuple[Any, str, Any]:
        at: Any = self.model
        *owners, last = name.split(".")
        for owner in owners:
            at = getattr(at, owner)
        return at, last, getattr(at, last)

    def patch_model(self) -> nn.Module:
        for name, obj in self.object_patches.items():
            owner, last, before = self.place(name)
            setattr(owner, last, obj)
            self.object_patches_backup.setdefault(name, before)
        return self.model

    def unpatch_model(self) -> None:
        for name, before in self.object_patches_backup.items():
            setattr(*self.place(name)[:2], before)
        self.object_patches_backup.clear()


class Autoencoder(nn.Module):
    """As ``first_stage_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 3, 2, 1))
        self.quant_conv = nn.Conv2d(4, 4, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 3, 3, padding=1)
        )

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.decoder(z)
        return made


class VAE:
    def __init__(self) -> None:
        self.first_stage_model = Autoencoder().eval()

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first_stage_model.decode(samples).movedim(1, -1)
        return made


@pytest.fixture
def nodes() -> Iterator[Any]:
    name = f"{FOLDER}".replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    yield made
    del sys.modules[name]


def executed(nodes: Any, name: str, **inputs: Any) -> Any:
    """What a node makes, called as ComfyUI's executor calls it."""
    kind = nodes.NODE_CLASS_MAPPINGS[name]
    assert set(kind.INPUT_TYPES()["required"]) == {*inputs} and isinstance(kind.CATEGORY, str)
    made = getattr(kind(), kind.FUNCTION)(**inputs)
    assert len(made) == len(kind.RETURN_TYPES)
    return made[0]


def test_their_layout(nodes: Any) -> None:
    assert {*nodes.NODE_CLASS_MAPPINGS} == {*nodes.NODE_DISPLAY_NAME_MAPPINGS}
    said = (FOLDER / "pyproject.toml").read_text()
    assert "[tool.comfy]" in said and "PublisherId" in said


def test_a_vae(nodes: Any) -> None:
    vae, z = VAE(), torch.randn(1, 4, 6, 6)
    with torch.inference_mode():
        want = vae.decode(z)
        made = executed(nodes, "TransconvVAE", vae=vae, enabled=True)
        torch.testing.assert_close(made.decode(z), want, rtol=1e-3, atol=1e-3)
        assert transconv.stats(reset=True).native["graph"]
        made = executed(nodes, "TransconvVAE", vae=made, enabled=False)
        torch.testing.assert_close(made.decode(z), want, rtol=0, atol=0)
    assert not transconv.stats().total and "forward" not in vars(vae.first_stage_model.decoder)


def test_a_model(nodes: Any) -> None:
    """The copy is patched while it is loaded; the model it was made of is not."""
    model = nn.Module()
    model.diffusion_model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU()).eval()
    first, x = ModelPatcher(model), torch.randn(1, 4, 6, 6)
    made = executed(nodes, "TransconvModel", model=first)
    assert made is not first and not first.object_patches
    with torch.inference_mode():
        want = model.diffusion_model(x)
        torch.testing.assert_close(made.patch_model().diffusion_model(x), want, rtol=1e-3, atol=1e-3)
        assert transconv.stats(reset=True).native["graph"]
        model.diffusion_model[0].weight.mul_(2)  # a LoRA that is merged meanwhile
        own = model.diffusion_model(x)
        made.unpatch_model()
        torch.testing.assert_close(own, model.diffusion_model(x), rtol=1e-3, atol=1e-3)
    assert not (own - want).abs().max() < 0.1

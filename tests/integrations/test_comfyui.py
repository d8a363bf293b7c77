"""The folder of nodes, loaded by its path as ComfyUI does it, with stand-ins for its VAE and ModelPatcher
that have the public methods which the nodes call. ``COMFYUI``: a checkout to compare signatures with."""

from __future__ import annotations

import ast
import importlib.util
import os
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
    """ComfyUI's, as far as objects go, with its signatures at a125cd84: copies share the model and what
    patches replaced, and patches hold while it is loaded."""

    def __init__(
        self,
        model: nn.Module,
        load_device: Any,
        offload_device: Any,
        size: int = 0,
        weight_inplace_update: bool = False,
    ) -> None:
        self.model = model
        self.object_patches: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}

    def clone(self) -> ModelPatcher:
        made = ModelPatcher(self.model, None, None)
        made.object_patches = self.object_patches.copy()
        made.object_patches_backup = self.object_patches_backup
        return made

    def get_model_object(self, name: str) -> Any:
        known = self.object_patches_backup | self.object_patches
        return known[name] if name in known else place(self.model, name)[2]

    def add_object_patch(self, name: str, obj: Any) -> None:
        self.object_patches[name] = obj

    def patch_model(
        self,
        device_to: Any = None,
        lowvram_model_memory: int = 0,
        load_weights: bool = True,
        force_patch_weights: bool = False,
    ) -> nn.Module:
        for name, obj in self.object_patches.items():
            owner, last, before = place(self.model, name)
            setattr(owner, last, obj)
            self.object_patches_backup.setdefault(name, before)
        return self.model

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        for name, before in self.object_patches_backup.items():
            setattr(*place(self.model, name)[:2], before)
        self.object_patches_backup.clear()


def place(model: nn.Module, name: str) -> tuple[Any, str, Any]:
    at: Any = model
    *owners, last = name.split(".")
    for owner in owners:
        at = getattr(at, owner)
    return at, last, getattr(at, last)


def signatures(file: Path) -> dict[str, str]:
    """The arguments of ModelPatcher's methods in a file, without their types."""
    kinds = [n for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
    (kind,) = [k for k in kinds if k.name == "ModelPatcher"]
    methods = [f for f in kind.body if isinstance(f, ast.FunctionDef)]
    for argument in [a for f in methods for a in f.args.args]:
        argument.annotation = None
    return {f.name: ast.unparse(f.args) for f in methods}


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


@pytest.mark.skipif("COMFYUI" not in os.environ, reason="no checkout of ComfyUI")
def test_signatures_are_their_own() -> None:
    theirs = signatures(Path(os.environ["COMFYUI"]) / "comfy" / "model_patcher.py")
    assert signatures(Path(__file__)).items() <= theirs.items()


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
    first, x = ModelPatcher(model, None, None), torch.randn(1, 4, 6, 6)
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

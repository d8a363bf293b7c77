"""diffusers' own pipelines, before and after ``accelerate``: the same images, made by kernels of ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
from tests.integrations import diffusers_pipelines as pipelines

pytestmark = [pytest.mark.integrations, pytest.mark.slow]
# Of images from 0 to 1. f32 is multiplied in tf32 by no interpreter, so sums differ in their order alone.
NEAR = {"rtol": 0.0, "atol": 2e-3}


def accelerate(pipe: Any, **named: Any) -> Any:
    from transconv.integrations import diffusers

    return diffusers.accelerate(pipe, rest="eager", verbose=False, **named)


def left(accelerated: Any) -> list[str]:
    """Regions of torch in the graphs that ran, but for attention, which is torch's by intent."""
    graphs = [g for r in accelerated.report().values() for g in r.graphs]
    assert graphs and any(g.kernels for g in graphs)
    told = [row.title for g in graphs for row in g.rows if row not in g.kernels]
    return [title for title in told if not title.startswith("_scaled_dot_product_")]


def test_a_pipeline_of_images(tmp_path: Path) -> None:
    pipe = pipelines.image_pipeline(tmp_path)
    want = pipelines.image(pipe)
    keys = [*pipe.unet.state_dict()], [*pipe.vae.state_dict()]
    classes = [type(m) for m in pipe.unet.modules()]
    made = accelerate(pipe)
    assert list(made.compiled) == ["vae.encoder", "vae.decoder", "unet"] and not made.left
    torch.testing.assert_close(pipelines.image(pipe), want, **NEAR)
    assert list(made.report()) == ["vae.decoder", "unet"] and not left(made)
    seen = transconv.stats(reset=True)
    assert seen.native["graph"] and seen.native["fwd"] and not seen.fallback

    assert ([*pipe.unet.state_dict()], [*pipe.vae.state_dict()]) == keys
    pipe.save_pretrained(tmp_path / "saved")
    again = type(pipe).from_pretrained(tmp_path / "saved", safety_checker=None)
    again.set_progress_bar_config(disable=True)
    torch.testing.assert_close(pipelines.image(again), want, **NEAR)
    twin = copy.deepcopy(pipe.vae)
    assert twin.decoder.forward.module is twin.decoder

    made.undo()
    transconv.stats(reset=True)
    torch.testing.assert_close(pipelines.image(pipe), want, rtol=0, atol=0)
    assert not transconv.stats().total and [type(m) for m in pipe.unet.modules()] == classes


def test_tiles_and_slices(tmp_path: Path) -> None:
    vae = pipelines.image_autoencoder()
    vae.enable_tiling()
    vae.enable_slicing()
    z = torch.randn(2, 4, 10, 8)  # tiles of two sizes
    with torch.no_grad():
        want = vae.decode(z).sample
        made = accelerate(vae)
        torch.testing.assert_close(vae.decode(z).sample, want, **NEAR)
        assert len(made.report()["AutoencoderKL.decoder"].graphs) >= 2 and not left(made)
        x = torch.randn(1, 3, 16, 16)
        own = vae.encode(x).latent_dist.mean
        made.undo()
        torch.testing.assert_close(own, vae.encode(x).latent_dist.mean, **NEAR)


def test_a_pipeline_of_videos() -> None:
    """The decoder is called for each frame, with caches that it writes to; of the transformer the patches'
    convolution is ours."""
    pipe = pipelines.video_pipeline()
    want = pipelines.video(pipe)
    made = accelerate(pipe)
    assert list(made.compiled) == ["vae.encoder", "vae.decoder"]
    assert made.converted["transformer"].converted == ("patch_embedding",)
    torch.testing.assert_close(pipelines.video(pipe), want, **NEAR)
    assert not left(made) and not transconv.stats().fallback


@pytest.mark.parametrize("first", ["accelerated", "offloaded"])
def test_models_that_are_offloaded(first: str) -> None:
    """accelerate's hook moves a whole model before its call; the order of the two does not matter."""
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    vae = pipelines.image_autoencoder()
    unet = pipelines.unet()
    given = torch.randn(1, 4, 8, 8), 3, torch.randn(1, 2, 8)
    with torch.no_grad():
        want = unet(*given).sample, vae.decode(given[0]).sample
        made = [accelerate(m) for m in (unet, vae)] if first == "accelerated" else []
        for model in (unet, vae):
            cpu_offload_with_hook(model, torch.device("cpu"))
        made = made or [accelerate(m) for m in (unet, vae)]
        own = unet(*given).sample, vae.decode(given[0]).sample
        torch.testing.assert_close(own, want, **NEAR)
        assert not any(map(left, made)) and transconv.stats().native["graph"]
        for model, done in zip((unet, vae), made, strict=True):
            done.undo()
            remove_hook_from_module(model)
        transconv.stats(reset=True)
        assert unet(*given).sample.shape == want[0].shape and not transconv.stats().total


def test_layers_that_are_offloaded_one_by_one() -> None:
    from accelerate import cpu_offload

    unet = pipelines.unet()
    given = torch.randn(1, 4, 8, 8), 3, torch.randn(1, 2, 8)
    with torch.no_grad():
        want = unet(*given).sample
        cpu_offload(unet, torch.device("cpu"))
        made = accelerate(unet)
        assert "one by one" in made.left["UNet2DConditionModel"] and not made.compiled
        torch.testing.assert_close(unet(*given).sample, want, **NEAR)
    assert transconv.stats().native["fwd"] and not transconv.stats().fallback


@pytest.mark.parametrize("first", ["accelerated", "adapted"])
def test_adapters(first: str, tmp_path: Path) -> None:
    """A LoRA of linear layers and convolutions that is loaded before or after; then scaled, and taken
    out."""
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    source = pipelines.unet()
    torch.manual_seed(6)
    source.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "conv1"]))
    weights = convert_state_dict_to_diffusers(get_peft_model_state_dict(source))
    plain, pipe = (pipelines.image_pipeline(tmp_path) for _ in range(2))
    before = pipelines.image(plain, 1)
    for each in (plain, pipe):
        if each is pipe and first == "accelerated":
            made = accelerate(pipe)
            torch.testing.assert_close(pipelines.image(pipe, 1), before, **NEAR)
        each.load_lora_weights({f"unet.{name}": w for name, w in weights.items()}, adapter_name="one")
    made = accelerate(pipe) if first == "adapted" else made
    want = pipelines.image(plain, 1)
    assert (want - before).abs().max() > 0.01
    torch.testing.assert_close(pipelines.image(pipe, 1), want, **NEAR)
    for each in (plain, pipe):
        each.set_adapters(["one"], adapter_weights=[0.5])
    torch.testing.assert_close(pipelines.image(pipe, 1), pipelines.image(plain, 1), **NEAR)
    pipe.unload_lora_weights()
    torch.testing.assert_close(pipelines.image(pipe, 1), before, **NEAR)
    assert transconv.stats().native["graph"] and not transconv.stats().fallback
    made.undo()
    torch.testing.assert_close(pipelines.image(pipe, 1), before, rtol=0, atol=0)

"""diffusers' own pipeline classes, with models of a few features and random weights, and a tokenizer of
letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

BLOCK = {"norm_num_groups": 4, "layers_per_block": 1}
TEXT = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 54,
    "max_position_embeddings": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def image_autoencoder() -> Any:
    """As SDXL's and FLUX's: 2 levels."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        sample_size=16,
        **BLOCK,
    ).eval()


def video_autoencoder() -> Any:
    """As Wan's, whose decoder is called for each frame with caches of the ones before."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=2,
        scale_factor_spatial=2,
    ).eval()


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(1)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
        **BLOCK,
    ).eval()


def image_pipeline(folder: Path) -> Any:
    """Stable Diffusion's."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(2)
    pipe = StableDiffusionPipeline(
        vae=image_autoencoder(),
        text_encoder=CLIPTextModel(CLIPTextConfig(**TEXT)).eval(),
        tokenizer=CLIPTokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt", model_max_length=8),
        unet=unet(),
        scheduler=DDIMScheduler(num_train_timesteps=10, steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any, steps: int = 2) -> torch.Tensor:
    """What a pipeline of images makes, with values from 0 to 1."""
    made = pipe(
        "a b",
        height=16,
        width=16,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
    )
    found: torch.Tensor = made.images
    return found


def video_pipeline() -> Any:
    """Wan's, without its encoder of texts: embeddings are given."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(4)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=8,
    )
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=video_autoencoder(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer.eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def video(pipe: Any) -> torch.Tensor:
    """Five frames."""
    torch.manual_seed(5)
    one, other = torch.randn(2, 1, 4, 8).unbind()
    made = pipe(
        prompt_embeds=one,
        negative_prompt_embeds=other,
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=1,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
    )
    found: torch.Tensor = made.frames
    return found

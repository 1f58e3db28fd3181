"""Diffusion transformers of the package diffusers: the loss is the mean squared error of the predicted noise."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.other_models.heads import Regression, build, made


def sample(output: Any) -> Tensor:
    return output.sample


Denoiser = partial(Regression, output=sample)
HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
SMALL: dict[str, Any] = {**HEADS, "num_layers": 2, "sample_size": 8}
GUIDED: dict[str, Any] = {
    **SMALL,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": 24,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 24,
    "pos_embed_max_size": 8,
    "qk_norm": "rms_norm",
}


class Pixart(nn.Module):
    """Latents and a caption, without the conditions on the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"out_channels": 4, "cross_attention_dim": 64, "caption_channels": 24}
        self.net = made("diffusers:PixArtTransformer2DModel", **SMALL, **sizes, use_additional_conditions=False)

    def forward(self, noisy: Tensor, caption: Tensor, timestep: Tensor, target: Tensor) -> Tensor:
        conditions = {"resolution": None, "aspect_ratio": None}
        return F.mse_loss(self.net(noisy, caption, timestep=timestep, added_cond_kwargs=conditions).sample, target)


class Flux(nn.Module):
    """Packed latents, ids of their places, and text: as the training scripts of FLUX call it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (4, 4, 8)}
        text = {"joint_attention_dim": 24, "pooled_projection_dim": 24}
        self.net = made("diffusers:FluxTransformer2DModel", **HEADS, **sizes, **text)

    def forward(self, noisy: Tensor, text: Tensor, pooled: Tensor, timestep: Tensor, target: Tensor) -> Tensor:
        side = int(noisy.shape[1] ** 0.5)
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
        img_ids = F.pad(places, (1, 0)).to(noisy.dtype)
        txt_ids = torch.zeros(text.shape[1], 3, dtype=noisy.dtype)
        predicted = self.net(noisy, text, pooled, timestep, img_ids, txt_ids, return_dict=False)[0]
        return ((predicted - target) ** 2).mean()


dit = build(Denoiser, "diffusers:DiTTransformer2DModel", **SMALL, in_channels=4, num_embeds_ada_norm=12)
pixart = Pixart
sd3 = build(Denoiser, "diffusers:SD3Transformer2DModel", **GUIDED)
sd35 = build(Denoiser, "diffusers:SD3Transformer2DModel", **GUIDED, dual_attention_layers=(0, 1, 2))
flux = Flux
auraflow = build(
    Denoiser,
    "diffusers:AuraFlowTransformer2DModel",
    **HEADS,
    sample_size=8,
    in_channels=4,
    num_mmdit_layers=2,
    num_single_dit_layers=2,
    joint_attention_dim=24,
    caption_projection_dim=64,
    out_channels=4,
    pos_embed_max_size=16,
)
sana = build(
    Denoiser,
    "diffusers:SanaTransformer2DModel",
    **SMALL,
    in_channels=4,
    out_channels=4,
    num_cross_attention_heads=4,
    cross_attention_head_dim=16,
    cross_attention_dim=64,
    caption_channels=24,
)
cogvideox = build(
    Denoiser,
    "diffusers:CogVideoXTransformer3DModel",
    **HEADS,
    in_channels=4,
    out_channels=4,
    time_embed_dim=24,
    text_embed_dim=24,
    num_layers=2,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    max_text_seq_length=6,
)

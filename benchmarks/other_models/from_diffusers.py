"""Diffusion transformers of the package diffusers: the loss is the mean squared error of the predicted noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.other_models.heads import Regression


def sample(output: object) -> Tensor:
    return output.sample  # type: ignore[attr-defined]


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return Regression(
        DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=12,
        ),
        sample,
    )


def pixart() -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    net = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=64,
        sample_size=8,
        caption_channels=24,
        use_additional_conditions=False,
    )

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, noisy: Tensor, caption: Tensor, timestep: Tensor, target: Tensor) -> Tensor:
            conditions = {"resolution": None, "aspect_ratio": None}
            return F.mse_loss(self.net(noisy, caption, timestep=timestep, added_cond_kwargs=conditions).sample, target)

    return Conditioned()


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return Regression(
        SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=24,
            caption_projection_dim=64,
            pooled_projection_dim=24,
            out_channels=4,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
        ),
        sample,
    )


def sd35() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return Regression(
        SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=24,
            caption_projection_dim=64,
            pooled_projection_dim=24,
            out_channels=4,
            pos_embed_max_size=8,
            dual_attention_layers=(0, 1, 2),
            qk_norm="rms_norm",
        ),
        sample,
    )


class Flux(nn.Module):
    """Packed latents, ids of their places, and text: as the training scripts of FLUX call it."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import FluxTransformer2DModel

        self.net = FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=24,
            pooled_projection_dim=24,
            axes_dims_rope=(4, 4, 8),
        )

    def forward(self, noisy: Tensor, text: Tensor, pooled: Tensor, timestep: Tensor, target: Tensor) -> Tensor:
        side = int(noisy.shape[1] ** 0.5)
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
        img_ids = F.pad(places, (1, 0)).to(noisy.dtype)
        txt_ids = torch.zeros(text.shape[1], 3, dtype=noisy.dtype)
        predicted = self.net(noisy, text, pooled, timestep, img_ids, txt_ids, return_dict=False)[0]
        return ((predicted - target) ** 2).mean()


def flux() -> nn.Module:
    return Flux()


def auraflow() -> nn.Module:
    from diffusers import AuraFlowTransformer2DModel

    return Regression(
        AuraFlowTransformer2DModel(
            sample_size=8,
            in_channels=4,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=24,
            caption_projection_dim=64,
            out_channels=4,
            pos_embed_max_size=16,
        ),
        sample,
    )


def sana() -> nn.Module:
    from diffusers import SanaTransformer2DModel

    return Regression(
        SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=2,
            num_cross_attention_heads=4,
            cross_attention_head_dim=16,
            cross_attention_dim=64,
            caption_channels=24,
            sample_size=8,
        ),
        sample,
    )


def cogvideox() -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return Regression(
        CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=24,
            text_embed_dim=24,
            num_layers=2,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            max_text_seq_length=6,
        ),
        sample,
    )

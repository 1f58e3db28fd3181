"""One model each of packages that hold one idea."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.other_models.heads import Classifier, LanguageModel, OwnLoss, build, made


class MambaLM(nn.Module):
    """The package's layers with an embedding before and a tied head behind."""

    def __init__(self, pscan: bool) -> None:
        super().__init__()
        from mambapy.mamba import Mamba, MambaConfig, RMSNorm

        self.embedding = nn.Embedding(96, 32)
        self.mamba = Mamba(MambaConfig(d_model=32, n_layers=2, d_state=8, pscan=pscan))
        self.norm = RMSNorm(32)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.mamba(self.embedding(input_ids))) @ self.embedding.weight.T


def mamba() -> nn.Module:
    return LanguageModel(MambaLM(pscan=False))


def mamba_scan() -> nn.Module:
    """With the package's own autograd Function for the scan."""
    return LanguageModel(MambaLM(pscan=True))


SMALL: dict[str, Any] = {"num_tokens": 96, "dim": 64, "depth": 2}
HEADS: dict[str, Any] = {**SMALL, "heads": 4, "dim_head": 16}
LOCAL: dict[str, Any] = {**HEADS, "max_seq_len": 16, "local_attn_window_size": 8}
LATENT = {"num_latents": 8, "latent_dim": 64, "latent_heads": 4, "latent_dim_head": 16}

performer = build(
    LanguageModel, "performer_pytorch:PerformerLM", **HEADS, max_seq_len=32, nb_features=16, tie_embed=True
)
linformer = build(LanguageModel, "linformer:LinformerLM", **HEADS, seq_len=16, k=8)
routing_transformer = build(
    partial(LanguageModel, call=lambda net, ids: net(ids)[0]),
    "routing_transformer:RoutingTransformerLM",
    **HEADS,
    max_seq_len=16,
    window_size=8,
    n_local_attn_heads=4,
    causal=True,
)
local_transformer = build(LanguageModel, "local_attention:LocalTransformer", **LOCAL, num_residual_streams=1)
hyper_connections = build(LanguageModel, "local_attention:LocalTransformer", **LOCAL)  # with four residual streams
mlp_mixer = build(
    Classifier, "mlp_mixer_pytorch:MLPMixer", image_size=16, channels=3, patch_size=4, dim=64, depth=2, num_classes=12
)
g_mlp = build(LanguageModel, "g_mlp_pytorch:gMLP", **SMALL, seq_len=16, causal=True, attn_dim=16)
palm = build(partial(OwnLoss, return_loss=True), "palm_rlhf_pytorch:PaLM", **HEADS)
titans = build(
    partial(OwnLoss, return_loss=True),
    "titans_pytorch:MemoryAsContextTransformer",
    **HEADS,
    segment_len=8,
    num_persist_mem_tokens=2,
    num_longterm_mem_tokens=2,
    neural_memory_layers=(),
)


class Speech(nn.Module):
    """Conformer blocks between a projection of features and CTC-like frame labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(20, 64)
        self.net = made("conformer:Conformer", 64, depth=2, dim_head=16, heads=4, ff_mult=2, conv_kernel_size=7)
        self.head = nn.Linear(64, 12)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.net(self.up(features)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


conformer = Speech


class Shifted(nn.Module):
    """Images with channels last, as perceiver-pytorch takes them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images.movedim(1, -1)), labels)


perceiver = build(
    Shifted,
    "perceiver_pytorch:Perceiver",
    **LATENT,
    num_freq_bands=3,
    depth=2,
    max_freq=8.0,
    cross_dim_head=16,
    num_classes=12,
    self_per_cross_attn=2,
)


class Tagger(nn.Module):
    """The package's layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.net = made("nystrom_attention:Nystromformer", dim=64, depth=2, dim_head=16, heads=4, num_landmarks=4)
        self.head = nn.Linear(64, 96)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.net(self.embed(input_ids)))


def nystromformer() -> nn.Module:
    return LanguageModel(Tagger())


class Contrastive(nn.Module):
    """Both towers and the contrastive loss over one batch: its sequences mix, so a step is one microbatch."""

    def __init__(self) -> None:
        super().__init__()
        from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

        vision = CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=4, image_size=16)
        text = CLIPTextCfg(context_length=16, vocab_size=96, width=64, heads=4, layers=2)
        self.net = CLIP(32, vision, text, output_dict=True)

    def forward(self, images: Tensor, input_ids: Tensor) -> Tensor:
        out = self.net(images, input_ids)
        logits = out["logit_scale"] * out["image_features"] @ out["text_features"].T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


open_clip = Contrastive

"""One model each of packages that hold one idea."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.other_models.heads import Classifier, LanguageModel


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


def performer() -> nn.Module:
    from performer_pytorch import PerformerLM

    return LanguageModel(
        PerformerLM(
            num_tokens=96, max_seq_len=32, dim=64, depth=2, heads=4, dim_head=16, nb_features=16, tie_embed=True
        )
    )


def linformer() -> nn.Module:
    from linformer import LinformerLM

    return LanguageModel(LinformerLM(num_tokens=96, dim=64, seq_len=16, depth=2, heads=4, dim_head=16, k=8))


def routing_transformer() -> nn.Module:
    from routing_transformer import RoutingTransformerLM

    net = RoutingTransformerLM(
        num_tokens=96,
        dim=64,
        depth=2,
        max_seq_len=16,
        heads=4,
        dim_head=16,
        window_size=8,
        n_local_attn_heads=4,
        causal=True,
    )
    return LanguageModel(net, lambda net, ids: net(ids)[0])


def local_transformer() -> nn.Module:
    from local_attention import LocalTransformer

    return LanguageModel(
        LocalTransformer(
            num_tokens=96,
            max_seq_len=16,
            dim=64,
            depth=2,
            local_attn_window_size=8,
            dim_head=16,
            heads=4,
            num_residual_streams=1,
        )
    )


def hyper_connections() -> nn.Module:
    """The same with four residual streams."""
    from local_attention import LocalTransformer

    return LanguageModel(
        LocalTransformer(num_tokens=96, max_seq_len=16, dim=64, depth=2, local_attn_window_size=8, dim_head=16, heads=4)
    )


class Speech(nn.Module):
    """Conformer blocks between a projection of features and CTC-like frame labels."""

    def __init__(self) -> None:
        super().__init__()
        from conformer import Conformer

        self.up = nn.Linear(20, 64)
        self.net = Conformer(64, depth=2, dim_head=16, heads=4, ff_mult=2, conv_kernel_size=7)
        self.head = nn.Linear(64, 12)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.net(self.up(features)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def conformer() -> nn.Module:
    return Speech()


class Shifted(nn.Module):
    """Images with channels last, as perceiver-pytorch takes them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images.movedim(1, -1)), labels)


def perceiver() -> nn.Module:
    from perceiver_pytorch import Perceiver

    return Shifted(
        Perceiver(
            num_freq_bands=3,
            depth=2,
            max_freq=8.0,
            num_latents=8,
            latent_dim=64,
            latent_heads=4,
            cross_dim_head=16,
            latent_dim_head=16,
            num_classes=12,
            self_per_cross_attn=2,
        )
    )


def nystromformer() -> nn.Module:
    from nystrom_attention import Nystromformer

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(96, 64)
            self.net = Nystromformer(dim=64, depth=2, dim_head=16, heads=4, num_landmarks=4)
            self.head = nn.Linear(64, 96)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.net(self.embed(input_ids)))

    return LanguageModel(Tagger())


def mlp_mixer() -> nn.Module:
    from mlp_mixer_pytorch import MLPMixer

    return Classifier(MLPMixer(image_size=16, channels=3, patch_size=4, dim=64, depth=2, num_classes=12))


def g_mlp() -> nn.Module:
    from g_mlp_pytorch import gMLP

    return LanguageModel(gMLP(num_tokens=96, dim=64, depth=2, seq_len=16, causal=True, attn_dim=16))


def palm() -> nn.Module:
    from palm_rlhf_pytorch import PaLM

    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = PaLM(num_tokens=96, dim=64, depth=2, dim_head=16, heads=4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.net(input_ids, return_loss=True)

    return OwnLoss()


def titans() -> nn.Module:
    from titans_pytorch import MemoryAsContextTransformer

    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MemoryAsContextTransformer(
                num_tokens=96,
                dim=64,
                depth=2,
                segment_len=8,
                num_persist_mem_tokens=2,
                num_longterm_mem_tokens=2,
                dim_head=16,
                heads=4,
                neural_memory_layers=(),
            )

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.net(input_ids, return_loss=True)

    return OwnLoss()


def open_clip() -> nn.Module:
    """Both towers and the contrastive loss over one batch: its sequences mix, so a step is one microbatch."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vision = CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=4, image_size=16)
            text = CLIPTextCfg(context_length=16, vocab_size=96, width=64, heads=4, layers=2)
            self.net = CLIP(32, vision, text, output_dict=True)

        def forward(self, images: Tensor, input_ids: Tensor) -> Tensor:
            out = self.net(images, input_ids)
            logits = out["logit_scale"] * out["image_features"] @ out["text_features"].T
            labels = torch.arange(len(logits))
            return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return Contrastive()

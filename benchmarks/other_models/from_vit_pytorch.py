"""Models of the package vit-pytorch: einops layers, heads cut by Rearrange."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.other_models.heads import Classifier

SMALL = {"image_size": 16, "patch_size": 4, "num_classes": 12, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}


def vit() -> nn.Module:
    from vit_pytorch import ViT

    return Classifier(ViT(**SMALL, dim_head=16))


def simple_vit() -> nn.Module:
    from vit_pytorch import SimpleViT

    return Classifier(SimpleViT(**SMALL, dim_head=16))


def qk_norm() -> nn.Module:
    from vit_pytorch.simple_vit_with_qk_norm import SimpleViT

    return Classifier(SimpleViT(**SMALL, dim_head=16))


def registers() -> nn.Module:
    from vit_pytorch.simple_vit_with_register_tokens import SimpleViT

    return Classifier(SimpleViT(**SMALL, dim_head=16))


def value_residual() -> nn.Module:
    from vit_pytorch.simple_vit_with_value_residual import SimpleViT

    return Classifier(SimpleViT(**SMALL, dim_head=16))


def cait() -> nn.Module:
    from vit_pytorch.cait import CaiT

    return Classifier(CaiT(**{**SMALL, "depth": 3}, cls_depth=1, dim_head=16))


def deep_vit() -> nn.Module:
    from vit_pytorch.deepvit import DeepViT

    return Classifier(DeepViT(**SMALL, dim_head=16))


def parallel_vit() -> nn.Module:
    from vit_pytorch.parallel_vit import ViT

    return Classifier(ViT(**SMALL, dim_head=16, num_parallel_branches=2))


def small_datasets() -> nn.Module:
    from vit_pytorch.vit_for_small_dataset import ViT

    return Classifier(ViT(**SMALL, dim_head=16))


def cct() -> nn.Module:
    from vit_pytorch.cct import CCT

    return Classifier(
        CCT(
            img_size=16,
            embedding_dim=64,
            n_conv_layers=1,
            kernel_size=3,
            stride=2,
            padding=1,
            pooling_kernel_size=3,
            pooling_stride=2,
            pooling_padding=1,
            num_layers=2,
            num_heads=4,
            mlp_ratio=2.0,
            num_classes=12,
            positional_embedding="learnable",
        )
    )


def cross_vit() -> nn.Module:
    from vit_pytorch.cross_vit import CrossViT

    return Classifier(
        CrossViT(
            image_size=16,
            num_classes=12,
            depth=2,
            sm_dim=32,
            sm_patch_size=4,
            sm_enc_depth=1,
            sm_enc_heads=4,
            sm_enc_dim_head=8,
            sm_enc_mlp_dim=64,
            lg_dim=64,
            lg_patch_size=8,
            lg_enc_depth=1,
            lg_enc_heads=4,
            lg_enc_dim_head=16,
            lg_enc_mlp_dim=128,
            cross_attn_depth=1,
            cross_attn_heads=4,
            cross_attn_dim_head=16,
        )
    )


def twins() -> nn.Module:
    from vit_pytorch.twins_svt import TwinsSVT

    stage = {"patch_size": 2, "local_patch_size": 2, "global_k": 2, "depth": 1}
    stages = {f"s{i}_{k}": v for i in range(1, 5) for k, v in stage.items()}
    sizes = {"s1_emb_dim": 32, "s2_emb_dim": 32, "s3_emb_dim": 64, "s4_emb_dim": 64}
    last = {"s4_local_patch_size": 1, "s4_global_k": 1}
    return Classifier(TwinsSVT(num_classes=12, **(stages | sizes | last)))


def vivit() -> nn.Module:
    from vit_pytorch.vivit import ViViT

    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ViViT(
                image_size=16,
                frames=4,
                image_patch_size=8,
                frame_patch_size=2,
                num_classes=12,
                dim=64,
                spatial_depth=2,
                temporal_depth=2,
                heads=4,
                mlp_dim=128,
                dim_head=16,
            )

        def forward(self, video: Tensor, labels: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(self.net(video), labels)

    return Video()

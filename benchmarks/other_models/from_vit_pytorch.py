"""Models of the package vit-pytorch: einops layers, heads cut by Rearrange."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.other_models.heads import Classifier, build

SMALL = {"image_size": 16, "patch_size": 4, "num_classes": 12, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
SMALL |= {"dim_head": 16}
CCT = {"img_size": 16, "embedding_dim": 64, "n_conv_layers": 1, "kernel_size": 3, "stride": 2, "padding": 1}
CCT |= {"pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1}
STAGE = {"patch_size": 2, "local_patch_size": 2, "global_k": 2, "depth": 1}
TWINS = {f"s{i}_{name}": size for i in range(1, 5) for name, size in STAGE.items()}
TWINS |= {"s1_emb_dim": 32, "s2_emb_dim": 32, "s3_emb_dim": 64, "s4_emb_dim": 64}
TWINS |= {"s4_local_patch_size": 1, "s4_global_k": 1}

vit = build(Classifier, "vit_pytorch:ViT", **SMALL)
simple_vit = build(Classifier, "vit_pytorch:SimpleViT", **SMALL)
qk_norm = build(Classifier, "vit_pytorch.simple_vit_with_qk_norm:SimpleViT", **SMALL)
registers = build(Classifier, "vit_pytorch.simple_vit_with_register_tokens:SimpleViT", **SMALL)
value_residual = build(Classifier, "vit_pytorch.simple_vit_with_value_residual:SimpleViT", **SMALL)
cait = build(Classifier, "vit_pytorch.cait:CaiT", **{**SMALL, "depth": 3}, cls_depth=1)
deep_vit = build(Classifier, "vit_pytorch.deepvit:DeepViT", **SMALL)
parallel_vit = build(Classifier, "vit_pytorch.parallel_vit:ViT", **SMALL, num_parallel_branches=2)
small_datasets = build(Classifier, "vit_pytorch.vit_for_small_dataset:ViT", **SMALL)
cct = build(
    Classifier,
    "vit_pytorch.cct:CCT",
    **CCT,
    num_layers=2,
    num_heads=4,
    mlp_ratio=2.0,
    num_classes=12,
    positional_embedding="learnable",
)
cross_vit = build(
    Classifier,
    "vit_pytorch.cross_vit:CrossViT",
    image_size=16,
    num_classes=12,
    depth=2,
    **{"sm_dim": 32, "sm_patch_size": 4, "sm_enc_depth": 1, "sm_enc_heads": 4, "sm_enc_dim_head": 8},
    **{"lg_dim": 64, "lg_patch_size": 8, "lg_enc_depth": 1, "lg_enc_heads": 4, "lg_enc_dim_head": 16},
    **{"sm_enc_mlp_dim": 64, "lg_enc_mlp_dim": 128},
    **{"cross_attn_depth": 1, "cross_attn_heads": 4, "cross_attn_dim_head": 16},
)
twins = build(Classifier, "vit_pytorch.twins_svt:TwinsSVT", num_classes=12, **TWINS)


class Video(nn.Module):
    """Cross-entropy of one label a video."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, video: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(video), labels)


vivit = build(
    Video,
    "vit_pytorch.vivit:ViViT",
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

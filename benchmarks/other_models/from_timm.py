"""Image models of the package timm, small."""

from __future__ import annotations

from torch import nn

from benchmarks.other_models.heads import Classifier, build

VIT = {"img_size": 16, "patch_size": 4, "num_classes": 12, "embed_dim": 64, "depth": 2, "num_heads": 4}
SWIN = {
    "img_size": 16,
    "patch_size": 2,
    "num_classes": 12,
    "embed_dim": 32,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
}
MIXER = {"num_classes": 12, "img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": 64}

vit = build(
    Classifier, "timm.models.vision_transformer:VisionTransformer", **VIT, init_values=1e-2, qk_norm=True, reg_tokens=2
)
deit_distilled = build(Classifier, "timm.models.deit:VisionTransformerDistilled", **VIT)
beit = build(Classifier, "timm.models.beit:Beit", **VIT, init_values=0.1, use_abs_pos_emb=False, use_rel_pos_bias=True)
eva = build(
    Classifier, "timm.models.eva:Eva", **VIT, use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True, qkv_fused=False
)
swin = build(Classifier, "timm.models.swin_transformer:SwinTransformer", **SWIN)
swin_v2 = build(Classifier, "timm.models.swin_transformer_v2:SwinTransformerV2", **SWIN)
cait = build(Classifier, "timm.models.cait:Cait", **{**VIT, "depth": 3}, depth_token_only=1)
xcit = build(
    Classifier, "timm.models.xcit:Xcit", **{**VIT, "img_size": 32, "patch_size": 8, "depth": 3}, cls_attn_layers=1
)
mixer = build(Classifier, "timm.models.mlp_mixer:MlpMixer", **MIXER)
convnext = build(
    Classifier,
    "timm.models.convnext:ConvNeXt",
    num_classes=12,
    depths=(1, 1, 2, 1),
    dims=(16, 32, 64, 64),
    patch_size=4,
)


def gmlp() -> nn.Module:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    return Classifier(MlpMixer(**MIXER, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, mlp_ratio=4))


def metaformer() -> nn.Module:
    from timm.models.metaformer import Attention, GroupNorm1, LayerNormNoBias, MetaFormer, Pooling

    layers = {"token_mixers": (Pooling, Attention), "norm_layers": (GroupNorm1, LayerNormNoBias)}
    return Classifier(MetaFormer(num_classes=12, depths=(2, 2), dims=(32, 64), **layers, use_mlp_head=False))

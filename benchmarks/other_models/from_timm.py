"""Image models of the package timm, small."""

from __future__ import annotations

from torch import nn

from benchmarks.other_models.heads import Classifier

VIT = {"img_size": 16, "patch_size": 4, "num_classes": 12, "embed_dim": 64, "depth": 2, "num_heads": 4}


def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return Classifier(VisionTransformer(**VIT, init_values=1e-2, qk_norm=True, reg_tokens=2))


def deit_distilled() -> nn.Module:
    from timm.models.deit import VisionTransformerDistilled

    return Classifier(VisionTransformerDistilled(**VIT))


def beit() -> nn.Module:
    from timm.models.beit import Beit

    return Classifier(Beit(**VIT, init_values=0.1, use_abs_pos_emb=False, use_rel_pos_bias=True))


def eva() -> nn.Module:
    from timm.models.eva import Eva

    return Classifier(Eva(**VIT, use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True, qkv_fused=False))


def swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return Classifier(
        SwinTransformer(
            img_size=16, patch_size=2, num_classes=12, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4
        )
    )


def swin_v2() -> nn.Module:
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    return Classifier(
        SwinTransformerV2(
            img_size=16, patch_size=2, num_classes=12, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4
        )
    )


def cait() -> nn.Module:
    from timm.models.cait import Cait

    return Classifier(Cait(**{**VIT, "depth": 3}, depth_token_only=1))


def xcit() -> nn.Module:
    from timm.models.xcit import Xcit

    return Classifier(
        Xcit(img_size=32, patch_size=8, num_classes=12, embed_dim=64, depth=3, num_heads=4, cls_attn_layers=1)
    )


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return Classifier(MlpMixer(num_classes=12, img_size=16, patch_size=4, num_blocks=2, embed_dim=64))


def gmlp() -> nn.Module:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    return Classifier(
        MlpMixer(
            num_classes=12,
            img_size=16,
            patch_size=4,
            num_blocks=2,
            embed_dim=64,
            block_layer=SpatialGatingBlock,
            mlp_layer=GatedMlp,
            mlp_ratio=4,
        )
    )


def convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return Classifier(ConvNeXt(num_classes=12, depths=(1, 1, 2, 1), dims=(16, 32, 64, 64), patch_size=4))


def metaformer() -> nn.Module:
    from timm.models.metaformer import Attention, GroupNorm1, LayerNormNoBias, MetaFormer, Pooling

    return Classifier(
        MetaFormer(
            num_classes=12,
            depths=(2, 2),
            dims=(32, 64),
            token_mixers=(Pooling, Attention),
            norm_layers=(GroupNorm1, LayerNormNoBias),
            use_mlp_head=False,
        )
    )

"""Models of the package x-transformers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from x_transformers import (
    AutoregressiveWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

from benchmarks.other_models.heads import Classifier, LanguageModel, OwnLoss


def decoder(**kwargs) -> TransformerWrapper:
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **kwargs)
    return TransformerWrapper(num_tokens=96, max_seq_len=32, attn_layers=layers)


def llama_like() -> nn.Module:
    return LanguageModel(
        decoder(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True, attn_kv_heads=2)
    )


def alibi() -> nn.Module:
    return OwnLoss(AutoregressiveWrapper(decoder(alibi_pos_bias=True, alibi_num_heads=2)))


def relative_bias() -> nn.Module:
    return LanguageModel(decoder(rel_pos_bias=True, ff_relu_squared=True, pre_norm_has_final_norm=True))


def palm_like() -> nn.Module:
    return LanguageModel(decoder(attn_one_kv_head=True, attn_qk_norm=True, rotary_xpos=True, shift_tokens=1))


def macaron() -> nn.Module:
    return LanguageModel(
        decoder(macaron=True, gate_residual=True, attn_pre_talking_heads=True, attn_post_talking_heads=True)
    )


def encoder_decoder() -> nn.Module:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = XTransformer(
                dim=64,
                enc_num_tokens=96,
                enc_depth=2,
                enc_heads=4,
                enc_max_seq_len=32,
                enc_attn_dim_head=16,
                dec_num_tokens=96,
                dec_depth=2,
                dec_heads=4,
                dec_max_seq_len=32,
                dec_attn_dim_head=16,
            )

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return self.net(input_ids, labels)

    return Seq2Seq()


def vit() -> nn.Module:
    layers = Encoder(dim=64, depth=2, heads=4, attn_dim_head=16, sandwich_norm=True)
    return Classifier(ViTransformerWrapper(image_size=16, patch_size=4, num_classes=12, attn_layers=layers))


def masked_encoder() -> nn.Module:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = Encoder(dim=64, depth=2, heads=4, attn_dim_head=16, rotary_pos_emb=True)
            self.net = TransformerWrapper(num_tokens=96, max_seq_len=32, attn_layers=layers)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.net(input_ids, mask=input_ids != 0)
            return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)

    return Masked()

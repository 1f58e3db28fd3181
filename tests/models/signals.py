"""Small models of time series, speech, and images beside text: the loss counts what was observed, or aligns (CTC)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.models.families import LENGTH, Entry, hugging_face, tokens

OFF = {"dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "attention_dropout": 0.0}
SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "activation_dropout": 0.0,
}
SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
    "num_labels": 5,
}


class Series(Entry):
    """Of some series little was observed, and nothing of the first."""

    def batch(self, num_sequences: int, seed: int) -> dict[str, Tensor]:
        made, generator = super().batch(num_sequences, seed), torch.Generator().manual_seed(seed)
        seen = torch.rand(made["past_observed_mask"].shape, generator=generator) < 0.7
        seen[0] = False
        return made | {"past_observed_mask": seen.double()}


class Captioned(Entry):
    """The first four tokens stand for the image, and the last six are told from all before them."""

    def batch(self, num_sequences: int, seed: int) -> dict[str, Tensor]:
        made = super().batch(num_sequences, seed)
        made["input_ids"][:, :4] = 96
        made["token_type_ids"] = (torch.arange(LENGTH) >= 6).long().repeat(num_sequences, 1)
        return made


def series(stem: str, **sizes: Any) -> Entry:
    import transformers

    config = getattr(transformers, f"{stem}Config")(**SERIES, **OFF, **sizes)
    past, real = (10,), torch.float64
    inputs: dict[str, Any] = {name: (past, real, None) for name in ("past_values", "past_observed_mask")}
    inputs |= {"past_time_features": ((10, 1), real, None), "future_time_features": ((4, 1), real, None)}
    inputs["future_values"] = (4,), real, None
    return Series(getattr(transformers, f"{stem}ForPrediction")(config), inputs)


def speech(kind: str, labels: tuple[tuple[int, ...], int], **sizes: Any) -> Entry:
    import transformers

    stem, head = kind.split(":")
    off = {name: 0.0 for name in ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")}
    config = getattr(transformers, f"{stem}Config")(**SPEECH, **off, activation_dropout=0.0, layerdrop=0.0, **sizes)
    wave: dict[str, Any] = {
        "input_values": ((240,), torch.float64, None),
        "labels": (labels[0], torch.int64, labels[1]),
    }
    return Entry(getattr(transformers, f"{stem}{head}")(config), wave)


def speech_to_text() -> Entry:
    sizes = {name: 2 for name in ("encoder_layers", "decoder_layers", "num_conv_layers")}
    sizes |= {name: 4 for name in ("encoder_attention_heads", "decoder_attention_heads")}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "input_feat_per_channel": 8}
    sizes |= {"conv_channels": 16, "max_source_positions": 64, "max_target_positions": 32}
    inputs = {"input_features": ((24, 8), torch.float64, None), "labels": ((LENGTH,), torch.int64, 97)}
    given: dict[str, Any] = sizes | OFF | {"activation_dropout": 0.0}
    return hugging_face("Speech2Text:ForConditionalGeneration", inputs=inputs, **given)


def paligemma() -> Entry:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = sizes | {"model_type": "gemma", "vocab_size": 97, "num_key_value_heads": 1, "head_dim": 8}
    vision = sizes | {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 32}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision | {"vision_use_head": False}, image_token_index=96, projection_dim=32
    )
    inputs: dict[str, Any] = tokens(96, "attention_mask", "token_type_ids") | {
        "pixel_values": ((3, 8, 8), torch.float64, None)
    }
    return Captioned(transformers.PaliGemmaForConditionalGeneration(config), inputs, ("labels",), ("attention_mask",))


def prophetnet() -> Entry:
    sizes = {name: 2 for name in ("num_encoder_layers", "num_decoder_layers", "ngram")}
    sizes |= {name: 4 for name in ("num_encoder_attention_heads", "num_decoder_attention_heads")}
    sizes |= {"hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32}
    sizes |= {"num_buckets": 8, "relative_max_distance": 16, "decoder_start_token_id": 1}
    off: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return hugging_face("ProphetNet:ForConditionalGeneration", **sizes, **off)


SIGNALS: dict[str, Callable[[], Entry]] = {
    "time-series": lambda: series("TimeSeriesTransformer"),
    "wav2vec2-ctc": lambda: speech("Wav2Vec2:ForCTC", ((6,), 31), ctc_loss_reduction="mean"),
    "wavlm": lambda: speech("WavLM:ForSequenceClassification", ((), 5), num_buckets=16, max_bucket_distance=20),
    "speech-to-text": speech_to_text,
    "paligemma": paligemma,
    "prophetnet": prophetnet,
}

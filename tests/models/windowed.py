"""Small models whose attention is cut into windows by strides of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models.families import BERT, Entry, hugging_face

WINDOW = 4  # a third of a sequence
OFF: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def longformer() -> Entry:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    windows: Any = [WINDOW] * BERT["num_hidden_layers"]
    return hugging_face("Longformer:ForMaskedLM", attention_window=windows, **BERT, **off)


def led() -> Entry:
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in SIZES.items()}
    sizes |= {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32, "decoder_start_token_id": 0}
    return hugging_face("LED:ForConditionalGeneration", d_model=32, attention_window=[WINDOW] * 2, **sizes, **OFF)


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
WINDOWED: dict[str, Callable[[], Entry]] = {"longformer": longformer, "led": led}

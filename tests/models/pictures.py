"""Small families of transformers with a sequence of patches or frames, and a batch of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROWS, CLASSES = 4, 5
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {"image_size": 16, "patch_size": 4}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPEECH = {
    "vocab_size": 50,
    "d_model": 32,
    **{
        f"{part}_{name}": n
        for part in ("encoder", "decoder")
        for name, n in {"layers": 2, "attention_heads": 4}.items()
    },
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    **{"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
LANGUAGE = {"model_type": "llama", "vocab_size": 60, **SIZES, "intermediate_size": 64, "num_key_value_heads": 4}
Made = tuple[nn.Module, dict[str, Tensor]]


def _of(name: str, config: str, given: dict[str, Any], **batch: Tensor) -> Made:
    model = getattr(transformers, name)(getattr(transformers, config)(**given))
    return model, batch


def _images(*shape: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, *shape), "labels": torch.randint(CLASSES, (ROWS,))}


def siglip() -> Made:
    """Patches without a class token, pooled by their mean."""
    model = {**SIZES, "intermediate_size": 64}
    text = {"vocab_size": 30, "max_position_embeddings": 8, **model}
    given = {"vision_config": model | IMAGE, "text_config": text, "num_labels": CLASSES}
    return _of("SiglipForImageClassification", "SiglipConfig", given, **_images(3, 16, 16))


def videomae() -> Made:
    given = {**SIZES, **IMAGE, **OFF, "intermediate_size": 64, "num_frames": 4, "num_labels": CLASSES}
    return _of("VideoMAEForVideoClassification", "VideoMAEConfig", given, **_images(4, 3, 16, 16))


def registers() -> Made:
    """16 patches, a class token and 3 registers."""
    given = {**SIZES, **IMAGE, **OFF, "num_register_tokens": 3, "num_labels": CLASSES}
    return _of("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", given, **_images(3, 16, 16))


def swin() -> Made:
    """16 windows of 16 patches, shifted in every second block."""
    given = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
    given |= {**OFF, "drop_path_rate": 0.0, "num_labels": CLASSES}
    return _of("SwinForImageClassification", "SwinConfig", given, **_images(3, 32, 32))


def whisper() -> Made:
    batch = {"input_features": torch.randn(ROWS, 8, 32), "labels": torch.randint(3, 50, (ROWS, 8))}
    return _of("WhisperForConditionalGeneration", "WhisperConfig", SPEECH, **batch)


def llava() -> Made:
    """Patches in the places of 16 of 24 tokens."""
    vision = {"model_type": "siglip_vision_model", **SIZES, "intermediate_size": 64, **IMAGE}
    given = {"vision_config": vision, "text_config": LANGUAGE, "image_token_index": 59}
    given |= {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    ids = torch.randint(3, 58, (ROWS, 24))
    ids[:, 2:18] = 59
    batch = {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": ids.roll(1, 1).clamp(max=58)}
    return _of("LlavaForConditionalGeneration", "LlavaConfig", given, **batch)


PICTURES: dict[str, Callable[[], Made]] = {
    maker.__name__: maker for maker in (siglip, videomae, registers, swin, whisper, llava)
}


def made(name: str) -> Made:
    """The model and its batch in float64, the same each time."""
    torch.manual_seed(0)
    model, batch = PICTURES[name]()
    return model.double().eval(), {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}

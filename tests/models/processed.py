"""Families of transformers with a batch as their processors make it: patches of all images, a grid of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROWS, LENGTH, IMAGE, TOKENS = 2, 12, 59, 4
SIZES = {"hidden_size": 32, "intermediate_size": 64}
LAYERS = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**LAYERS, "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
LLAMA = {**TEXT, "model_type": "llama"}
IDS: dict[str, Any] = {"input_ids": {"shape": [LENGTH], "dtype": "int64", "high": IMAGE}}
LABELS: dict[str, Any] = {"labels": {"like": "input_ids"}}
POSITIONS = {"position_ids": {"shape": [3, LENGTH], "dtype": "int64", "high": 64, "batch_dim": 1}}
PATCHES = {"pixel_values": {"shape": [16, 96], "dtype": "float64", "joined": True}}
GRIDS = {"image_grid_thw": {"value": [[1, 4, 4]], "joined": True}}
GRID_INPUTS = IDS | PATCHES | GRIDS | POSITIONS | LABELS
EDGES = {"video_token_id": 60, "vision_start_token_id": 61, "vision_end_token_id": 62}
PATCHED = {**SIZES, "depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
SMALL_IMAGE = {"image_size": 16, "patch_size": 4}  # 16 patches, 4 of which become a token


@dataclass(frozen=True)
class Family:
    """``config``: of a model of ``name``. ``inputs``: of a spec. Four image tokens stand in each sequence."""

    name: str
    config: dict[str, Any]
    inputs: dict[str, Any]

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**self.config)
        return getattr(transformers, f"{self.name}ForConditionalGeneration")(config).to(dtype).eval()

    def batch(self, num_rows: int = ROWS) -> dict[str, Tensor]:
        """In rows. Image tokens stand at other places in each sequence."""
        ids = torch.randint(3, IMAGE, (num_rows, LENGTH))
        for row, tokens in enumerate(ids):
            tokens[1 + 2 * row : 1 + 2 * row + TOKENS] = IMAGE
        made = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
        for name, given in self.inputs.items():
            if "value" in given:
                made[name] = torch.tensor(given["value"]).repeat(num_rows, *[1] * torch.tensor(given["value"]).dim())
            elif name == "position_ids":
                made[name] = torch.arange(LENGTH).repeat(num_rows, 3, 1)
                made[name][:, 1, 5:] += 2
            elif name not in made:
                made[name] = torch.randn(num_rows, *given["shape"], dtype=getattr(torch, given["dtype"]))
        return {name: made[name] for name in self.inputs}


def _idefics(name: str, kind: str) -> Family:
    config = {"vision_config": {**LAYERS, **SMALL_IMAGE, "model_type": kind}, "text_config": LLAMA, "scale_factor": 2}
    images = {"pixel_values": {"shape": [1, 3, 16, 16], "dtype": "float64"}}
    return Family(name, config | {"image_token_id": IMAGE}, IDS | images | LABELS)


_WINDOWS = PATCHED | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
_DEEP = PATCHED | {"out_hidden_size": 32, "num_position_embeddings": 16}
_MIXED = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_MIXED |= {"layer_types": ["linear_attention", "full_attention"]}
_SIZED = {"image_sizes": {"value": [[16, 16]], "joined": True}}
_IMAGES = {"pixel_values": {"shape": [1, 3, 16, 16], "dtype": "float64", "joined": True}}
_SOUND = {"input_features": {"shape": [8, 32], "dtype": "float64"}}
_HEARD = {**LAYERS, "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 16}

FAMILIES = {
    "Qwen2-VL": Family(
        "Qwen2VL",
        {
            "vision_config": {k: v for k, v in PATCHED.items() if k not in SIZES}
            | {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
            "text_config": TEXT | {"rope_parameters": ROPE},
            "image_token_id": IMAGE,
            **EDGES,
        },
        GRID_INPUTS,
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VL",
        {
            "vision_config": _WINDOWS,
            "text_config": TEXT | {"rope_parameters": ROPE},
            "image_token_id": IMAGE,
            **EDGES,
        },
        GRID_INPUTS,
    ),
    "Qwen3-VL": Family(
        "Qwen3VL",
        {
            "vision_config": _DEEP | {"deepstack_visual_indexes": [0]},
            "text_config": TEXT | {"rope_parameters": ROPE},
            "image_token_id": IMAGE,
            **EDGES,
        },
        GRID_INPUTS,
    ),
    "Qwen3.5": Family(
        "Qwen3_5",
        {
            "vision_config": _DEEP,
            "text_config": TEXT | _MIXED | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
            "image_token_id": IMAGE,
            **EDGES,
        },
        GRID_INPUTS,
    ),
    "Mistral 3": Family(
        "Mistral3",
        {
            "vision_config": {**LAYERS, **SMALL_IMAGE, "head_dim": 8, "model_type": "pixtral"},
            "text_config": TEXT | {"model_type": "mistral"},
            "image_token_index": IMAGE,
        },
        IDS | _IMAGES | _SIZED | LABELS,
    ),
    "SmolVLM": _idefics("SmolVLM", "smolvlm_vision"),
    "Idefics3": _idefics("Idefics3", "idefics3_vision"),
    "Voxtral": Family(
        "Voxtral",
        {"audio_config": _HEARD | {"model_type": "voxtral_encoder"}, "text_config": LLAMA, "audio_token_id": IMAGE},
        IDS | _SOUND | LABELS,
    ),
}
EQUAL = ("Qwen2.5-VL", "Qwen3-VL", "SmolVLM", "Voxtral")  # of each kind one

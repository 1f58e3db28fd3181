"""A family of transformers with a batch as its processor makes it: patches of all images, a grid of each."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROWS, LENGTH, PATCHES, IMAGE = 2, 12, 16, 59
SIZES = {"hidden_size": 32, "intermediate_size": 64}
GRID = {"value": [[1, 4, 4]], "joined": True}
INPUTS: dict[str, Any] = {
    "input_ids": {"shape": [LENGTH], "dtype": "int64", "high": IMAGE},
    "pixel_values": {"shape": [PATCHES, 96], "dtype": "float64", "joined": True},
    "image_grid_thw": GRID,
    "position_ids": {"shape": [3, LENGTH], "dtype": "int64", "high": 64, "batch_dim": 1},
    "labels": {"like": "input_ids"},
}


def qwen2_5_vl() -> nn.Module:
    """Windows of 2 · 2 patches in the first vision block, whole images in the second."""
    vision = {**SIZES, "depth": 2, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = {**SIZES, "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
    torch.manual_seed(0)
    tokens = {"image_token_id": IMAGE, "video_token_id": 60, "vision_start_token_id": 61, "vision_end_token_id": 62}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **tokens)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).double().eval()


def batch() -> dict[str, Tensor]:
    """4 image tokens in each sequence, at other places in each; in rows."""
    ids, patches = torch.randint(3, IMAGE, (ROWS, LENGTH)), torch.randn(ROWS, PATCHES, 96, dtype=torch.float64)
    for row, tokens in enumerate(ids):
        tokens[1 + 3 * row : 5 + 3 * row] = IMAGE
    positions = torch.arange(LENGTH).repeat(ROWS, 3, 1)
    positions[:, 1, 5:] += 2
    grids = torch.tensor(GRID["value"]).repeat(ROWS, 1, 1)
    return {
        "input_ids": ids,
        "pixel_values": patches,
        "image_grid_thw": grids,
        "position_ids": positions,
        "labels": ids.masked_fill(ids == IMAGE, -100),
    }

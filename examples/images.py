r"""Images and text: an unmodified Qwen2.5-VL of transformers in a small size, and batches as its processor makes them.

    meshwright train examples/images.py:build examples/images.yaml --data examples/images.py:batches --steps 4

Number and size of the images of a sample are fixed; where their tokens stand may differ. The names, shapes and values
in ``inputs`` of the spec are those of the processor's batch, without the batch. Position ids come from the model's own
``get_rope_index``: give them with the batch, as here, since they are made of the tokens in Python.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

LENGTH, SEQUENCES, IMAGE = 32, 4, 250
GRID = [1, 4, 4]  # patches: 4 · 4 of one image, which become 2 · 2 tokens


def build() -> nn.Module:
    layers = {"hidden_size": 32, "intermediate_size": 64}
    vision = {**layers, "depth": 2, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = {**layers, "vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
    tokens = {"image_token_id": IMAGE, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text, **tokens))


def batches(rank: int, size: int) -> Iterator[dict[str, Tensor]]:
    """The rows of one data-parallel rank in one step after another: a processor's output, and labels."""
    generator, count, model = torch.Generator().manual_seed(rank), SEQUENCES // size, build().model
    while True:
        ids = torch.randint(3, IMAGE, (count, LENGTH), generator=generator)
        starts = torch.randint(LENGTH - 4, (count,), generator=generator)
        is_image = (torch.arange(LENGTH) >= starts[:, None]) & (torch.arange(LENGTH) < starts[:, None] + 4)
        ids[is_image] = IMAGE
        grids = torch.tensor([GRID]).repeat(count, 1)
        positions, _ = model.get_rope_index(ids, is_image.int(), image_grid_thw=grids)
        yield {
            "input_ids": ids,
            "pixel_values": torch.randn(count * 16, 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": grids,
            "position_ids": positions,
            "labels": ids.masked_fill(is_image, -100),
        }

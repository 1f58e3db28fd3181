"""Weights that are stored in FP8, against a reference of the published format, and those that do not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.hub_format import hub_format, stored_in
from planner.capture.model.reference import load_model
from runtime.checkpoint.conversion import described
from runtime.checkpoint.hub_tensors import read_ranges
from runtime.checkpoint.pretrained_load import find_in
from runtime.checkpoint.safetensors_files import SINGLE
from runtime.checkpoint.weight_files import WeightFiles

pytest.importorskip("transformers")

from tests.models.hub_families import FAMILIES
from tests.models.hugging_face import made

BLOCK = 128
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def quantised(shape: tuple[int, int], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values, their scales, and the weight in bfloat16 by the published format."""
    held = torch.randn(shape).to(torch.float8_e4m3fn)
    sizes = {"block": [-(-size // BLOCK) for size in shape], "row": [shape[0], 1], "tensor": []}[kind]
    scale = torch.rand(sizes) + 0.1
    full = scale.expand(shape) if kind != "block" else scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return held, scale, (held.float() * full[: shape[0], : shape[1]]).bfloat16()


def write(directory: Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None = FP8) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / SINGLE)
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings} if settings else {}))
    return directory


@pytest.mark.parametrize("kind", ["block", "row", "tensor"])
@pytest.mark.parametrize("shape", [(576, 7168), (192, 256), (640, 200)], ids=str)
def test_parts_of_a_weight_are_bitwise_those_of_the_format(shape, kind, tmp_path):
    held, scale, wanted = quantised(shape, kind)
    write(tmp_path, {"up.weight": held, "up.weight_scale_inv": scale, "up.input_scale": torch.ones(())})
    with WeightFiles(tmp_path) as files:
        assert list(files.tensors) == ["up.weight"]
        for dim in (0, 1):
            for first, last in ((0, shape[dim]), (0, shape[dim] // 2), (shape[dim] // 2, shape[dim]), (100, 150)):
                value = torch.empty_like(wanted.narrow(dim, first, last - first)).contiguous()
                read_ranges(value, files.source("up.weight"), {dim: ((first, last),)}, files.read)
                assert torch.equal(value, wanted.narrow(dim, first, last - first)), (dim, first)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_experts_in_fp8_are_parts_of_the_models_tensors(family, tmp_path):
    made(FAMILIES[family]).save_pretrained(tmp_path / "in")
    plain, stored = load_file(tmp_path / "in" / SINGLE), {}
    for name, tensor in list(plain.items()):
        if tensor.dim() == 2 and "experts" in name:
            held, scale, full = quantised(tuple(tensor.shape), "block")
            stored |= {name: held, f"{name}_scale_inv": scale}
            plain[name] = full.float()
        else:
            stored[name] = tensor
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    write(tmp_path / "fp8", stored)
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    save_file(plain, tmp_path / "in" / SINGLE, {"format": "pt"})
    wanted = load_model(f"hf:{tmp_path / 'in'}", materialize=True).state_dict()
    model = load_model(f"hf:{tmp_path / 'fp8'}")
    hub = hub_format(model)
    assert stored_in(hub.config) == "FP8"
    with WeightFiles(tmp_path / "fp8") as files:
        for name, (assembly, *_) in find_in(files, hub, described(model)).parameters.items():
            value = torch.empty(wanted[name].shape, dtype=torch.bfloat16)
            read_ranges(value, assembly, {}, files.read)
            assert torch.equal(value, wanted[name].bfloat16()), name


WEIGHT = torch.ones(4, 4).to(torch.float8_e4m3fn)
SCALE = torch.ones(1, 1)
MXFP4 = {"quant_method": "mxfp4"}
BLOCKS, EXPONENTS = torch.zeros(2, 8, 2, 16, dtype=torch.uint8), torch.full((2, 8, 2), 127, dtype=torch.uint8)
PACKED = torch.zeros(8, 32, dtype=torch.int8)
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}
BAD: dict[str, tuple[dict[str, Tensor], Any, str]] = {
    "no scale": ({"up.weight": WEIGHT}, FP8, r"up\.weight in model\.safetensors has no scale"),
    "two scales": ({"up.weight": WEIGHT, "up.weight_scale": SCALE, "up.scale": SCALE + 1}, FP8, "has 2 scales"),
    "another shape": (
        {"up.weight": WEIGHT, "up.weight_scale_inv": torch.ones(2, 1)},
        FP8,
        r"up\.weight_scale_inv in .* has shape \[2, 1\], which fits neither rows nor blocks \[128, 128\] of up\.weight",
    ),
    "not finite": ({"up.weight": WEIGHT, "up.weight_scale_inv": SCALE * torch.nan}, FP8, "values that are not finite"),
    "no config": ({"up.weight": WEIGHT, "up.weight_scale_inv": SCALE}, None, "has no quantization_config"),
    "plain": ({"up.weight": torch.ones(4, 4)}, FP8, "is not quantised, but config.json has a quantization_config"),
    "blocks without scales": ({"up_blocks": BLOCKS}, MXFP4, r"up_blocks in model\.safetensors has no scale"),
    "scales of fewer blocks": (
        {"up_blocks": BLOCKS, "up_scales": EXPONENTS[:, :, :1].contiguous()},
        MXFP4,
        r"up_scales in .* has shape \[2, 8, 1\], which fits neither rows nor blocks \[1, 32\] of up_blocks",
    ),
    "blocks of another width": (
        {"up_blocks": BLOCKS[..., :8].contiguous(), "up_scales": EXPONENTS},
        MXFP4,
        "fits neither",
    ),
    "an exponent that is NaN": ({"up_blocks": BLOCKS, "up_scales": EXPONENTS | 255}, MXFP4, "up_scales .* not finite"),
    "no blocks": ({"up": torch.ones(4, 4)}, MXFP4, "is not quantised, but config.json has a quantization_config"),
    "packed, scales of rows": (
        {"up.weight": PACKED, "up.scale": EXPONENTS[0, :, 0].contiguous()},
        FP8,
        r"up\.scale in .* has shape \[8\], which fits neither rows nor blocks \[1, 32\] of up\.weight",
    ),
    "packed, half a block": (
        {"up.weight": PACKED[:, :8].contiguous(), "up.scale": EXPONENTS[0, :, :1].contiguous()},
        FP8,
        "fits neither",
    ),
    "integers": (
        {"up.weight": PACKED, "up.weight_scale": torch.ones(8, 1)},
        INT8,
        "by 'compressed-tensors int-quantized'",
    ),
    "gptq": ({"up.weight": torch.ones(4, 4)}, {"quant_method": "gptq"}, "quantised by 'gptq', which is not read"),
}


@pytest.mark.parametrize("case", BAD)
def test_weights_that_do_not_fit_their_scales_are_an_error(case, tmp_path):
    tensors, settings, words = BAD[case]
    with pytest.raises(PlanError, match=words):
        WeightFiles(write(tmp_path, tensors, settings))


def test_scales_of_activations_and_other_weight_files_are_not_read_and_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    names = [f"layers.0.{name}" for name in ("up.input_scale", "up.activation_scale", "k_scale", "v_scale")]
    given = {"up.weight": WEIGHT, "up.weight_scale_inv": SCALE, **{name: torch.ones(()) for name in names}}
    write(tmp_path, given)
    save_file({"up.weight": torch.ones(4, 4)}, tmp_path / "consolidated.safetensors")
    with WeightFiles(tmp_path) as files:
        assert list(files.tensors) == ["up.weight"]
        files.tell_unread()
    told = capsys.readouterr().err
    assert "not read: consolidated.safetensors, " in told
    assert "and 2 more" in told


def test_a_plain_model_may_have_tensors_with_these_names(tmp_path):
    write(tmp_path, {"v_scale": torch.ones(4)}, None)
    with WeightFiles(tmp_path) as files:
        assert list(files.tensors) == ["v_scale"]
        assert not files.unread

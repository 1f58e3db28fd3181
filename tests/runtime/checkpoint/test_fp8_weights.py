"""Weights that are stored in FP8, against a reference of the published format, and those that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.hub_format import hub_format, stored_in
from planner.capture.model.reference import load_model
from runtime.checkpoint.assembled import read_ranges
from runtime.checkpoint.import_weights import described
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
    "gptq": ({"up.weight": torch.ones(4, 4)}, {"quant_method": "gptq"}, "quantised by 'gptq', which is not read"),
}


@pytest.mark.parametrize("case", BAD)
def test_weights_that_do_not_fit_their_scales_are_an_error(case, tmp_path):
    tensors, settings, words = BAD[case]
    with pytest.raises(PlanError, match=words):
        WeightFiles(write(tmp_path, tensors, settings))

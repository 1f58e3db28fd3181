"""Weights that are stored in FP4, against a reference of the published format: MXFP4, and packed experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoint.hub_tensors import read_ranges
from runtime.checkpoint.safetensors_files import SINGLE
from runtime.checkpoint.weight_files import WeightFiles

pytest.importorskip("transformers")

from planner.capture.model.reference import load_model
from tests.tools.hub_directories import assert_ranks_read_their_parts, planned, saved, stored

MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


def value_of(nibble: int) -> float:
    """E2M1: a sign, two bits of exponent, one of mantissa; exponent 0 has no leading 1."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    return (-1.0) ** sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


VALUES = torch.tensor([value_of(nibble) for nibble in range(16)])


def drawn(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [.., r, c / 2], exponents [.., r, c / 32] as bytes, and the weight [.., r, c] in bfloat16."""
    *outer, columns = shape
    packed = torch.randint(0, 256, (*outer, columns // 2), dtype=torch.uint8)
    exponents = torch.randint(118, 130, (*outer, columns // 32), dtype=torch.uint8)
    values = torch.stack((VALUES[(packed & 15).int()], VALUES[(packed >> 4).int()]), -1).flatten(-2)
    scale = torch.pow(2.0, exponents.float() - 127).repeat_interleave(32, -1)
    return packed, exponents, (values * scale).bfloat16()


def write(directory: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / SINGLE, {"format": "pt"})
    path = directory / "config.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"quantization_config": settings}))
    return directory


def assert_parts(directory: Path, name: str, wanted: Tensor) -> None:
    with WeightFiles(directory) as files:
        assert list(files.tensors) == [name]
        assert files.tensors[name].shape == tuple(wanted.shape)
        for dim, size in enumerate(wanted.shape):
            for first, last in ((0, size), (0, size // 2), (size // 2, size), (1, 2), (size // 4, size - 1)):
                value = torch.empty_like(wanted.narrow(dim, first, last - first)).contiguous()
                read_ranges(value, files.source(name), {dim: ((first, last),)}, files.read)
                assert torch.equal(value, wanted.narrow(dim, first, last - first)), (dim, first, last)


def test_parts_of_stacked_experts_in_mxfp4_are_bitwise_those_of_the_format(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, exponents, wanted = drawn(4, 96, 160)
    blocks = packed.view(4, 96, 5, 16)
    write(tmp_path, {"up_blocks": blocks, "up_scales": exponents}, MXFP4)
    assert_parts(tmp_path, "up", wanted.transpose(1, 2))
    assert torch.equal(convert_moe_packed_tensors(blocks, exponents), wanted.transpose(1, 2))


@pytest.mark.parametrize("kind", ["e8m0", "bytes", "floats"])
@pytest.mark.parametrize("shape", [(48, 96), (3, 40, 64)], ids=str)
def test_parts_of_packed_experts_are_bitwise_those_of_the_format(kind, shape, tmp_path):
    packed, exponents, wanted = drawn(*shape)
    e8m0 = exponents.view(torch.float8_e8m0fnu)
    scale = {"e8m0": e8m0, "bytes": exponents, "floats": e8m0.float()}[kind]
    write(tmp_path, {"up.weight": packed.view(torch.int8), "up.scale": scale}, FP8)
    assert_parts(tmp_path, "up.weight", wanted)


def test_the_smallest_and_the_largest_exponent_are_exact(tmp_path):
    packed, exponents = torch.full((2, 16), 0x17, dtype=torch.uint8), torch.tensor([[0], [254]], dtype=torch.uint8)
    write(tmp_path, {"up.weight": packed, "up.scale": exponents}, FP8)
    with WeightFiles(tmp_path) as files:
        value = torch.empty(2, 32)
        read_ranges(value, files.source("up.weight"), {}, files.read)
    assert value[0, :2].tolist() == [6 * 2.0**-127, 0.5 * 2.0**-127]
    assert value[1, 1].item() == 2.0**126


def in_mxfp4(directory: Path) -> None:
    """The experts of a saved gpt_oss, as its files on the Hub have them."""
    tensors = stored(directory)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        packed, tensors[f"{name}_scales"], _ = drawn(experts, rows, columns)
        tensors[f"{name}_blocks"] = packed.view(experts, rows, columns // 32, 16)
    write(directory, tensors, MXFP4)


def in_fp4(directory: Path) -> None:
    """Experts of one tensor each, packed."""
    tensors = stored(directory)
    for name in [name for name in tensors if ".experts." in name]:
        packed, exponents, _ = drawn(*tensors[name].shape)
        tensors[name] = packed.view(torch.int8)
        tensors[f"{name.removesuffix('weight')}scale"] = exponents.view(torch.float8_e8m0fnu)
    write(directory, tensors, FP8)


def in_fp8(directory: Path) -> None:
    """Products in blocks of [64, 32]: tp 2 cuts those of 64 rows."""
    tensors = stored(directory)
    for name in [name for name in tensors if ".experts." in name or "_proj." in name]:
        rows, columns = tensors[name].shape
        tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // 64), columns // 32) + 0.1
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    write(directory, tensors, {"quant_method": "fp8", "weight_block_size": [64, 32]})


STORED = {"gpt_oss": in_mxfp4, "qwen3_moe": in_fp4, "mixtral": in_fp8}


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["tp 2", "ep 2", "ep 2, tp 2"])
@pytest.mark.parametrize("family", STORED)
def test_the_ranks_of_a_plan_read_their_parts(family, layout, tmp_path):
    saved(family, tmp_path)
    STORED[family](tmp_path)
    decided = planned(tmp_path, layout)
    kind = "MXFP4" if family == "gpt_oss" else "FP8"
    assert [row.what for row in decided.diagnostics if "stored" in row.what] == [
        f"the weights are stored in {kind}; they are trained and exported in float32"
    ]
    assert_ranks_read_their_parts(decided, tmp_path)
    assert not any(tensor.is_meta for tensor in load_model(f"hf:{tmp_path}", materialize=True).parameters())

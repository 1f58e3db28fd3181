"""Weights that are stored in FP8 and FP4, against references of the published formats, and those that do not fit."""

import json
import shutil
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
from tests.tools.hub_directories import assert_ranks_read_their_parts, planned, saved, stored

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
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / SINGLE, {"format": "pt"})
    path = directory / "config.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | ({"quantization_config": settings} if settings else {})))
    return directory


def assert_parts(directory: Path, wanted: Tensor, name: str = "up.weight") -> None:
    with WeightFiles(directory) as files:
        assert list(files.tensors) == [name]
        assert files.tensors[name].shape == tuple(wanted.shape)
        for dim, size in enumerate(wanted.shape):
            for first, last in ((0, size), (0, size // 2), (size // 2, size), (1, 2), (size // 4, size - 1)):
                value = torch.empty_like(wanted.narrow(dim, first, last - first)).contiguous()
                read_ranges(value, files.source(name), {dim: ((first, last),)}, files.read)
                assert torch.equal(value, wanted.narrow(dim, first, last - first)), (dim, first, last)


@pytest.mark.parametrize("kind", ["block", "row", "tensor"])
@pytest.mark.parametrize("shape", [(576, 7168), (192, 256), (640, 200)], ids=str)
def test_parts_of_a_weight_are_bitwise_those_of_the_format(shape, kind, tmp_path):
    held, scale, wanted = quantised(shape, kind)
    write(tmp_path, {"up.weight": held, "up.weight_scale_inv": scale, "up.input_scale": torch.ones(())})
    assert_parts(tmp_path, wanted)


@pytest.mark.parametrize("kind", ["floats", "e8m0", "bytes"])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
def test_scales_have_several_names_and_may_be_exponents(name, kind, tmp_path):
    held, exponents = torch.randn(192, 256).to(torch.float8_e4m3fn), torch.randint(120, 130, (2, 2), dtype=torch.uint8)
    powers = torch.pow(2.0, exponents.float() - 127)
    scale = {"floats": powers, "e8m0": exponents.view(torch.float8_e8m0fnu), "bytes": exponents}[kind]
    write(tmp_path, {"up.weight": held, f"up.{name}": scale})
    full = powers.repeat_interleave(BLOCK, 0)[:192].repeat_interleave(BLOCK, 1)
    assert_parts(tmp_path, (held.float() * full).bfloat16())


def settings_of(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "symmetric": True, **weights}}
    others = {"targets": ["re:.*router"], "weights": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"0": others, "1": group},
    }


COMPRESSED = {
    "tensor": ({"strategy": "tensor"}, lambda rows, columns: [1]),
    "channel": ({"strategy": "channel"}, lambda rows, columns: [rows, 1]),
    "group": ({"strategy": "group", "group_size": 40}, lambda rows, columns: [rows, columns // 40]),
    "block": (
        {"strategy": "block", "block_structure": [96, 64]},
        lambda rows, columns: [-(-rows // 96), -(-columns // 64)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_are_read_as_their_package_reads_them(kind, dtype, tmp_path):
    """Block sizes stand with each group of modules."""
    package = pytest.importorskip("compressed_tensors")
    weights, sizes = COMPRESSED[kind]
    settings, shape = settings_of(**weights), (640, 200)
    scheme = package.quantization.QuantizationScheme(**settings["config_groups"]["1"])
    compressor = package.BaseCompressor.get_value_from_registry("float-quantized")
    scale = (torch.rand(sizes(*shape)) * 0.01 + 0.01).to(dtype)
    held = compressor.compress({"weight": torch.randn(shape).to(dtype), "weight_scale": scale}, scheme)
    assert held["weight"].dtype == torch.float8_e4m3fn
    write(tmp_path, {f"up.{name}": tensor.contiguous() for name, tensor in held.items()}, settings)
    wanted = compressor.decompress(held, scheme)["weight"]
    assert wanted.dtype == dtype
    assert_parts(tmp_path, wanted)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_without_their_package(kind, tmp_path):
    weights, sizes = COMPRESSED[kind]
    shape = rows, columns = 640, 200
    held, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(sizes(*shape)) + 0.1
    high, wide = weights.get("block_structure") or (rows if kind == "tensor" else 1, weights.get("group_size", columns))
    full = scale.view(-(-rows // high), -1)[torch.arange(rows)[:, None] // high, torch.arange(columns) // wide]
    write(tmp_path, {"up.weight": held, "up.weight_scale": scale}, settings_of(**weights))
    assert_parts(tmp_path, (held.float() * full).bfloat16())


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
    (tmp_path / "fp8").mkdir()
    shutil.copy(tmp_path / "in" / "config.json", tmp_path / "fp8")
    write(tmp_path / "fp8", stored)
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
    "blocks that are none": (
        {"up.weight": WEIGHT, "up.weight_scale_inv": torch.ones(2, 2)},
        {**FP8, "weight_block_size": ["2", 0], "config_groups": {"0": {"weights": {"group_size": -1}}, "1": 3}},
        "fits neither rows nor blocks",
    ),
    "gptq": ({"up.weight": torch.ones(4, 4)}, {"quant_method": "gptq"}, "quantised by 'gptq', which is not read"),
}


@pytest.mark.parametrize("case", BAD)
def test_weights_that_do_not_fit_their_scales_are_an_error(case, tmp_path):
    tensors, settings, words = BAD[case]
    with pytest.raises(PlanError, match=words) as caught:
        WeightFiles(write(tmp_path, tensors, settings))
    named = SINGLE if "by '" not in words else "config.json"
    assert caught.value.where == str(tmp_path / named)


def test_fp8_in_a_directory_without_a_config_is_an_error(tmp_path):
    write(tmp_path, {"up.weight": WEIGHT, "up.weight_scale_inv": SCALE})
    (tmp_path / "config.json").unlink()
    with pytest.raises(PlanError, match=r"up\.weight in model\.safetensors is stored in FP8, but config\.json has no"):
        WeightFiles(tmp_path)


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


FP4 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


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


def test_parts_of_stacked_experts_in_mxfp4_are_bitwise_those_of_the_format(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, exponents, wanted = drawn(4, 96, 160)
    blocks = packed.view(4, 96, 5, 16)
    write(tmp_path, {"up_blocks": blocks, "up_scales": exponents}, MXFP4)
    assert_parts(tmp_path, wanted.transpose(1, 2), "up")
    assert torch.equal(convert_moe_packed_tensors(blocks, exponents), wanted.transpose(1, 2))


@pytest.mark.parametrize("kind", ["e8m0", "bytes", "floats"])
@pytest.mark.parametrize("shape", [(48, 96), (3, 40, 64)], ids=str)
def test_parts_of_packed_experts_are_bitwise_those_of_the_format(kind, shape, tmp_path):
    packed, exponents, wanted = drawn(*shape)
    e8m0 = exponents.view(torch.float8_e8m0fnu)
    scale = {"e8m0": e8m0, "bytes": exponents, "floats": e8m0.float()}[kind]
    write(tmp_path, {"up.weight": packed.view(torch.int8), "up.scale": scale}, FP4)
    assert_parts(tmp_path, wanted)


def test_the_smallest_and_the_largest_exponent_are_exact(tmp_path):
    packed, exponents = torch.full((2, 16), 0x17, dtype=torch.uint8), torch.tensor([[0], [254]], dtype=torch.uint8)
    write(tmp_path, {"up.weight": packed, "up.scale": exponents}, FP4)
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
    write(directory, tensors, FP4)


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

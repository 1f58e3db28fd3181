"""Files of the Hub that do not fit the model: one error with file and tensor, and other files beside them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from passes.errors import PlanError
from runtime.checkpoint.conversion import export, import_weights
from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.safetensors_files import INDEX, SINGLE

pytest.importorskip("transformers")

from tests.tools.checkpoints import assert_same
from tests.tools.hub_directories import found_in, saved, stored


def without(*parts: str) -> Any:
    return lambda tensors: {n: t for n, t in tensors.items() if not all(part in n for part in parts)}


def renumbered(shift: Any) -> Any:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            found[f"{before}.experts.{shift(int(number))}.{rest}" if after else name] = tensor
        return found

    return change


LAYER = "model.layers.0.mlp.experts"
DAMAGES = {
    "an expert inside": (
        without("layers.0.", "experts.2."),
        rf"{LAYER}\.\*\.down_proj\.weight: number 2 is absent, the files have 3 up to number 3",
    ),
    "the last expert": (
        without("layers.0.", "experts.3."),
        rf"6 tensors like {LAYER}\.0\.gate_proj\.weight in model\.safetensors make {LAYER}\.gate_up_proj \[3, 64, 32\]",
    ),
    "one of a pair": (without("layers.0.mlp.experts.1.up_proj"), r"experts\.\*\.up_proj\.weight: number 1 is absent"),
    "all of a pair": (
        without("layers.0.mlp.experts", "up_proj"),
        r"4 tensors like .*gate_proj\.weight do not make .*gate_up_proj",
    ),
    "all experts": (without("layers.0.mlp.experts"), rf"absent: {LAYER}\.gate_up_proj, {LAYER}\.down_proj"),
    "counted from 1": (renumbered(lambda number: number + 1), r"number 0 is absent, the files have 4 up to number 4"),
    "one of another shape": (
        lambda tensors: tensors | {f"{LAYER}.1.down_proj.weight": torch.zeros(5, 5)},
        r"4 tensors like model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight do not make",
    ),
    "in two formats": (
        lambda tensors: tensors | {f"{LAYER}.down_proj": torch.zeros(4, 32, 32)},
        rf"stored twice under different names in model\.safetensors: {LAYER}",
    ),
    "once more, of a compiled model": (
        lambda tensors: tensors | {"_orig_mod.lm_head.weight": torch.zeros(96, 32)},
        r"stored twice under different names in model\.safetensors: .*lm_head\.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_experts_that_do_not_fit_are_an_error_with_their_names(damage, tmp_path):
    saved("qwen3_moe", tmp_path)
    change, words = DAMAGES[damage]
    save_file(change(stored(tmp_path)), tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(PlanError, match=words) as caught:
        found_in(tmp_path)
    assert caught.value.where == str(tmp_path / SINGLE)


def in_shards(directory: Path, change: Any = dict, *lists: str) -> list[Path]:
    """The file of ``directory`` as two and an index, with ``change``; ``lists``: tensors that the index has beside."""
    tensors = change(stored(directory))
    (directory / SINGLE).unlink()
    names, paths = sorted(tensors), [directory / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    for path, part in zip(paths, parts, strict=True):
        save_file({name: tensors[name] for name in part}, path)
    places = {name: path.name for path, part in zip(paths, parts, strict=True) for name in part}
    text = json.dumps({"weight_map": {**places, **dict.fromkeys(lists, paths[0].name)}})
    (directory / INDEX).write_text(text)
    return paths


EXPERT = f"{LAYER}.2.down_proj.weight"
SHARDED = {
    "an expert inside": (without(EXPERT), (), r"down_proj\.weight: number 2 is absent, the files have 3 up to"),
    "an expert of the index alone": (
        without(EXPERT),
        (EXPERT,),
        rf"places {EXPERT} in model-00001-of-00002\.safetensors, which does not hold it",
    ),
    "the last expert": (
        without("layers.0.", "experts.3."),
        (),
        r"gate_proj\.weight in model-00001-of-00002\.safetensors make .*gate_up_proj \[3, 64, 32\]",
    ),
    "two for one": (
        lambda tensors: tensors | {"_orig_mod.model.norm.weight": torch.ones(32)},
        (),
        r"in model-00001-of-00002\.safetensors, model-00002-of-00002\.safetensors: .*model\.norm\.weight",
    ),
}


@pytest.mark.parametrize("damage", SHARDED)
def test_shards_that_do_not_fit_are_an_error_with_their_names(damage, tmp_path):
    saved("qwen3_moe", tmp_path)
    change, lists, words = SHARDED[damage]
    in_shards(tmp_path, change, *lists)
    with pytest.raises(PlanError, match=words):
        found_in(tmp_path)


def test_a_half_written_shard_is_an_error_with_its_name(tmp_path):
    saved("qwen3_moe", tmp_path)
    first, second = in_shards(tmp_path)
    assert found_in(tmp_path).parameters
    second.write_bytes(second.read_bytes()[: second.stat().st_size // 2])
    with pytest.raises(PlanError, match=rf"{re.escape(second.name)} is truncated") as caught:
        found_in(tmp_path)
    assert caught.value.where == str(second)
    first.write_bytes(b"")
    with pytest.raises(PlanError, match=rf"{re.escape(first.name)} is truncated"):
        found_in(tmp_path)


def test_other_files_beside_shards_are_not_read_and_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    saved("mixtral", tmp_path)
    wanted = stored(tmp_path)
    in_shards(tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    save, _ = import_weights(tmp_path, tmp_path / "run")
    assert "not read: consolidated.safetensors" in capsys.readouterr().err
    export(save, read_manifest(save)[0], tmp_path / "out")
    assert_same(stored(tmp_path / "out"), wanted)


IGNORED = {  # of the layers that predict further tokens
    "deepseek_v3": [
        "model.layers.61.eh_proj.weight",
        *(f"model.layers.61.mlp.experts.{i}.up_proj.weight" for i in (0, 1)),
    ],
    "qwen3_next": ["mtp.fc.weight", *(f"mtp.layers.0.mlp.experts.{i}.down_proj.weight" for i in (0, 1))],
    "deepseek_v4": ["mtp.0.hc_head_fn", *(f"mtp.0.ffn.experts.{i}.w1.weight" for i in (0, 1))],
}


@pytest.mark.parametrize("family", IGNORED)
def test_tensors_that_a_model_ignores_are_neither_read_nor_written(family, tmp_path):
    saved(family, tmp_path / "in")
    given = stored(tmp_path / "in")
    more = {name: torch.ones(2, 2) for name in IGNORED[family]}
    save_file(given | more, tmp_path / "in" / SINGLE, {"format": "pt"})
    save, _ = import_weights(tmp_path / "in", tmp_path / "run")
    export(save, read_manifest(save)[0], tmp_path / "out")
    assert_same(stored(tmp_path / "out"), given)

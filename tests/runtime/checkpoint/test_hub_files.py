"""Files of the Hub that hold other tensors than the model: read by parts, against transformers' own loading."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from passes.errors import PlanError
from planner import plan
from planner.capture.model.assembly import sources
from planner.capture.model.hub_format import hub_format
from planner.capture.model.meta_init import meta_parameters
from planner.capture.model.reference import CONFIG, load_model, named
from planner.frozen_plan import Plan
from planner.sharding.boxes import Box
from planner.spec.spec import Spec
from runtime.checkpoint.conversion import described, export, import_weights
from runtime.checkpoint.hub_tensors import names_in, read_into, read_ranges, stored_names
from runtime.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from runtime.checkpoint.pieces import PieceReader
from runtime.checkpoint.pretrained_load import find_in
from runtime.checkpoint.safetensors_files import SINGLE, SafetensorsFiles
from runtime.checkpoint.saves import resolve
from runtime.engine.engine import Engine

pytest.importorskip("transformers")

from tests.models.hub_families import FAMILIES
from tests.models.hugging_face import ZOO, made
from tests.models.vllm_names import SIZES, VLLM
from tests.tools.checkpoints import Own, assert_same, own_checkpoint, own_engine, write
from tests.tools.hub_directories import (
    LAYOUTS,
    assert_ranks_read_their_parts,
    batch,
    found_in,
    planned,
    saved,
    spec_of,
    stored,
)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_that_a_rank_may_hold_is_that_of_the_loaded_model(family, tmp_path):
    saved(family, tmp_path)
    wanted = load_model(f"hf:{tmp_path}", materialize=True).state_dict()
    found = found_in(tmp_path)
    with SafetensorsFiles(tmp_path) as files:
        for name, (assembly, *_) in found.parameters.items():
            for dim, size in enumerate(wanted[name].shape):
                ranges = {dim: ((0, size // 2),)}, {dim: ((size // 2, size + 1),)}, {dim: ((0, 1), (size // 2, size))}
                for of_dim in ranges:
                    part = [wanted[name].narrow(dim, a, min(b, size) - a) for a, b in of_dim[dim]]
                    value = torch.zeros(torch.cat(part, dim).shape)
                    read_ranges(value, assembly, of_dim, files.read)
                    assert torch.equal(value, torch.cat(part, dim)), (name, of_dim)


def test_a_half_of_the_experts_touches_only_their_tensors(tmp_path):
    saved("mixtral", tmp_path)
    read: list[str] = []
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (assembly,) = found_in(tmp_path).parameters[name]
    read_ranges(torch.empty(2, *assembly.shape[1:]), assembly, {0: ((2, 4),)}, lambda name, *_: read.append(name))
    at = "model.layers.0.block_sparse_moe.experts"
    assert sorted(read) == [f"{at}.{expert}.{w}.weight" for expert in (2, 3) for w in ("w1", "w3")]


def test_files_in_the_models_own_format_load_too(tmp_path):
    made(FAMILIES["qwen3_moe"]).save_pretrained(tmp_path, save_original_format=False)
    assert all(len(list(sources(each))) == 1 for each in found_in(tmp_path).parameters.values())


def test_a_conversion_that_a_user_registers_is_followed(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Doubled(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> dict[str, Tensor]:
            ((tensor,),) = input_dict.values()
            return {target_patterns[0]: (tensor * 2).t().contiguous()}

    class OwnLlama(LlamaForCausalLM):
        pass

    converter = WeightConverter("lm_head.halved", "lm_head.weight", [Doubled()])
    register_checkpoint_conversion_mapping("OwnLlama", [converter], overwrite=True)
    with meta_parameters():
        model = OwnLlama(LlamaConfig(vocab_size=12, hidden_size=8, num_attention_heads=1, num_hidden_layers=0))
    halved, other = torch.randn(8, 12), torch.ones(12, 8)
    save_file(
        {"lm_head.halved": halved, "model.embed_tokens.weight": other, "model.norm.weight": torch.ones(8)},
        tmp_path / SINGLE,
    )
    with SafetensorsFiles(tmp_path) as files:
        (assembly,) = find_in(files, hub_format(model), described(model)).parameters["lm_head.weight"]
        value = torch.empty(6, 8)
        read_ranges(value, assembly, {0: ((6, 12),)}, files.read)
    assert torch.equal(value, (halved * 2).t()[6:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_that_a_plan_keeps_are_those_that_transformers_saves(family, tmp_path):
    model = saved(family, tmp_path)
    hub, held = hub_format(model), model.state_dict()
    files = stored(tmp_path)
    for name, assembly in hub.stored_names.items():
        value = torch.empty(assembly.shape)
        whole = Box.whole(assembly.shape)
        read_into(value, assembly, whole, lambda name, box, target: target.copy_(held[name][slices(box)]))
        assert torch.equal(value, files[name]), name
    others = {name: tensor for name, tensor in files.items() if name not in hub.stored_names}
    assert all(torch.equal(tensor, held[name]) for name, tensor in others.items())


def test_an_import_makes_the_models_tensors(tmp_path):
    saved("mixtral", tmp_path / "in")
    save, _ = import_weights(tmp_path / "in", tmp_path / "run", bucket_bytes=1)
    wanted = load_model(f"hf:{tmp_path / 'in'}", materialize=True).state_dict()
    manifest, _ = read_manifest(save)
    with PieceReader(save, manifest) as reader:
        for name, entry in manifest.tensors.items():
            value = torch.empty(entry.shape)
            reader.read_into(value, name, "parameter", Box.whole(entry.shape))
            assert torch.equal(value, wanted[name]), name


@pytest.mark.thorough
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ranks_of_a_plan_read_their_parts(family, layout, tmp_path):
    saved(family, tmp_path)
    assert_ranks_read_their_parts(planned(tmp_path, layout), tmp_path)


@pytest.mark.thorough
def test_a_plan_on_disk_converts_without_the_model(tmp_path):
    saved("mixtral", tmp_path)
    planned(tmp_path, "ep 2, tp 2").save(tmp_path / "plan.pt")
    assert_ranks_read_their_parts(Plan.load(tmp_path / "plan.pt"), tmp_path)


# ---- and out again


def assert_files(directory: Path, wanted: dict[str, Tensor]) -> None:
    assert_same(stored(directory), wanted)


@pytest.mark.thorough
def test_one_engine_writes_the_files_it_read(tmp_path):
    saved("mixtral", tmp_path / "in")
    files, own = stored(tmp_path / "in"), load_model(f"hf:{tmp_path / 'in'}", materialize=True).state_dict()
    with Engine(planned(tmp_path / "in", "one")) as engine:
        engine.save_pretrained(tmp_path / "fresh")
        engine.load_pretrained(tmp_path / "in")
        engine.save_pretrained(tmp_path / "hub")
        engine.save_pretrained(tmp_path / "model", names="model")
        engine.save(tmp_path / "run")
        buckets = [bucket for names in ("hf", "model") for bucket in engine.stream_weights(names=names)]
        with pytest.raises(PlanError, match="unknown names 'hub'"):
            engine.save_pretrained(tmp_path / "other", names="hub")
    assert stored(tmp_path / "fresh").keys() == files.keys()
    assert_files(tmp_path / "hub", files)
    assert_files(tmp_path / "model", own)
    assert_same(buckets[0], files)
    assert_same(buckets[1], own)
    save = resolve(tmp_path / "run")
    export(save, read_manifest(save)[0], tmp_path / "hub again")
    export(save, read_manifest(save)[0], tmp_path / "model again", names="model")
    assert_files(tmp_path / "hub again", files)
    assert_files(tmp_path / "model again", own)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_import_is_exported_as_the_files_it_was(family, tmp_path):
    saved(family, tmp_path / "in")
    save, _ = import_weights(tmp_path / "in", tmp_path / "run")
    export(save, read_manifest(save)[0], tmp_path / "out")
    assert_files(tmp_path / "out", stored(tmp_path / "in"))


def test_a_directory_in_the_models_format_is_exported_in_it(tmp_path):
    made(FAMILIES["qwen3_moe"]).save_pretrained(tmp_path / "in", save_original_format=False)
    save, _ = import_weights(tmp_path / "in", tmp_path / "run")
    manifest, _ = read_manifest(save)
    export(save, manifest, tmp_path / "out")
    assert_files(tmp_path / "out", stored(tmp_path / "in"))
    model = load_model(f"hf:{tmp_path / 'in'}")
    assert stored_names(hub_format(model), names_in(manifest)).keys() == stored(tmp_path / "in").keys()


def test_both_copies_of_a_tied_tensor_are_written_again(tmp_path):
    given = {**own_checkpoint(), "head.weight": own_checkpoint()["embed.weight"].clone()}
    engine = own_engine(Own())
    engine.load_pretrained(write(tmp_path / "in", given))
    engine.save_pretrained(tmp_path / "out")
    assert_files(tmp_path / "out", given)


@pytest.mark.parametrize("damage", [{"Source": ["up.weight", [4, 5]]}, {"Source": ["else", [4, 4]]}, {"Run": []}, [1]])
def test_a_save_with_names_of_other_tensors_is_damaged(damage, tmp_path):
    save, _ = import_weights(write(tmp_path / "in", own_checkpoint()), tmp_path / "run", f"{own_file(tmp_path)}:Own")
    manifest, _ = read_manifest(save)
    (save / MANIFEST).unlink()
    with pytest.raises(PlanError, match="damaged"):
        write_manifest(save / MANIFEST, manifest.model_copy(update={"stored_names": {"up": damage}}))


def own_file(directory: Path) -> Path:
    path = directory / "own.py"
    path.write_text("from tests.tools.checkpoints import Own\n")
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_embedding_that_is_stored_twice_is_read_once_and_written_twice(is_equal, tmp_path):
    tied = replace(ZOO["llama"], sizes=ZOO["llama"].sizes | {"tie_word_embeddings": True})
    made(tied).save_pretrained(tmp_path / "in")
    files = stored(tmp_path / "in")
    files["lm_head.weight"] = files["model.embed_tokens.weight"] + (not is_equal)
    save_file(files, tmp_path / "in" / SINGLE, {"format": "pt"})
    with Engine(planned(tmp_path / "in", "one")) as engine:
        if not is_equal:
            with pytest.raises(PlanError, match="differ in the checkpoint, but are one tied parameter"):
                engine.load_pretrained(tmp_path / "in")
            return
        engine.load_pretrained(tmp_path / "in")
        engine.save_pretrained(tmp_path / "out")
    assert_files(tmp_path / "out", files)


@pytest.mark.thorough
def test_adapters_of_experts_are_merged_into_the_files_names(tmp_path):
    peft = pytest.importorskip("peft")
    saved("mixtral", tmp_path / "in")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"r": 2, "target_modules": ["q_proj"], "target_parameters": targets, "lora_dropout": 0.0}
    peft.LoraConfig(task_type="CAUSAL_LM", **settings).save_pretrained(tmp_path / "peft")
    model = load_model(named(f"hf:{tmp_path / 'in'}", tmp_path / "peft" / CONFIG))
    with Engine(plan(model, Spec.load(spec_of("one")))) as engine:
        engine.load_pretrained(tmp_path / "in")
        for _ in range(2):
            engine.train_step(batch())
        engine.save_adapters(tmp_path / "adapters")
        engine.save_merged(tmp_path / "out")
        engine.save(tmp_path / "run")
    save = resolve(tmp_path / "run")
    export(save, read_manifest(save)[0], tmp_path / "exported")
    base: Any = load_model(f"hf:{tmp_path / 'in'}", materialize=True)
    peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().save_pretrained(tmp_path / "wanted")
    wanted, given = stored(tmp_path / "wanted"), stored(tmp_path / "in")
    assert wanted.keys() == given.keys()
    assert sum(not torch.equal(wanted[name], given[name]) for name in given) == 2 + 2 * 4 * 3
    assert_files(tmp_path / "out", wanted)
    assert_files(tmp_path / "exported", wanted)


def as_on_the_hub(name: str) -> str:
    """transformers' own saves give DeepSeek-V4's tensors other names than its files on the Hub have."""
    name = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


@pytest.mark.parametrize("family", VLLM)
def test_an_export_has_the_names_that_vllm_reads(family, tmp_path):
    saved(family, tmp_path / "in", **SIZES.get(family, {}))
    if family == "deepseek_v4":
        files = {as_on_the_hub(name): tensor for name, tensor in stored(tmp_path / "in").items()}
        save_file(files, tmp_path / "in" / SINGLE, {"format": "pt"})
    save, _ = import_weights(tmp_path / "in", tmp_path / "run")
    export(save, read_manifest(save)[0], tmp_path / "out")
    assert_files(tmp_path / "out", stored(tmp_path / "in"))
    assert {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in stored(tmp_path / "out")} == VLLM[family]

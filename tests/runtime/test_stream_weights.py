"""Streams of weights in one process: merged adapters, directories, and bad input as one error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.gpt import GPT
from planner import Plan, PlanError, plan
from runtime import Engine
from runtime.engine.stream import StreamWarning

LENGTH, VOCABULARY = 8, 64


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, length=LENGTH, width=32, num_layers=2, num_heads=4)


def plan_of(model: torch.nn.Module, **more: Any) -> Plan:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    inputs = {"input_ids": ids, "targets": {"like": "input_ids"}}
    return plan(model, {"mesh": {"dp": 1}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, **more})


def batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "targets": ids}


def test_a_reader_that_goes_away_is_reported_once_and_training_continues():
    def failing(bucket: dict[str, Tensor]) -> None:
        raise ConnectionError("no route")

    with Engine(plan_of(gpt())) as engine:
        with pytest.warns(StreamWarning, match="ConnectionError: no route") as found:
            assert not engine.stream_weights(failing, bucket_bytes=10_000)
        assert len(found) == 1
        assert engine.train_step(batch()).loss > 0
        assert engine.stream_weights(lambda bucket: None)


def test_the_loop_ends_before_a_step():
    with Engine(plan_of(gpt())) as engine:
        buckets = engine.stream_weights(bucket_bytes=10_000)
        next(buckets)
        engine.train_step(batch())
        with pytest.raises(PlanError, match="a step has changed the weights in the middle of a stream"):
            next(buckets)


@pytest.mark.thorough
def test_a_directory_replaces_an_earlier_stream(tmp_path):
    with Engine(plan_of(gpt())) as engine:
        for size in (10_000, 40_000, 10_000_000):
            engine.train_step(batch())
            assert engine.stream_weights(tmp_path / "weights", bucket_bytes=size)
        parameters = engine.gather_parameters()
        engine.load_pretrained(tmp_path / "weights")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "weights" / "model.safetensors")
    assert all(found[name].equal(parameters[name]) for name in found)
    assert found.keys() == parameters.keys() - {"head.weight"}


@pytest.mark.thorough
def test_adapters_are_merged_on_the_way(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    inputs = {"input_ids": ids, "labels": {"like": "input_ids"}}
    found: dict[str, Tensor] = {}
    with Engine(plan(model, {"mesh": {"dp": 1}, "batch": {"global": 4, "micro": 2}, "inputs": inputs})) as engine:
        assert engine.stream_weights(found.update, merged=True, bucket_bytes=10_000)
        engine.save_merged(tmp_path / "merged")
        with pytest.raises(PlanError, match="merged=True for the base"):
            engine.stream_weights(found.update)
        own = [name for bucket in engine.stream_weights(names="all") for name in bucket]
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == saved.keys()
    assert all(found[name].equal(saved[name]) for name in saved)
    assert any("lora_A" in name for name in own)


BAD: dict[str, tuple[Callable[[Engine, Path], object], str]] = {
    "names": (lambda engine, path: engine.stream_weights(names="vllm"), "unknown names 'vllm'"),
    "bytes": (lambda engine, path: engine.stream_weights(bucket_bytes=0), "bucket_bytes is 0"),
    "reader": (lambda engine, path: engine.stream_weights(7), "weights cannot be streamed to a int"),  # pyright: ignore
    "a file": (lambda engine, path: engine.stream_weights(path / "file"), "cannot write the weights: "),
    "no adapters": (lambda engine, path: engine.stream_weights(merged=True), "has no adapters of peft"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error(tmp_path, case):
    (tmp_path / "file").write_text("")
    call, words = BAD[case]
    with Engine(plan_of(gpt())) as engine, pytest.raises(PlanError, match=words):
        call(engine, tmp_path)

"""Streams of weights in one process: process groups, merged adapters, directories, and bad input as one error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from examples.gpt import GPT
from planner import Plan, PlanError, plan
from runtime import Engine, receive_weights
from runtime.engine_stream import StreamWarning
from tests.tools.limits import HANG_SECONDS

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


class Readers:
    """Threads that receive what the first rank of a gloo group streams. ``found``: by reader, name → tensor."""

    def __init__(self, number: int, most: int = 1000) -> None:
        self.store, self.size, self.most = dist.HashStore(), number + 1, most
        self.found: list[dict[str, Tensor]] = [{} for _ in range(number)]
        self.num_buckets = [0] * number
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(number)]
        for thread in self._threads:
            thread.start()
        self.group = self._group(0)

    def _group(self, rank: int) -> Any:
        return dist.ProcessGroupGloo(self.store, rank, self.size, timedelta(seconds=HANG_SECONDS))

    def _read(self, reader: int) -> None:
        for bucket in receive_weights(self._group(reader + 1)):
            self.found[reader] |= bucket
            self.num_buckets[reader] += 1
            if self.num_buckets[reader] == self.most:
                return

    def join(self) -> None:
        for thread in self._threads:
            thread.join(HANG_SECONDS)


def test_a_process_group_gets_full_tensors():
    with Engine(plan_of(gpt(), precision={"parameters": "bfloat16"})) as engine:
        engine.train_step(batch())
        readers = Readers(2)
        assert engine.stream_weights(readers.group, bucket_bytes=10_000)
        readers.join()
        parameters = engine.gather_parameters()
    for found in readers.found:
        assert found.keys() == parameters.keys() - {"head.weight"}
        assert all(found[name].equal(parameters[name]) for name in found)
        assert found["tokens.weight"].dtype == torch.bfloat16
    assert readers.num_buckets[0] > 3


@pytest.mark.thorough
def test_each_reader_gets_its_shards_of_a_layout():
    layout = plan_of(gpt(), mesh={"tp": 2})
    with Engine(plan_of(gpt())) as engine:
        engine.train_step(batch())
        parameters = engine.gather_parameters()
        readers = Readers(2)
        assert engine.stream_weights(readers.group, layout=layout, bucket_bytes=10_000)
        readers.join()
    first, second = readers.found
    up = "blocks.0.mlp.up.weight"
    assert torch.cat([first[up], second[up]]).equal(parameters[up])
    assert first["norm.weight"].equal(parameters["norm.weight"])
    assert all(tuple(first[row.name].shape) == row.local_shape for row in layout.parameters)


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
    "layout": (lambda engine, path: engine.stream_weights(layout={"tp": 2}), "the layout is a dict, not a plan"),  # pyright: ignore
    "another model": (
        lambda engine, path: engine.stream_weights(layout=plan_of(GPT(VOCABULARY, LENGTH, 16, 1, 2))),
        "the layout is of another model: ",
    ),
    "reader": (lambda engine, path: engine.stream_weights(7), "weights cannot be streamed to a int"),  # pyright: ignore
    "a file": (lambda engine, path: engine.stream_weights(path / "file"), "cannot write the weights: "),
    "no adapters": (lambda engine, path: engine.stream_weights(merged=True), "has no adapters of peft"),
    "a directory of shards": (
        lambda engine, path: engine.stream_weights(path / "weights", layout=engine.plan),
        "a directory gets full tensors",
    ),
    "too few readers": (
        lambda engine, path: engine.stream_weights(
            dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=HANG_SECONDS)), layout=engine.plan
        ),
        "has 0 readers, and the layout 1 ranks",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error(tmp_path, case):
    (tmp_path / "file").write_text("")
    call, words = BAD[case]
    with Engine(plan_of(gpt())) as engine, pytest.raises(PlanError, match=words):
        call(engine, tmp_path)

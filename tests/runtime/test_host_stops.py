"""A step asks for no value and hands up no number, from its first forward to the end of its update.

On a GPU each of these would hold the host until the device is done, and then leave the device without work. What they
would do there they show on the CPU, too: the ops are the same.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import passes.dropout
from passes.ops.dropout import stream_attention, stream_dropout
from planner import Plan, plan
from planner.lower import lower
from runtime import Engine
from runtime.checkpoint.saver import content_of
from runtime.optimizer.zero1 import DistributedOptimizer, StepResult
from tests.models import experts
from tests.models.families import Entry, hugging_face
from tests.tools.host_watch import HostWatch, Sight

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
TOKENS = {name: ((12,), torch.int64, experts.VOCABULARY) for name in ("input_ids", "labels")}
MODELS: dict[str, Callable[[], Entry]] = {
    "gpt2": lambda: hugging_face("GPT2:LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=16),
    "llama": lambda: hugging_face("Llama:ForCausalLM", **SMALL, intermediate_size=64, attention_dropout=0.1),
    "experts": lambda: Entry(experts.Blocks(partial(experts.Layer, experts.stacked)), TOKENS),
    "bert": lambda: hugging_face("Bert:ForMaskedLM", **SMALL, intermediate_size=64),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"parameters": "bfloat16"},
    "float16": {"parameters": "float16", "loss_scale": "dynamic"},
}


@cache
def built(
    model: str, precision: str, clip: float | None = 1.0, bucket_size: int | None = None
) -> tuple[Plan, nn.Module, Entry]:
    """A plan for one rank; the model trains with dropout, and is kept for the engines."""
    torch.manual_seed(0)
    entry = MODELS[model]()
    found = entry.inputs.items()
    inputs = {name: {"shape": list(shape), "dtype": "int64", "high": high} for name, (shape, _, high) in found}
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, "precision": PRECISIONS[precision]}
    options = {"clip_grad_norm": clip, "bucket_size": bucket_size}
    decided = plan(entry.model.train(), spec | {"optimizer": options})
    return decided, entry.model, entry


def sights_of_a_step(model: str, precision: str, clip: float | None = 1.0) -> list[Sight]:
    decided, _, entry = built(model, precision, clip)
    with Engine(decided) as engine:
        engine.train_step(entry.batch(4, 0))
        with HostWatch(engine.program) as watch:
            report = engine.train_step(entry.batch(4, 1))
        assert watch.num_ops > 200
        assert not report.skipped
    return watch.sights


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_with_dropout_and_clip_stops_the_host_nowhere(model: str, precision: str) -> None:
    assert sights_of_a_step(model, precision) == []


@pytest.mark.thorough
def test_a_save_waits_for_the_device_as_often_however_many_buckets_there_are() -> None:
    waits = []
    for bucket_size in (1000, 10**9):
        decided, _, entry = built("gpt2", "float16", bucket_size=bucket_size)
        with Engine(decided) as engine:
            engine.train_step(entry.batch(4, 0))
            with HostWatch(engine.program) as watch:
                watch.has_begun = True
                content_of(engine.saves.training_state(), 1, engine.saver.line, {})
            waits.append((len(engine.optimizer.shards), len([s for s in watch.sights if s.kind == "stop"])))
    (many, first), (few, second) = waits
    assert many > 5 * few
    assert first == second <= 4, waits


@pytest.mark.thorough
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_without_clip_stops_the_host_nowhere(precision: str) -> None:
    assert sights_of_a_step("gpt2", precision, None) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", sorted(MODELS.keys() - {"experts"}))
def test_each_of_these_models_draws(model: str) -> None:
    decided, _, _ = built(model, "float32")
    called = {node.target for stage in lower(decided, 0).stages for node in stage.module.graph.nodes}
    assert called & {stream_dropout, stream_attention}


def _item_in_dropout(patch: pytest.MonkeyPatch) -> None:
    def asking(x: Tensor, *rest: Any) -> Tensor:
        return stream_dropout(x, *rest) if x.sum().isfinite().item() else x

    patch.setattr(passes.dropout.ops, "stream_dropout", asking)


def _norm_to_the_host(patch: pytest.MonkeyPatch) -> None:
    step = DistributedOptimizer.step

    def reading(self: Any, *args: Any, **kwargs: Any) -> StepResult:
        result = step(self, *args, **kwargs)
        assert len(result.figures.tolist()) >= 3
        return result

    patch.setattr(DistributedOptimizer, "step", reading)


def _number_to_the_device(patch: pytest.MonkeyPatch) -> None:
    update = DistributedOptimizer._update

    def updating(self: Any, lr: float, divisor: Tensor | None, found_inf: Tensor, asked: Tensor | None) -> None:
        update(self, lr, divisor, found_inf + torch.tensor(0.0), asked)

    patch.setattr(DistributedOptimizer, "_update", updating)


MUTANTS = {
    "item in dropout": (_item_in_dropout, "stop", "_local_scalar_dense"),
    "norm to the host": (_norm_to_the_host, "stop", "tolist"),
    "number to the device": (_number_to_the_device, "copy", "lift_fresh"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_seen(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    change, kind, op = MUTANTS[mutant]
    change(monkeypatch)
    seen = sights_of_a_step("gpt2", "float32")
    assert seen
    assert all(sight.kind == kind and op in sight.op and Path(__file__).name in sight.where for sight in seen)

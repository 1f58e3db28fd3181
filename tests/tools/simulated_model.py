"""Plan a whole model, lower it for every tp rank, run them as threads, and hold loss and gradients against the model.

The model is built twice by the same function and seed: what is planned and what is compared with share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planner import Plan
from planner.lower import lower
from planner.sharding.boxes import Part
from runtime.weights.shards import shard
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import run_step
from tests.tools.simulated_ranks import assert_typed, on_threads

Batch = dict[str, Tensor]


def spec_of(batch: Batch, tp: int, overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One microbatch of ``batch`` on tp ranks; a padded vocabulary is padded little."""
    rows = len(next(iter(batch.values())))
    inputs = {n: {"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")} for n, x in batch.items()}
    cut = {"overrides": dict(overrides or {}), "vocabulary_multiple": 8}
    return {"mesh": {"tp": tp}, "batch": {"global": rows, "micro": rows}, "inputs": inputs, "tensor_parallel": cut}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """The model in float64, with equal weights at every call; none is zero or one by initialisation."""
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def planned(make: Callable[[], nn.Module], batch: Batch, tp: int, overrides: Mapping[str, str] | None = None) -> Plan:
    return plan_again(built(make), spec_of(batch, tp, overrides))


def assert_equals_one_process(
    make: Callable[[], nn.Module], batch: Batch, tp: int = 2, overrides: Mapping[str, str] | None = None
) -> Plan:
    """Loss and every gradient of the ranks are those of the model alone, and every collective is in the plan."""
    model = built(make)
    made = plan_again(model, spec_of(batch, tp, overrides))
    programs = [lower(made, rank, thorough=True) for rank in range(tp)]
    for rank, program in enumerate(programs):
        _fill(program.stages[0], model, tp, rank)
    counts = programs[0].count_module
    totals = list(counts(*(batch[n] for n in programs[0].count_inputs))) if counts is not None else []

    def run(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        return run_step(programs[rank], batch, totals)

    ran = on_threads(tp, run)
    expected = _loss(built(make), batch)
    torch.testing.assert_close(ran[0][0], expected[0], rtol=1e-10, atol=1e-12)
    for local in programs[0].stages[0].parameters:
        truth = expected[1][local.fqn]
        grads = [found[local.fqn] for _, found in ran]
        assert_typed(grads, truth, local.placement, gradient=True, what=local.fqn)
    _assert_told(made, programs[0].axes["tp"].counts)
    return made


def _loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    returned = model(**batch)
    loss = returned if isinstance(returned, Tensor) else next(x for x in returned if x.dim() == 0)
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def _fill(stage: Any, model: nn.Module, tp: int, rank: int) -> None:
    for local in stage.parameters:
        value = shard(model.get_parameter(local.fqn).detach(), Part(local.placement, tp, rank)).clone()
        setattr(stage.module, stage.attributes[local.fqn], nn.Parameter(value, local.requires_grad))
    for fqn in stage.buffers:
        stage.module.register_buffer(stage.attributes[fqn], model.get_buffer(fqn).clone())


def _assert_told(made: Plan, counted: Mapping[tuple[str, str], int]) -> None:
    told: dict[tuple[str, str], int] = {}
    for row in made.collectives:
        if row.axis == "tp" and row.per == "microbatch":
            told[row.kind, row.phase] = told.get((row.kind, row.phase), 0) + row.count
    ran = {key: n for key, n in counted.items() if n}
    assert told == ran, f"the plan tells {told}, the ranks ran {ran}"


def num_collectives(made: Plan) -> int:
    """Exchanges of a microbatch over tp, forward and backward."""
    return sum(row.count for row in made.collectives if row.axis == "tp" and row.per == "microbatch")

"""Engines with and without graphs, trained alike; where they differ, to the last bit; and what each counted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime import Engine
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.specs import entry_inputs

SCOPES = [["attn"], ["mlp"], ["attn", "mlp"], [], ["full_iteration"]]
Trained = tuple[list[tuple[float, dict[str, Tensor], float]], dict[str, Tensor]]


def spec_of(entry: families.Entry, scope: list[str] | None, **sections: Any) -> dict[str, Any]:
    inputs = entry_inputs(entry)
    graphs = {} if scope is None else {"cuda_graphs": {"impl": "emulate", "scope": scope}}
    return {"mesh": {}, "batch": {"global": 8, "micro": 2}, "inputs": inputs, **graphs, **sections}


def engine_of(
    name: str, scope: list[str] | None, *, captures: bool = True, **sections: Any
) -> tuple[Engine, families.Entry]:
    """Graphs are captured before the first step, or with ``captures`` False after those of a test."""
    entry = families.build(name)
    if "dropout" in name:
        entry.model.train()
    engine = Engine(plan_again(entry.model, spec_of(entry, scope, **sections)), timeout_seconds=HANG_SECONDS)
    if engine.graphs is not None and captures:
        engine.capture_graphs()
    return engine, entry


def train(engine: Engine, entry: families.Entry, steps: int = 3) -> Trained:
    """Loss, every gradient and norm of each step, and the parameters after them."""
    return train_on(engine, [entry.batch(8, step) for step in range(steps)])


def train_on(engine: Engine, batches: Sequence[dict[str, Tensor]]) -> Trained:
    """A step of each batch."""
    found = []
    for batch in batches:
        loss = engine.forward_backward(batch)
        found.append((loss, engine.gather_gradients(), engine.optimizer_step().grad_norm))
    return found, engine.gather_parameters()


def trained(name: str, scope: list[str] | None, steps: int = 3, **sections: Any) -> Trained:
    """By an engine of its own. Graphs, replays and static bytes are those of the plan."""
    engine, entry = engine_of(name, scope, **sections)
    with engine:
        found = train(engine, entry, steps)
        assert engine.graphs is None or figures(engine) == planned(engine, steps)
        return found


def differences(a: Trained, b: Trained) -> list[str]:
    """Where two runs are not the same to the last bit."""
    found = []
    for step, (x, y) in enumerate(zip(a[0], b[0], strict=True)):
        found += [f"{step}: {what}" for what, i in (("loss", 0), ("norm", 2)) if x[i] != y[i]]
        found += [f"{step}: gradient of {name}" for name in x[1] if not torch.equal(x[1][name], y[1][name])]
    return found + [f"parameter {name}" for name in a[1] if not torch.equal(a[1][name], b[1][name])]


def figures(engine: Engine) -> tuple[int, int, int]:
    """Graphs, replays and static bytes of this rank, as the run counted them."""
    assert engine.graphs is not None
    return engine.graphs.num_graphs, engine.graphs.num_replays, engine.graphs.static_bytes


def planned(engine: Engine, steps: int) -> tuple[int, int, int]:
    """The same by the plan."""
    rank = engine.groups.place["pp"]
    rows = [row for row in engine.plan.graph_slots if row.pp_rank == rank]
    num_bytes = sum(row.bytes for row in rows)
    assert num_bytes == engine.plan.memory[rank].graph_buffers
    return sum(row.num_graphs for row in rows), steps * sum(row.num_replays for row in rows), num_bytes


# ---- on ranks that are forks of a process of the laboratory, which captured the model and planned the layout

STEPS = 2


class OfRank(NamedTuple):
    """What one rank found; ``as_planned``: graphs, replays and static bytes are those of the plan.

    ``report``: of one more step, the tokens of each expert and the share that was dropped.
    """

    trained: Trained
    as_planned: bool
    report: tuple[Any, Any]


def trained_of_rank(plan: Any, batches: Any, captures: bool) -> OfRank:
    """On a rank: two steps, then a third that is reported. With ``captures`` graphs are captured before the first."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        if engine.graphs is not None and captures:
            engine.capture_graphs()
        trained = train_on(engine, batches[:STEPS])
        as_planned = engine.graphs is None or not captures or figures(engine) == planned(engine, STEPS)
        report = engine.train_step(batches[0])
        return OfRank(trained, as_planned, (report.expert_tokens, report.dropped_share))


def on_ranks(
    lab: Lab, name: str, scope: list[str] | None, *, captures: bool = True, mesh: dict[str, int], **sections: Any
) -> list[OfRank]:
    """One layout of a model of ``families``, by rank; ``scope`` None: without graphs."""
    graphs = {} if scope is None else {"cuda_graphs": {"impl": "emulate", "scope": scope}}
    rest = {"train": "dropout" in name, **graphs, **sections}
    return lab.run(Case(name, mesh, rest, job=trained_of_rank, job_arguments=(captures,)))


def differ(eager: list[OfRank], graphed: list[OfRank]) -> list[list[str]]:
    """Of each rank, where the two are not the same to the last bit, or graphs are not as planned."""
    return [
        differences(a.trained, b.trained) + ["not as planned"] * (not b.as_planned)
        for a, b in zip(eager, graphed, strict=True)
    ]

"""What the plan lists is what runs: the torch.distributed calls of a step, counted on real processes, are its rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from passes.ops.collectives import ALL_GATHER, REDUCE_SCATTER
from planner import Plan, plan
from planner.cost.memory import LocalSizes
from runtime.distributed.launch import launch
from runtime.engine import Engine
from runtime.optimizer import buffers, zero1
from tests.models.plannable import MODELS, build, spec_of

STEPS = 2


class Calls:
    """Wraps what the runtime calls of torch.distributed. Owns: (kind, axis, bytes) → how often, while it is open."""

    def __init__(self, engine: Engine) -> None:
        groups = engine.groups
        axes = ((axis, getattr(groups, axis)) for axis in ("tp", "dp", "pp", "world"))
        self.axis_of = {id(group): axis for axis, group in axes if group is not None}
        self.axis_of |= {id(group): "embedding" for group in groups.embedding.values() if group is not None}
        self.seen: Counter[tuple[str, str, int]] = Counter()

    def __enter__(self) -> Calls:
        self.patch = pytest.MonkeyPatch()
        names = {"all_reduce": 0, "isend": 0, "irecv": 0, ALL_GATHER: 0, REDUCE_SCATTER: 1}
        kinds = {"isend": "send", "irecv": "recv", ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter"}
        for name, position in names.items():
            self._wrap(dist, name, kinds.get(name, name), position)
        self._wrap(buffers, "reduce_scatter", "reduce_scatter", 1)
        self._wrap(buffers, "all_gather", "all_gather", 0)
        self._wrap(zero1, "all_gather", "all_gather", 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def _wrap(self, module: Any, name: str, kind: str, position: int) -> None:
        """Count calls by the bytes of the argument that holds the whole tensor."""
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[position]
            tensors = given if isinstance(given, list) else [given]
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.seen[kind, self.axis_of.get(id(kwargs.get("group")), "?"), size] += 1
            return real(*args, **kwargs)

        self.patch.setattr(module, name, call)


def run_counted(model: str, changes: dict[str, Any]) -> tuple[Counter, Counter, dict[str, int]]:
    """The calls of ``STEPS`` steps on this rank, its tp collectives by phase, the bytes of its buffers."""
    made = plan(build(model), spec_of(model, **changes))
    with Engine(made, timeout_seconds=60) as engine:
        batch = batch_of(made)
        engine.train_step(batch)
        axis = engine.program.axes["tp"]
        axis.counts.clear()
        with Calls(engine) as calls:
            for _ in range(STEPS):
                engine.train_step(batch)
                engine.optimizer.wait_parameters()
        return calls.seen, axis.counts, engine.optimizer.measured_bytes()


def batch_of(made: Plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch = made.spec["batch"]
    return {
        name: torch.randint(0, 64, (batch["global"], *given["shape"]), generator=generator)
        for name, given in made.spec["inputs"].items()
    }


def rows_of_rank(made: Plan, rank: int) -> Counter[tuple[str, str, int]]:
    """The plan's rows for one step of one rank."""
    seen: Counter[tuple[str, str, int]] = Counter()
    for row, times in mine(made, rank):
        seen[row.kind, row.axis, row.bytes] += times
    return seen


def mine(made: Plan, rank: int) -> list[tuple[Any, int]]:
    """(row, how often in a step) for the rows that ``rank`` runs."""
    pp_rank = made.mesh.coordinate(rank)["pp"]  # type: ignore[attr-defined]
    times = {"microbatch": made.schedule.num_microbatches, "step": 1}
    return [
        (row, row.count * times[row.per])
        for row in made.collectives
        if row.stage is None or row.stage % made.mesh.pp == pp_rank
    ]


CASES = {
    "tp2 pp2": ("gpt", {"mesh": {"tp": 2, "pp": 2}}),
    "tp2 dp2": ("gpt2", {"mesh": {"tp": 2, "dp": 2}}),
    "tp2 dp2, zero 0": ("gpt", {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 0}}),
    "tp2 pp2, one key head": ("llama, one key head", {"mesh": {"tp": 2, "pp": 2}}),
    "tp2 dp2, fused qkv with one key head": ("fused, one key head", {"mesh": {"tp": 2, "dp": 2}}),
    "pp2 dp2, buckets, low precision": (
        "bert",
        {
            "mesh": {"pp": 2, "dp": 2},
            "optimizer": {"bucket_size": 5000},
            "precision": {"parameters": "bfloat16", "gradients": "float32"},
        },
    ),
    "tp2 pp2, sequence parallel": (
        "llama",
        {"mesh": {"tp": 2, "pp": 2}, "tensor_parallel": {"sequence_parallel": True}},
    ),
    "tp2 dp2, softmax over the vocabulary": ("sureness", {"mesh": {"tp": 2, "dp": 2}}),
    "tp2 pp2, norm over all heads": ("normed queries", {"mesh": {"tp": 2, "pp": 2}}),
    "tp4": ("gpt", {"mesh": {"tp": 4}}),
    "tp2 pp2 vpp2": ("gpt", {"mesh": {"tp": 2, "pp": 2, "vpp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}}),
}


def run_all_cases() -> dict[str, Any]:
    return {case: run_counted(*arguments) for case, arguments in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of four processes saw, by case."""
    return launch(run_all_cases, 4, timeout_seconds=280)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_calls_bytes_and_buffers_of_every_rank_are_those_of_the_plan(ranks, case):
    model, changes = CASES[case]
    made = plan(build(model), spec_of(model, **changes))
    for rank, seen in enumerate(ranks):
        calls, by_phase, measured = seen[case]
        assert calls == Counter({key: n * STEPS for key, n in rows_of_rank(made, rank).items()})
        planned: Counter[tuple[str, str]] = Counter()
        for row, times in mine(made, rank):
            if row.axis == "tp" and row.phase != "step":
                planned[row.kind, row.phase] += times * STEPS
        assert by_phase == planned
        assert_memory(made, rank, measured)


def assert_memory(made: Plan, rank: int, measured: dict[str, int]) -> None:
    pp_rank = made.mesh.coordinate(rank)["pp"]  # type: ignore[attr-defined]
    row = made.memory[pp_rank]
    assert row.parameters == measured["parameters"] + registered_bytes(made, pp_rank)
    assert row.gradients == measured["gradients"]
    assert row.optimizer == measured["optimizer"] + measured["main_parameters"] + measured["main_gradients"]


def registered_bytes(made: Plan, pp_rank: int) -> int:
    """The model's own buffers and constants, which are no parameters."""
    source: Any = made.decisions
    names = (*source.program.buffers, *source.program.constants)
    return sum(
        LocalSizes().bytes(source.program.node(name))
        for name in names
        for stage in source.stages.parameter_stages[name]
        if stage % made.mesh.pp == pp_rank
    )


@pytest.mark.parametrize("model", ["gpt", "gpt2", "llama", "bert"])
def test_a_layer_costs_two_forward_and_two_backward_all_reduces_and_the_loss_three_scalars_a_token(model):
    made = plan(build(model), spec_of(model, mesh={"tp": 2, "pp": 2}))
    blocks = [path for stage in made.stages for path in stage.blocks]
    for block in blocks:
        rows = [r for r in made.collectives if r.axis == "tp" and r.block == block]
        assert Counter((r.kind, r.phase, r.count, r.per) for r in rows) == {
            ("all_reduce", "forward", 1, "microbatch"): 2,
            ("all_reduce", "backward", 1, "microbatch"): 2,
        }
    assert len(blocks) == MODELS[model].num_layers
    tokens = tokens_of_loss(made)
    losses = [r.bytes for r in made.collectives if r.axis == "tp" and r.bytes in (4 * tokens, 8 * tokens)]
    assert losses == [4 * tokens, 8 * tokens]


def tokens_of_loss(made: Plan) -> int:
    (shape,) = {tuple(i["shape"]) for i in made.spec["inputs"].values()}
    return made.spec["batch"]["micro"] * shape[0]

"""What the plan lists is what runs: the torch.distributed calls of a step, counted on real processes, are its rows."""

from collections import Counter
from typing import Any, NamedTuple

import pytest

from passes.program.ops.aten import value_bytes
from planner import Captured, Plan, plan
from planner.spec.spec import Spec
from runtime.fuzz.forks import StoreHost, in_fork
from tests.models.plannable import MODELS, build, spec_of
from tests.tools.captures import captured_again, plan_again
from tests.tools.counted_calls import STEPS, run_counted
from tests.tools.laboratory import session_lab
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks
from tests.tools.tiers import chosen

# over etp a rank passes on what came to it, and tokens that go once to a rank are as many as the routing says
ROUTED = ("all_to_all", "etp"), ("all_to_all", "ep")


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
        if row.stage is None or made.mesh.pp_rank_of(row.stage) == pp_rank
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
    "tp2 pp2, along a sequence that tp does not divide": (
        "fifteen tokens",
        {"mesh": {"tp": 2, "pp": 2}, "tensor_parallel": {"sequence_parallel": True}},
    ),
    "tp4, along a sequence that tp does not divide, blocks computed again": (
        "fifteen tokens",
        {"mesh": {"tp": 4}, "tensor_parallel": {"sequence_parallel": True}, "recompute": "full"},
    ),
    "tp2 dp2, softmax over the vocabulary": ("sureness", {"mesh": {"tp": 2, "dp": 2}}),
    "tp2 pp2, norm over all heads": ("normed queries", {"mesh": {"tp": 2, "pp": 2}}),
    "tp2 pp2, all forwards twice": ("balance", {"mesh": {"tp": 2, "pp": 2}}),
    "cp2 dp2, all forwards twice": ("balance", {"mesh": {"cp": 2, "dp": 2}, "recompute": "full"}),
    "tp4": ("gpt", {"mesh": {"tp": 4}}),
    "cp2 dp2": ("gpt", {"mesh": {"cp": 2, "dp": 2}}),
    "cp2 tp2, one key head, zero 0": ("llama, one key head", {"mesh": {"cp": 2, "tp": 2}, "optimizer": {"zero": 0}}),
    "cp2 pp2, bfloat16": ("bert", {"mesh": {"cp": 2, "pp": 2}, "precision": {"parameters": "bfloat16"}}),
    "cp2 pp2, one key head, recompute": ("llama, one key head", {"mesh": {"cp": 2, "pp": 2}, "recompute": "full"}),
    "cp2 tp2, shifts and sums of whole sequences": ("earlier tokens", {"mesh": {"cp": 2, "tp": 2}}),
    "cp4, a value over all data": ("sureness", {"mesh": {"cp": 4}}),
    "ep2 dp2, pp2": ("mixtral", {"mesh": {"pp": 2, "dp": 2, "ep": 2}}),
    "tp2 dp2 ep2, etp 1": ("mixtral", {"mesh": {"tp": 2, "dp": 2, "ep": 2, "etp": 1}}),
    "tp2 dp2 ep2, etp 1, bfloat16": (
        "mixtral",
        {"mesh": {"tp": 2, "dp": 2, "ep": 2, "etp": 1}, "precision": {"parameters": "bfloat16"}},
    ),
    "tp2 dp2 ep2, etp 2: the groups of tp and dp": ("mixtral", {"mesh": {"tp": 2, "dp": 2, "ep": 2}}),
    "dp4 ep2": ("mixtral", {"mesh": {"dp": 4, "ep": 2}}),
    "dp4 ep2, zero 0, buckets": (
        "mixtral",
        {"mesh": {"dp": 4, "ep": 2}, "optimizer": {"zero": 0, "bucket_size": 5000}},
    ),
    "dp4 ep4: an expert on each rank": ("mixtral", {"mesh": {"dp": 4, "ep": 4}}),
    "dp4 ep4 over two nodes": (
        "mixtral",
        {"mesh": {"dp": 4, "ep": 4}, "cluster": str(ROOT / "tests/models/nodes_of_two.yaml")},
    ),
    "dp2 ep2 etp2 of 4": ("mixtral", {"mesh": {"dp": 4, "ep": 2, "etp": 2}}),
    "tp2 dp2, etp 1": ("mixtral", {"mesh": {"tp": 2, "dp": 2, "etp": 1}}),
    "a loop, tp2 dp2 ep2, etp 1": ("loop of experts", {"mesh": {"tp": 2, "dp": 2, "ep": 2, "etp": 1}}),
    "a loop, dp4 ep2": ("loop of experts", {"mesh": {"dp": 4, "ep": 2}}),
    "slots, tp2 dp2 ep2, etp 1": ("slots of experts", {"mesh": {"tp": 2, "dp": 2, "ep": 2, "etp": 1}}),
    "slots, dp2 ep2 etp2 of 4": ("slots of experts", {"mesh": {"dp": 4, "ep": 2, "etp": 2}}),
    "tp2 pp2 vpp2, sequence parallel, blocks computed again": (
        "gpt",
        {
            "mesh": {"tp": 2, "pp": 2, "vpp": 2},
            "pipeline": {"schedule": "interleaved_1f1b"},
            "tensor_parallel": {"sequence_parallel": True},
            "recompute": "full",
        },
    ),
    "tp2 pp2 vpp2, in a v": (
        "gpt",
        {"mesh": {"tp": 2, "pp": 2, "vpp": 2}, "pipeline": {"schedule": "zero_bubble_v"}, "optimizer": {"zero": 0}},
    ),
    "tp2 pp2, gradients of weights wait": (
        "gpt",
        {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
    ),
    "tp2 pp2, sequence parallel, gradients of weights wait": (
        "llama",
        {
            "mesh": {"tp": 2, "pp": 2},
            "pipeline": {"schedule": "zero_bubble"},
            "tensor_parallel": {"sequence_parallel": True},
        },
    ),
    "pp2 dp2, buckets, gradients of weights wait": (
        "bert",
        {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"schedule": "zero_bubble"}, "optimizer": {"bucket_size": 5000}},
    ),
    "tp2 pp2 vpp2": ("gpt", {"mesh": {"tp": 2, "pp": 2, "vpp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}}),
    "tp2 dp2, zero 2": ("gpt", {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 2}}),
    "tp2 dp2, zero 3": ("gpt2", {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 3}}),
    "tp2 dp2, zero 3, gathered once a step": (
        "gpt",
        {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 3, "reshard": False}},
    ),
    "tp2 dp2, zero 3, sent in bfloat16": (
        "gpt2",
        {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 3}, "precision": {"gather": "bfloat16"}},
    ),
    "pp2 dp2, zero 3, the last block gathered once a step": (
        "gpt",
        {"mesh": {"pp": 2, "dp": 2}, "optimizer": {"zero": 3, "reshard": 1}},
    ),
    "pp2 dp2, zero 3, blocks computed again": (
        "bert",
        {"mesh": {"pp": 2, "dp": 2}, "optimizer": {"zero": 3}, "recompute": "full"},
    ),
    "pp2 dp2, zero 3, gradients of weights wait": (
        "llama",
        {"mesh": {"pp": 2, "dp": 2}, "optimizer": {"zero": 3}, "pipeline": {"schedule": "zero_bubble"}},
    ),
    "pp2 vpp2 dp2, zero 3, bfloat16, buckets": (
        "gpt",
        {
            "mesh": {"pp": 2, "vpp": 2, "dp": 2},
            "pipeline": {"schedule": "interleaved_1f1b"},
            "optimizer": {"zero": 3, "bucket_size": 5000},
            "precision": {"parameters": "bfloat16"},
        },
    ),
    "cp2 dp2, zero 3, all forwards twice": ("balance", {"mesh": {"cp": 2, "dp": 2}, "optimizer": {"zero": 3}}),
    "dp4, zero 3, shards within two": ("gpt2", {"mesh": {"dp": 4}, "optimizer": {"zero": 3, "shard_group": 2}}),
    "cp2 dp2, zero 1, shards within two": (
        "llama",
        {"mesh": {"cp": 2, "dp": 2}, "optimizer": {"shard_group": 2}, "precision": {"parameters": "bfloat16"}},
    ),
    "dp4 ep2, zero 3": ("mixtral", {"mesh": {"dp": 4, "ep": 2}, "optimizer": {"zero": 3}}),
    "a loop, dp4 ep2, zero 3": ("loop of experts", {"mesh": {"dp": 4, "ep": 2}, "optimizer": {"zero": 3}}),
}


class Ran(NamedTuple):
    """A case: its plan without what it was decided on, each pp rank's registered bytes, what each rank saw."""

    made: Plan
    registered: list[int]
    ranks: list[dict[str, Any]]


def run_all(host: StoreHost, cases: list[str]) -> dict[str, Ran]:
    """Model by model, each captured once in a process of its own."""
    models = dict.fromkeys(CASES[case][0] for case in cases)
    return {case: ran for model in models for case, ran in in_fork(run_cases_of, host, model, cases).items()}


def run_cases_of(host: StoreHost, model: str, cases: list[str]) -> dict[str, Ran]:
    built, found = build(model), {}
    for number, (case, (name, changes)) in enumerate(CASES.items()):
        if name == model and case in cases:
            spec = Spec.load(spec_of(model, **changes))
            host.begin(f"{number + 1}0")
            found[case] = in_fork(run_case, host, captured_again(built, spec), spec)
    return found


def run_case(host: StoreHost, captured: Captured, spec: Spec) -> Ran:
    made = plan(captured, spec)
    registered = [registered_bytes(made, pp_rank) for pp_rank in range(made.mesh.pp)]
    return Ran(type(made).of(made), registered, Ranks(made, "forks", host).run(run_counted))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    """What each of four processes saw, by case."""
    return session_lab().call(run_all, chosen(request, "case"))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_calls_bytes_and_buffers_of_every_rank_are_those_of_the_plan(runs: dict[str, Ran], case: str):
    made = runs[case].made
    for rank, seen in enumerate(runs[case].ranks):
        planned = Counter({key: n * STEPS for key, n in rows_of_rank(made, rank).items()})
        routed = ROUTED[: 1 + any(row.sends.startswith("tokens") for row in made.experts)]
        assert without_bytes(seen["calls"], routed) == without_bytes(planned, routed)
        for axis in ("tp", "cp", "ep", "etp"):
            counts, sizes = in_graphs(made, rank, axis)
            assert +seen["counts"].get(axis, Counter()) == counts
            if axis in ("cp", "ep") and ("all_to_all", axis) not in routed:
                assert +seen["bytes"].get(axis, Counter()) == sizes
        assert_memory(made, rank, seen["memory"], runs[case].registered)


def without_bytes(
    calls: Counter[tuple[str, str, int]], routed: tuple[tuple[str, str], ...]
) -> Counter[tuple[str, str, int]]:
    """The same, but of what follows the routing only how often."""
    kept: Counter[tuple[str, str, int]] = Counter()
    for (kind, axis, size), n in calls.items():
        kept[kind, axis.split()[0], 0 if (kind, axis.split()[0]) in routed else size] += n
    return kept


def in_graphs(made: Plan, rank: int, axis: str) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """(kind, phase) → how often, and how many bytes, in ``STEPS`` steps of what graphs exchange over an axis."""
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row, times in mine(made, rank):
        if row.axis.split()[0] == axis and row.phase != "step":
            counts[row.kind, row.phase] += times * STEPS
            sizes[row.kind, row.phase] += row.bytes * times * STEPS
    return counts, sizes


def assert_memory(made: Plan, rank: int, measured: dict[str, int], registered: list[int]) -> None:
    pp_rank = made.mesh.coordinate(rank)["pp"]  # type: ignore[attr-defined]
    row = made.memory[pp_rank]
    assert row.parameters == measured["parameters"] + registered[pp_rank]
    assert row.gradients == measured["gradients"]
    assert row.optimizer == measured["optimizer"] + measured["main_parameters"] + measured["main_gradients"]


def registered_bytes(made: Plan, pp_rank: int) -> int:
    """The model's own buffers and constants, which are no parameters."""
    source: Any = made.decisions
    names = (*source.program.buffers, *source.program.constants)
    return sum(
        value_bytes(source.program.node(name))
        for name in names
        for stage in source.stages.parameter_stages[name]
        if made.mesh.pp_rank_of(stage) == pp_rank
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "gpt2", "llama", "bert"])
def test_a_layer_costs_two_forward_and_two_backward_all_reduces_and_the_loss_three_scalars_a_token(model):
    made = plan_again(build(model), spec_of(model, mesh={"tp": 2, "pp": 2}))
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

"""The rows of exchanges of experts: what a rank sends over ep in a microbatch, by formula."""

from collections import Counter
from math import ceil
from typing import Any

import pytest

from planner import Plan
from planner.mesh import BETWEEN_NODES, IN_A_NODE
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again
from tests.tools.paths import ROOT

SIZES = {"float32": 4, "bfloat16": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("precision", SIZES)
def test_an_expert_on_each_rank_gets_each_way_tokens_by_choices_by_hidden_by_itemsize(precision: str):
    """Each of a token's experts is on another rank then, so that all its rows leave."""
    made = plan_again(build("mixtral"), experts_spec({"dp": 4, "ep": 4}, precision))
    config: Any = build("mixtral").config
    size = tokens_of(made) * config.num_experts_per_tok * config.hidden_size * SIZES[precision]
    figures = config.num_local_experts * 8  # of all experts, how many rows each gets, in int64
    assert of_a_layer(made, config) == {
        ("ep", "forward", figures): 1, ("ep", "forward", size): 2, ("ep", "backward", size): 2
    }  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize(
    ("mesh", "nodes"),
    [({"dp": 2, "ep": 2}, 1), ({"tp": 2, "dp": 2, "ep": 2, "etp": 1}, 1), ({"dp": 4, "ep": 4}, 2)],
    ids=str,
)
def test_tokens_leave_once_for_each_rank_or_node_of_their_experts(mesh: dict[str, int], nodes: int, precision: str):
    """Two of four experts: of a pair of them a token needs one with 5/6, of one alone with 1/2. Each of its rows has a
    weight that goes with it, in float32 beside rows of any dtype.
    """
    given = {"cluster": str(ROOT / "tests/models/nodes_of_two.yaml")} if nodes > 1 else {}
    made = plan_again(build("mixtral"), experts_spec(mesh, precision, **given))
    config: Any = build("mixtral").config
    ep, tp, tokens, itemsize = mesh["ep"], mesh.get("tp", 1), tokens_of(made), SIZES[precision]
    once = ceil(tokens * 2 * 5 / 6 / tp)  # to each of two ranks, or nodes
    expected = Counter({
        ("ep", "forward", (4 + ep * (1 if nodes == 1 else 2 + 2)) * 8): 1,  # rows of each expert; numbers of tokens
        ("ep", "forward", tokens * 2 // tp * 4): 1,  # which token each row reads
    })  # fmt: skip
    for phase in ("forward", "backward"):
        expected["ep", phase, tokens * 2 // tp * 4] += 1
        axis, sent = ("ep", once) if nodes == 1 else (IN_A_NODE, tokens * 2)
        expected[axis, phase, sent * config.hidden_size * itemsize] += 2
        expected[BETWEEN_NODES, phase, once * config.hidden_size * itemsize] += 2 * (nodes > 1)
    expected[BETWEEN_NODES, "forward", once * 2] += nodes > 1  # which ranks of the node need each token
    assert of_a_layer(made, config) == +expected


def tokens_of(made: Plan) -> int:
    """Of a microbatch."""
    return made.spec["batch"]["micro"] * made.spec["inputs"]["input_ids"]["shape"][0]


def experts_spec(mesh: dict[str, int], precision: str, **given: Any) -> dict[str, Any]:
    return spec_of("mixtral", mesh=mesh, precision={"parameters": precision}, **given)


def of_a_layer(made: Plan, config: Any) -> Counter[tuple[str, str, int]]:
    """(axis, phase, bytes) → how often a layer of experts exchanges that over ep in a microbatch."""
    rows = [r for r in made.collectives if r.axis.split()[0] == "ep"]
    assert {(r.kind, r.count, r.per) for r in rows} == {("all_to_all", 1, "microbatch")}
    found = Counter((r.axis, r.phase, r.bytes) for r in rows)
    assert not any(times % config.num_hidden_layers for times in found.values())
    return Counter({key: times // config.num_hidden_layers for key, times in found.items()})

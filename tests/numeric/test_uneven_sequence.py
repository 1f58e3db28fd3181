"""Sequence parallelism over a sequence that tp does not divide: padding takes part in nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.ops import collectives
from passes.ops.loss_head import COUNT, LOG_PROBABILITY
from passes.partition.typings.base import Form
from passes.partition.typings.reduction import Along
from passes.partition.typings.table import GIVES, RULES
from planner import PlanError
from tests.models import uneven
from tests.models.families import IGNORED, build
from tests.numeric.test_families import SEQUENCE_PARALLEL
from tests.tools.comparison import compare
from tests.tools.laboratory import Case, Lab
from tests.tools.scored_ranks import scores_on
from tests.tools.simulated_mesh import Ran, run_mesh

INVARIANT = {"train": True, "dropout": "layout_invariant"}
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}}
ZERO_BUBBLE = {"pipeline": {"schedule": "zero_bubble"}}
KEPT = {"tensor_parallel": {**SEQUENCE_PARALLEL["tensor_parallel"], "regather": False}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
RUNS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "patches, tp2": ("class token of 17", {"tp": 2}, {}),
    "patches, tp4, recompute": ("class token of 17", {"tp": 4}, {"recompute": "full"}),
    "decoder, tp2 pp2": ("decoder of 15", {"tp": 2, "pp": 2}, {}),
    "decoder, tp2 pp2, recompute": ("decoder of 15", {"tp": 2, "pp": 2}, {"recompute": "selective"}),
    "decoder, tp2 pp2 vpp2": ("decoder of 15", {"tp": 2, "pp": 2, "vpp": 2}, INTERLEAVED),
    "encoder, tp2 pp2, graphs": ("encoder of 13", {"tp": 2, "pp": 2}, GRAPHS),
    "encoder, tp2 dp2, kept": ("encoder of 13", {"tp": 2, "dp": 2}, KEPT),
    "encoder, tp2 pp2, W waits": ("encoder of 13", {"tp": 2, "pp": 2}, ZERO_BUBBLE),
    "few classes, tp4": ("few classes of 9", {"tp": 4}, {}),
    "tokens mixed, tp2 pp2": ("tokens mixed of 11", {"tp": 2, "pp": 2}, {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("run", RUNS)
def test_steps_are_those_of_one_process(lab: Lab, run: str) -> None:
    model, mesh, rest = RUNS[run]
    assert lab.check(Case(f"uneven:{model}", mesh, SEQUENCE_PARALLEL | rest)).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "mesh", "rest"),
    [
        ("class token of 17", {"tp": 2, "pp": 2}, {}),
        ("decoder of 15", {"tp": 4}, {"recompute": "full"}),
        ("encoder of 13", {"tp": 2, "pp": 2}, GRAPHS),
    ],
)
def test_steps_with_dropout_are_those_of_one_process(
    lab: Lab, model: str, mesh: dict[str, int], rest: dict[str, Any]
) -> None:
    alone = lab.run(Case(f"uneven:{model}", {"dp": 1}, INVARIANT))[0]
    spread = lab.run(Case(f"uneven:{model}", mesh, SEQUENCE_PARALLEL | INVARIANT | rest))[0]
    report = compare(spread, alone)
    assert report.wrong == []
    assert report.gradient < 1e-12


@pytest.mark.thorough
@pytest.mark.slow
def test_compiled_steps_are_those_of_one_process(lab: Lab) -> None:
    case = Case("uneven:decoder of 15", {"tp": 2, "pp": 2}, SEQUENCE_PARALLEL | {"compile": True})
    assert lab.check(case).wrong == []


def _ran(name: str, mesh: dict[str, int], **more: Any) -> Ran:
    torch.set_num_threads(1)
    return run_mesh(lambda: build(name).model, build(name).batch(4, 0), mesh, **more)


@pytest.mark.thorough
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [*uneven.MODELS, "vit"])
def test_each_family_gives_the_gradients_of_one_process(name: str, tp: int) -> None:
    alone, spread = _ran(name, {}), _ran(name, {"tp": tp}, **SEQUENCE_PARALLEL)
    assert _padding(spread)
    torch.testing.assert_close(spread.loss, alone.loss, rtol=1e-12, atol=0)
    for parameter, gradient in alone.gradients.items():
        torch.testing.assert_close(spread.gradients[parameter], gradient, rtol=1e-10, atol=1e-12)


def _padding(ran: Ran) -> set[int]:
    """Of the sequences between blocks."""
    decisions = ran.plan.decisions
    assert decisions is not None
    calls = decisions.program.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    found = [decisions.placements.of(node) for node in calls if node.meta["val"].ndim == 3]
    return {cut.padding for cut in found if cut.is_sharded and cut.dim == 1}


@pytest.mark.thorough
def test_ranks_of_cp_pad_their_own_tokens_and_draw_as_one_process() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return uneven.of_tokens(12, 97, uneven.Unit, uneven.rows, causal=True).model.double().train()

    def ran(mesh: dict[str, int], **more: Any) -> Ran:
        batch = uneven.of_tokens(12, 97, uneven.Unit, uneven.rows).batch(4, 0)
        return run_mesh(make, batch, mesh, dropout="layout_invariant", **more)

    alone, spread = ran({}), ran({"tp": 4, "cp": 2}, **SEQUENCE_PARALLEL)
    assert _padding(spread) == {2}  # a rank of cp has 6 tokens, those of tp 2 each, and the last no data
    assert _is_equal(spread, alone)


def _is_equal(spread: Ran, alone: Ran) -> bool:
    found = [(spread.loss, alone.loss), *((spread.gradients[name], g) for name, g in alone.gradients.items())]
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in found)


FILLING = collectives._filling
FORGOTTEN: dict[str, Callable[..., Tensor]] = {
    "a value has zeros": lambda x, dim, length, beyond: torch.zeros_like(FILLING(x, dim, length, None)),
    "a gradient repeats": lambda x, dim, length, beyond: FILLING(x, dim, length, None),
}


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", FORGOTTEN)
def test_padding_of_another_kind_gives_other_gradients(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    alone = _ran("uneven:decoder of 15", {})
    monkeypatch.setattr(collectives, "_filling", FORGOTTEN[mutant])
    assert not _is_equal(_ran("uneven:decoder of 15", {"tp": 2}, **SEQUENCE_PARALLEL), alone)


@pytest.mark.thorough
def test_a_sum_that_counts_padding_gives_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = _ran("uneven:mean of 17", {})
    assert _is_equal(_ran("uneven:mean of 17", {"tp": 2}, **SEQUENCE_PARALLEL), alone)
    for op, rule in list(RULES.items()):
        if isinstance(rule, Along) and rule.form in (Form.SUM, Form.MEAN):
            padded = replace(rule, is_padded=True)
            monkeypatch.setitem(RULES, op, padded)
            monkeypatch.setitem(GIVES, padded, GIVES[rule])
    assert not _is_equal(_ran("uneven:mean of 17", {"tp": 2}, **SEQUENCE_PARALLEL), alone)


@torch.no_grad()
def test_scores_of_tokens_that_ranks_share_count_each_label_once() -> None:
    name = "uneven:few classes of 9"
    entry = build(name)
    batch, whole = entry.batch(4, 0), entry.model
    plan, found, _ = scores_on(lambda: build(name).model, batch, {"tp": 2}, **SEQUENCE_PARALLEL)
    assert [row.dim for row in plan.parameters if row.name == "head.weight"] == [
        None
    ]  # no rank has a part of the classes
    whole.loss = lambda logits, labels: logits  # pyright: ignore[reportAttributeAccessIssue]
    labels = batch["labels"]
    each = F.cross_entropy(whole(**batch).transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    assert found[COUNT].equal((labels != IGNORED).double())
    torch.testing.assert_close(found[LOG_PROBABILITY], -each)


@pytest.mark.thorough
def test_the_plan_tells_of_padding(lab: Lab) -> None:
    told = [d.what for d in lab.plan(Case("vit", {"tp": 2}, SEQUENCE_PARALLEL)).diagnostics]
    assert "dim 1 = 5 is padded to 6 over tp: each rank holds 3, and no sum includes padding" in told


def test_a_sequence_shorter_than_tp_is_refused_by_line() -> None:
    with pytest.raises(PlanError, match="a sequence of 2 is shorter than tp = 4") as caught:
        run_mesh(
            lambda: build("uneven:decoder of 15").model,
            {name: x[:, :2] for name, x in build("uneven:decoder of 15").batch(4, 0).items()},
            {"tp": 4},
            **SEQUENCE_PARALLEL,
        )
    assert "uneven.py" in str(caught.value)
    assert "sequence_parallel: false" in caught.value.fix

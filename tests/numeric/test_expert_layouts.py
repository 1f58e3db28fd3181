"""Experts spread over ranks train as one process does: own spellings in float64, families in float32, every folding.

Ranks are threads of this process; tests/numeric/test_experts.py runs a few of the same as processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from planner import PlanError
from tests.models import changed_weights, experts, hugging_face, selected_rows, sliced_experts, stacked_experts
from tests.models.hugging_face import MOE, Member
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import counted, run_mesh, spec_of

FOLDINGS: dict[str, dict[str, int]] = {
    "ep2·dp2": {"dp": 2, "ep": 2},
    "tp2·dp2·ep2, etp 1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "tp2·dp2·ep2, etp 2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "tp2·ep2, etp 1": {"tp": 2, "ep": 2, "etp": 1},
    "ep4·dp4": {"dp": 4, "ep": 4},
    "dp4·etp2·ep2": {"dp": 4, "etp": 2, "ep": 2},
    "tp2·dp2·ep4, etp 1": {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
    "tp2·dp2, etp 1": {"tp": 2, "dp": 2, "etp": 1},
    "dp2·etp2": {"dp": 2, "etp": 2},
}
LOOPS = (experts.masks, experts.columns)
OPENED = (*LOOPS, experts.picked, *selected_rows.WAYS, *sliced_experts.WAYS)


def built(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    model = experts.Net(layer()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def hold(way, folding):
    """A layer of experts equals one process under a folding."""
    mesh = FOLDINGS[folding]
    make = lambda: built(partial(layer_of, way))  # noqa: E731
    check(make, batch_of(2 * mesh.get("dp", 1)), mesh, 1e-10, 1e-10)


def in_blocks(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return experts.Blocks(layer).double()


def layer_of(way: Callable[..., Tensor]) -> nn.Module:
    if way in (*selected_rows.WAYS, selected_rows.overwritten):
        return selected_rows.Selecting(way)
    if way in sliced_experts.WAYS:
        return sliced_experts.Sliced(way)
    is_stacked = way in stacked_experts.WAYS or way in stacked_experts.REFUSED
    return stacked_experts.Stacks(way) if is_stacked else experts.Layer(way)


def batch_of(rows: int, length: int = experts.LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (rows, length)
    return {key: torch.randint(experts.VOCABULARY, size, generator=generator) for key in ("input_ids", "labels")}


def check(
    make: Callable[[], nn.Module],
    batch: Mapping[str, Tensor],
    mesh: Mapping[str, int],
    loss: float,
    gradient: float,
    **more: object,
) -> None:
    ran = run_mesh(make, dict(batch), mesh, **more)
    model = make()
    returned = model(**batch)
    alone = returned if isinstance(returned, Tensor) else returned.loss
    alone.backward()
    torch.testing.assert_close(ran.loss, alone.detach(), rtol=loss, atol=loss, check_dtype=False)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for name, parameter in model.named_parameters():
        truth = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        wrong = (ran.gradients.get(name, torch.zeros_like(truth)) - truth).norm() / norm  # not held: reaches no loss
        assert wrong <= gradient, f"{name}: {wrong:.1e} of the gradients' norm"
    told = Counter[tuple[str, str, str]]()
    for row in ran.plan.collectives:
        if row.per == "microbatch":
            told[row.axis.split()[0], row.kind, row.phase] += row.count
    assert counted(ran.programs[0]) == told
    firsts = [p for rank, p in enumerate(ran.programs) if ran.plan.mesh.place(rank)["tp"] == 0]
    rows = torch.stack([program.load.figures for program in firsts]).sum(0)
    layers = ran.plan.experts if ran.plan.mesh.has_expert_axes else ()
    assert rows.sum() == sum(row.top_k for row in layers) * batch["input_ids"].numel()


@pytest.mark.sampled(5)
@pytest.mark.check
@pytest.mark.covering(1)
@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("way", LOOPS, ids=lambda w: w.__name__)
def test_a_loop_over_experts_under_every_folding(way, folding):
    hold(way, folding)


@pytest.mark.thorough
@pytest.mark.parametrize("way", OPENED, ids=lambda w: w.__name__)
def test_every_spelling_of_a_loop(way):
    mesh = FOLDINGS["tp2·dp2·ep2, etp 1"]
    check(lambda: built(partial(layer_of, way)), batch_of(4), mesh, 1e-10, 1e-10)


@pytest.mark.check
@pytest.mark.parametrize("folding", ["tp2·dp2·ep2, etp 1", "tp2·dp2·ep2, etp 2", "tp2·ep2, etp 1"])
def test_sequence_parallelism_cuts_no_rows_of_experts(folding):
    mesh, cut = FOLDINGS[folding], {"sequence_parallel": True, "vocabulary_multiple": 8}
    make = lambda: in_blocks(partial(experts.Layer, experts.masks))  # noqa: E731
    check(make, batch_of(2 * mesh.get("dp", 1)), mesh, 1e-10, 1e-10, tensor_parallel=cut)


def test_ranks_in_another_order():
    mesh = {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "order": "dp-tp-ep-cp-pp"}
    check(lambda: built(partial(layer_of, experts.masks)), batch_of(4), mesh, 1e-10, 1e-10)


TOGETHER = (selected_rows.columns, selected_rows.every_copy, selected_rows.of_batches, selected_rows.divided)
STACKED = (experts.stacked, experts.copied, experts.looked_up, *stacked_experts.WAYS)
EXTREME = (
    *TOGETHER,
    experts.masks,
    experts.copied,
    experts.looked_up,
    stacked_experts.scaled_before,
    stacked_experts.biased,
)
FEW = ("tp2·dp2·ep2, etp 1", "tp2·dp2·ep2, etp 2")  # all foldings: of loops above, and by slots


@pytest.mark.thorough
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("folding", FEW)
@pytest.mark.parametrize("way", STACKED, ids=lambda w: w.__name__)
def test_stacks_that_every_token_meets_or_that_are_looked_up(way, folding):
    hold(way, folding)


@pytest.mark.thorough
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("folding", FEW)
@pytest.mark.parametrize("way", [*TOGETHER, experts.picked, selected_rows.beside_shared], ids=lambda w: w.__name__)
def test_a_loop_whose_experts_are_put_together_otherwise(way, folding):
    hold(way, folding)


CHANGED = (*LOOPS, *selected_rows.WAYS, *STACKED)


@pytest.mark.sampled(2)
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("change", [changed_weights.squashed, changed_weights.normed], ids=lambda c: c.__name__)
@pytest.mark.parametrize("way", CHANGED, ids=lambda w: w.__name__)
def test_experts_and_routers_with_computed_weights(way, change):
    """The norm is computed in float32."""
    near = 1e-10 if change is changed_weights.squashed else 1e-6
    make = lambda: changed_weights.change_weights(built(partial(layer_of, way)), change)  # noqa: E731
    check(make, batch_of(4), FOLDINGS["ep2·dp2"], near, near)


def test_experts_that_overwrite_what_others_made_are_told():
    model = built(partial(layer_of, selected_rows.overwritten))
    with pytest.raises(PlanError, match="the result of one is overwritten by that of another"):
        plan_again(model, spec_of(batch_of(4), FOLDINGS["ep2·dp2"]))


@pytest.mark.thorough
@pytest.mark.parametrize("way", stacked_experts.REFUSED, ids=lambda w: w.__name__)
def test_a_token_that_gets_something_of_what_it_did_not_choose_is_told(way):
    model = built(partial(layer_of, way))
    with pytest.raises(PlanError, match=stacked_experts.REFUSED[way]):
        plan_again(model, spec_of(batch_of(4), FOLDINGS["tp2·dp2·ep2, etp 1"]))


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, experts.LENGTH])
@pytest.mark.parametrize("way", EXTREME, ids=lambda w: w.__name__)
def test_one_token_and_all_tokens_to_one_expert(way, length):
    def make() -> nn.Module:
        model = built(partial(layer_of, way))
        with torch.no_grad():
            model.get_parameter("layer.gate.bias").copy_(torch.tensor([0.0, 9.0, -9.0, 40.0]))
        return model

    check(make, batch_of(2, length), FOLDINGS["ep2·dp2"], 1e-10, 1e-10)
    check(make, batch_of(2, length), FOLDINGS["tp2·dp2·ep2, etp 1"], 1e-10, 1e-10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [stacked_experts.of_pairs, experts.copied], ids=lambda w: w.__name__)
def test_one_token_that_goes_to_one_expert(way):
    def layer() -> nn.Module:
        return stacked_experts.Stacks(way, top_k=1) if way in stacked_experts.WAYS else experts.Layer(way, top_k=1)

    check(lambda: built(layer), batch_of(2, 1), FOLDINGS["ep2·dp2"], 1e-10, 1e-10)


FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "olmoe", "granitemoe")


def family(name: str | Member) -> nn.Module:
    torch.manual_seed(3)
    model = hugging_face.made(MOE[name] if isinstance(name, str) else name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("folding", FEW)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_with_stacks_of_experts(name, folding):
    mesh = FOLDINGS[folding]
    batch = hugging_face.batch("mixtral")
    rows = 2 * mesh.get("dp", 1)
    batch = {key: torch.cat([x, x.roll(1, 1), x.roll(2, 1), x.roll(3, 1)])[:rows] for key, x in batch.items()}
    check(lambda: family(name), batch, mesh, 1e-5, 1e-5)


@pytest.mark.thorough
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("mesh", [{}, {"dp": 2, "ep": 2}], ids=["one rank", "ep2·dp2"])
def test_groups_of_experts_of_which_only_the_best_scores_are_read_can_be_recomputed(kind: str, mesh: dict[str, int]):
    """Autograd keeps the indices of that top-k, and nothing in the graph has their name."""
    found = hugging_face.batch("mixtral")
    batch = {key: torch.cat([x, x.roll(1, 1)])[: 2 * mesh.get("dp", 1)] for key, x in found.items()}
    check(lambda: family("deepseek_v3"), batch, mesh, 1e-5, 1e-5, recompute=kind)

"""Experts beside a sharded sequence: every rank of cp sorts, and sends, the rows of its own tokens."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import fx, nn

from passes.partition.sequence.sorted_rows import SortedRows
from passes.partition.typings.base import Option
from planner import PlanError
from tests.models import experts, hugging_face, slots, sorted_experts, stacked_experts
from tests.numeric.test_expert_layouts import FAMILIES, OPENED, STACKED, batch_of, built, check, family, layer_of
from tests.tools.captures import plan_again
from tests.tools.laboratory import Case, Lab
from tests.tools.simulated_mesh import spec_of

LENGTH = 8
LAYOUTS: dict[str, dict[str, int]] = {
    "cp2": {"cp": 2},
    "cp2·ep2": {"cp": 2, "ep": 2},
    "cp2·dp2·ep2": {"cp": 2, "dp": 2, "ep": 2},
    "cp2·tp2·ep4, etp 1": {"cp": 2, "tp": 2, "ep": 4, "etp": 1},
    "cp2·tp2·ep2, etp 2": {"cp": 2, "tp": 2, "ep": 2, "etp": 2},
    "cp4·ep2": {"cp": 4, "ep": 2},
}
FEW = ("cp2·ep2", "cp2·tp2·ep4, etp 1")
CUT = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}


def sorting(way: sorted_experts.Way) -> nn.Module:
    torch.manual_seed(3)
    return experts.Net(sorted_experts.Sorting(way))


def of_family(name: str, mesh: dict[str, int], **more: object) -> None:
    batch, rows = hugging_face.batch("mixtral"), 2 * mesh.get("dp", 1)
    batch = {key: torch.cat([x, x.roll(1, 1), x.roll(2, 1)])[:rows] for key, x in batch.items()}
    check(lambda: family(name), mesh, 1e-5, batch=batch, **more)


@pytest.mark.thorough
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("layout", FEW)
@pytest.mark.parametrize("way", [*OPENED, *STACKED], ids=lambda w: w.__name__)
def test_loops_and_stacks(way: Callable[..., torch.Tensor], layout: str) -> None:
    check(lambda: built(partial(layer_of, way)), LAYOUTS[layout], length=LENGTH)


@pytest.mark.sampled(2)
@pytest.mark.check
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_under_every_layout(layout: str) -> None:
    check(lambda: built(partial(layer_of, experts.masks)), LAYOUTS[layout], length=LENGTH)


@pytest.mark.sampled(2)
@pytest.mark.check
@pytest.mark.covering(1, pairs=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", sorted_experts.WAYS, ids=lambda w: w.__name__)
def test_sorted_rows(way: sorted_experts.Way, layout: str) -> None:
    check(lambda: sorting(way), LAYOUTS[layout], 1e-5, length=LENGTH)


@pytest.mark.sampled(2)
@pytest.mark.check
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "ep": 2}], ids=["cp2", "cp2·ep2"])
@pytest.mark.parametrize("way", sorted_experts.REFUSED, ids=lambda w: w.__name__)
def test_rows_that_are_not_those_of_a_rank_alone_are_refused(way: sorted_experts.Way, mesh: dict[str, int]) -> None:
    with pytest.raises(PlanError) as refused:
        plan_again(sorting(way), spec_of(batch_of(2, LENGTH), mesh))
    assert "sorted_experts.py" in str(refused.value.where)


@pytest.mark.check
def test_rows_mixed_with_those_of_tokens_would_be_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = SortedRows._inside

    def lenient(self: SortedRows, node: fx.Node) -> Option:
        """Take all operands for rows of the order, here alone."""
        before = set(self.inside)
        self.inside.update(node.all_input_nodes)
        option = strict(self, node)
        self.inside = before | {node}
        return option

    monkeypatch.setattr(SortedRows, "_inside", lenient)
    with pytest.raises(AssertionError, match=r"of the gradients' norm|Scalars are not close"):
        check(lambda: sorting(sorted_experts.mixed), LAYOUTS["cp2"], 1e-5, length=LENGTH)


@pytest.mark.check
def test_slots_for_which_all_ranks_compete_are_refused() -> None:
    with pytest.raises(PlanError, match="tokens of all ranks of cp compete for 3 slots of each expert") as refused:
        plan_again(experts.Net(slots.Slots(slots.one_hot)), spec_of(batch_of(2, LENGTH), LAYOUTS["cp2·ep2"]))
    assert refused.value.fix == "set cp: 1; or set ep: 1 and remove etp"


@pytest.mark.check
def test_matrices_of_each_pair_whose_token_a_constant_names() -> None:
    check(lambda: built(partial(layer_of, stacked_experts.of_pairs)), LAYOUTS["cp2"], length=LENGTH)


@pytest.mark.thorough
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("layout", ["cp2", *FEW])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, layout: str) -> None:
    of_family(name, LAYOUTS[layout])


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", [CUT, {"recompute": "full"}, {"recompute": "selective"}], ids=["sp", "full", "some"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_a_family_with_what_else_shards_or_frees(name: str, more: dict[str, object]) -> None:
    of_family(name, LAYOUTS["cp2·tp2·ep4, etp 1"], **more)


FLOAT32 = {"precision": {"parameters": "float32"}}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("model", ["mixtral", "mixtral-balanced"])
def test_pipelines_on_processes(lab: Lab, model: str, schedule: str) -> None:
    case = Case(model, {"cp": 2, "pp": 2, "ep": 2}, FLOAT32 | {"pipeline": {"schedule": schedule}}, 4, 1)
    assert lab.check(case).wrong == []

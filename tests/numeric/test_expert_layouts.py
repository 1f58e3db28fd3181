"""Experts spread over ranks train as one process does: own spellings in float64, families in float32, every folding.

Ranks are threads of this process; tests/numeric/test_experts.py runs a few of the same as processes.
"""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from planner import PlanError
from tests.models import experts, hugging_face, selected_rows, sliced_experts, stacked_experts
from tests.models.hugging_face import MOE, Member
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import equals_one_process, spec_of

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
    check(lambda: built(partial(layer_of, way)), FOLDINGS[folding])


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
    mesh: Mapping[str, int],
    near: float = 1e-10,
    *,
    length: int = experts.LENGTH,
    batch: Mapping[str, Tensor] | None = None,
    **more: object,
) -> None:
    """As in one process, two sequences a dp rank if no ``batch`` is given; and each layer's rows are counted once."""
    batch = dict(batch or batch_of(2 * mesh.get("dp", 1), length))
    ran = equals_one_process(make, batch, mesh, loss=near, gradient=near, **more)
    firsts = [p for rank, p in enumerate(ran.programs) if ran.plan.mesh.place(rank)["tp"] == 0]
    rows = torch.stack([program.load.figures for program in firsts]).sum(0)
    layers = ran.plan.experts if ran.plan.mesh.has_expert_axes else ()
    assert rows.sum() == sum(row.top_k for row in layers) * batch["input_ids"].numel()


@pytest.mark.sampled(2)
@pytest.mark.check
@pytest.mark.covering(1)
@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("way", LOOPS, ids=lambda w: w.__name__)
def test_a_loop_over_experts_under_every_folding(way, folding):
    hold(way, folding)


@pytest.mark.thorough
@pytest.mark.parametrize("way", OPENED, ids=lambda w: w.__name__)
def test_every_spelling_of_a_loop(way):
    hold(way, "tp2·dp2·ep2, etp 1")


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.parametrize("folding", ["tp2·dp2·ep2, etp 1", "tp2·dp2·ep2, etp 2", "tp2·ep2, etp 1"])
def test_sequence_parallelism_cuts_no_rows_of_experts(folding):
    cut = {"sequence_parallel": True, "vocabulary_multiple": 8}
    check(lambda: in_blocks(partial(experts.Layer, experts.masks)), FOLDINGS[folding], tensor_parallel=cut)


def test_ranks_in_another_order():
    mesh = {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "order": "dp-tp-ep-cp-pp"}
    check(lambda: built(partial(layer_of, experts.masks)), mesh)


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


class Changed(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return self.change(weight)


def normed(weight: Tensor) -> Tensor:
    """Each row, or each matrix of a stack, by its own size."""
    dims = tuple(range(1, weight.dim()))
    return weight / weight.float().square().sum(dims, keepdim=True).sqrt().to(weight.dtype)


def change_weights(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """``model``, with every matrix and stack in it computed from its parameter, but for embeddings."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() > 1 and not isinstance(module, nn.Embedding):
                parametrize.register_parametrization(module, name, Changed(change))
    return model


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("change", [torch.tanh, normed], ids=lambda c: c.__name__)
@pytest.mark.parametrize("way", CHANGED, ids=lambda w: w.__name__)
def test_experts_and_routers_with_computed_weights(way, change):
    """The norm is computed in float32."""
    near = 1e-10 if change is torch.tanh else 1e-6
    check(lambda: change_weights(built(partial(layer_of, way)), change), FOLDINGS["ep2·dp2"], near)


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

    for folding in ("ep2·dp2", "tp2·dp2·ep2, etp 1"):
        check(make, FOLDINGS[folding], batch=batch_of(2, length))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [stacked_experts.of_pairs, experts.copied], ids=lambda w: w.__name__)
def test_one_token_that_goes_to_one_expert(way):
    def layer() -> nn.Module:
        return stacked_experts.Stacks(way, top_k=1) if way in stacked_experts.WAYS else experts.Layer(way, top_k=1)

    check(lambda: built(layer), FOLDINGS["ep2·dp2"], batch=batch_of(2, 1))


FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "olmoe", "granitemoe", "phimoe")


def family(name: str | Member) -> nn.Module:
    torch.manual_seed(3)
    model = hugging_face.made(MOE[name] if isinstance(name, str) else name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()  # in training phimoe draws its experts


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("folding", FEW)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_with_stacks_of_experts(name, folding):
    mesh = FOLDINGS[folding]
    batch = hugging_face.batch("mixtral")
    rows = 2 * mesh.get("dp", 1)
    batch = {key: torch.cat([x, x.roll(1, 1), x.roll(2, 1), x.roll(3, 1)])[:rows] for key, x in batch.items()}
    check(lambda: family(name), mesh, 1e-5, batch=batch)


@pytest.mark.thorough
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("mesh", [{}, {"dp": 2, "ep": 2}], ids=["one rank", "ep2·dp2"])
def test_groups_of_experts_of_which_only_the_best_scores_are_read_can_be_recomputed(kind: str, mesh: dict[str, int]):
    """Autograd keeps the indices of that top-k, and nothing in the graph has their name."""
    found = hugging_face.batch("mixtral")
    batch = {key: torch.cat([x, x.roll(1, 1)])[: 2 * mesh.get("dp", 1)] for key, x in found.items()}
    check(lambda: family("deepseek_v3"), mesh, 1e-5, batch=batch, recompute=kind)

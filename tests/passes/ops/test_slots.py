"""Slots go to their experts and come back as in the oracle; where tp does not divide them, as in one process."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.counts import ExpertLoad
from passes.ops.slots import return_slots, send_slots
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks

CASE = json.loads((ROOT / "tests/oracles/moe_dispatch.json").read_text())["cases"]["ep4_droppad"]
ALONE = AxisHandle("tp", 1, 0), AxisHandle("etp", 1, 0)


def handle(name: str, rank: int, groups: list[list[int]]) -> AxisHandle:
    """Every rank makes every group."""
    made = [dist.new_group(ranks) for ranks in groups]
    ranks, group = next((ranks, made[i]) for i, ranks in enumerate(groups) if rank in ranks)
    axis = AxisHandle(name, len(ranks), ranks.index(rank))
    axis.group = group
    return axis


def test_padded_slots_go_to_experts_and_back_as_in_the_oracle():
    def run(rank: int) -> dict[str, Any]:
        case, ep = CASE[rank], handle("ep", rank, [[0, 1, 2, 3]])
        probs, slots = torch.tensor(case["probs"]), torch.tensor(case["permuted_token_ids"]).view(8, -1) - 100 * rank
        weights = probs.gather(0, slots.long().t()).t()
        sent = torch.stack([slots + 100 * rank, weights], -1)
        here = send_slots(sent, 0, 1, None, ALONE[0], ep, ALONE[1], ExpertLoad([8]), 0)
        back = return_slots(here.prod(-1, keepdim=True), 0, 1, ALONE[0], ep, ALONE[1], slots.shape[1])
        combined = torch.zeros(len(probs)).index_add(0, slots.long().flatten(), back.flatten())
        return {
            "tokens_per_expert": [here.shape[1]] * here.shape[0],
            "dispatched_token_ids": here[..., 0].flatten().tolist(),
            "dispatched_probs": pytest.approx(here[..., 1].flatten().tolist(), rel=1e-6),
            "combined_col0": pytest.approx(combined.tolist(), rel=1e-6),
        }

    for found, case in zip(Ranks(4).run(run), CASE, strict=True):
        assert {key: case[key] for key in found} == found


@pytest.mark.parametrize("size", [1, 3, 4])
def test_each_rank_of_tp_sends_its_share_of_slots_and_gets_it_back(size):
    """Experts over two tp ranks; each has a part of every sum: etp 2 adds them."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, size, 3, dtype=torch.float64)  # a dim before the experts; 4 of them
    y = torch.randn(2, 4, size, 3, dtype=torch.float64)

    def run(rank: int) -> tuple[Tensor, Tensor, int]:
        tp, ep = handle("tp", rank, [[0, 1], [2, 3]]), handle("ep", rank, [[0, 2], [1, 3]])
        etp = handle("etp", rank, [[0, 1], [2, 3]])
        own = (x if rank < 2 else y).clone().requires_grad_()
        here = send_slots(own, 1, 2, None, tp, ep, etp, ExpertLoad([4]), 0)
        factor = torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1, 1)[2 * ep.rank : 2 * ep.rank + 2]
        back = return_slots(here * factor / 2, 1, 2, tp, ep, etp, size)
        back.square().sum().backward()
        return back.detach(), own.grad, ep.bytes["all_to_all", "forward"]  # pyright: ignore[reportReturnType]

    ran, factor = Ranks(4).run(run), torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1, 1)
    for given, ranks in ((x, ran[:2]), (y, ran[2:])):
        torch.testing.assert_close(ranks[0][0] + ranks[1][0], given * factor)
        torch.testing.assert_close(ranks[0][1] + ranks[1][1], 2 * given * factor**2)
    assert all(sent == 2 * (2 * 4 * -(-size // 2) * 3) * 8 for _, _, sent in ran)


def test_figures_count_in_a_step_alone():
    load = ExpertLoad([2, 2], [0, 3])
    load.begin(torch.device("cpu"))
    load.note(0, torch.tensor([4, 5]))
    load.note(1, torch.tensor([[4, 2], [0, 7]]))  # two groups with slots of their own
    load.end()
    load.note(0, torch.tensor([1, 1]))
    assert load.figures is not None
    assert load.figures.tolist() == [4, 5, 4, 9, 5]
    memory = load.figures.data_ptr()
    load.begin(torch.device("cpu"))
    assert (load.figures.tolist(), load.figures.data_ptr()) == ([0] * 5, memory)

"""Tokens go to their experts and come back as in the oracle, and as in one process that holds every expert."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.experts import Splits, dispatch, gather_in, give_back, splits_of_both, spread_rows
from tests.tools.examples import examples
from tests.tools.expert_rows import permute, route, unpermute
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks

ORACLES = ROOT / "tests/oracles"
CASES = json.loads((ORACLES / "moe_dispatch.json").read_text())["cases"]
NUMERIC = json.loads((ORACLES / "moe_numeric.json").read_text())


def chosen_of(routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and weights of what a map marks, the same number in each row."""
    chosen = torch.stack([row.nonzero().flatten() for row in routing_map])
    return chosen, probs.gather(1, chosen)


def axes(rank: int, ep: int, etp: int) -> tuple[AxisHandle, AxisHandle]:
    """The axes of rank = ep_rank · etp + etp_rank; every rank makes every group."""
    over_ep = [dist.new_group([e * etp + t for e in range(ep)]) for t in range(etp)]
    over_etp = [dist.new_group([e * etp + t for t in range(etp)]) for e in range(ep)]
    handles = AxisHandle("ep", ep, rank // etp), AxisHandle("etp", etp, rank % etp)
    handles[0].group, handles[1].group = over_ep[rank % etp], over_etp[rank // etp]
    return handles


def there(rows: Tensor, splits: Splits, shared: Splits | None, ep: AxisHandle, etp: AxisHandle) -> Tensor:
    """The rows of this rank's experts, of all etp ranks."""
    came = dispatch(rows, splits, ep)
    return came if shared is None else spread_rows(came, shared, etp)


def back_again(made: Tensor, splits: Splits, shared: Splits | None, ep: AxisHandle, etp: AxisHandle) -> Tensor:
    return give_back(made if shared is None else gather_in(made, shared, etp), splits, ep)


@pytest.mark.parametrize("name", ["ep4", "ep4_1local", "ep2etp2", "ep2_etp2_1local"])
def test_the_way_to_the_experts_and_back_is_that_of_the_oracle(name):
    ranks = CASES[name]
    etp = 1 + max(case["etp_rank"] for case in ranks)

    def run(rank: int) -> dict[str, Any]:
        case, (ep_axis, etp_axis) = ranks[rank], axes(rank, 4 // etp, etp)
        chosen, probs = chosen_of(torch.tensor(case["routing_map"]), torch.tensor(case["probs"]))
        x = torch.arange(len(probs), dtype=torch.float32)[:, None] + 100 * rank
        order, counts = route(chosen, len(case["routing_map"][0]))
        splits, shared, _ = splits_of_both(counts, ep_axis, etp_axis)
        rows = permute(x, order, chosen.shape[1])
        came = there(rows, splits, shared, ep_axis, etp_axis)
        back = back_again(came, splits, shared, ep_axis, etp_axis)  # every etp rank gives the whole: etp times
        return {
            "ep_rank": ep_axis.rank,
            "etp_rank": etp_axis.rank,
            "input_splits": splits.sent,
            "output_splits": splits.received,
            "output_splits_tp": shared.received if shared else case["output_splits_tp"],
            "tokens_per_expert": (shared or splits).counts.tolist(),
            "permuted_token_ids": rows[:, 0].tolist(),
            "dispatched_token_ids": came[:, 0].tolist(),
            "combined_col0": pytest.approx(unpermute(back, order, probs)[:, 0].tolist(), rel=1e-6),
        }

    for found, case in zip(Ranks(4).run(run), ranks, strict=True):
        assert {key: case[key] for key in found} == found


def test_rows_are_permuted_as_in_the_oracle():
    case = NUMERIC["permute"]
    tokens, probs = torch.tensor(case["tokens"]), torch.tensor(case["probs"])
    chosen, weights = chosen_of(torch.tensor(case["routing_map"]), probs)
    order, counts = route(chosen, probs.shape[1])
    assert counts.tolist() == torch.tensor(case["routing_map"]).sum(0).tolist()
    rows = permute(tokens, order, chosen.shape[1])
    assert rows.tolist() == case["permuted_tokens"]
    assert (order // chosen.shape[1]).tolist() == case["sorted_indices"]
    torch.testing.assert_close(unpermute(rows, order, weights), tokens * weights.sum(1, keepdim=True))


@given(
    st.integers(0, 10_000), st.sampled_from([(1, 1, 4), (2, 1, 6), (4, 1, 4), (1, 2, 4), (2, 2, 4)]), st.integers(1, 3)
)
@examples(20)
def test_ranks_that_share_the_experts_compute_what_one_process_computes(seed, sizes, top_k):
    """Any routing, also an expert that nobody chose or that all did: results and every gradient, in float64."""
    ep, etp, num_experts = sizes
    generator = torch.Generator().manual_seed(seed)
    num_ranks, top_k = ep * etp, min(top_k, num_experts)
    x, first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((num_ranks, 5, 3), (num_experts, 3, 4), (num_experts, 4, 3))
    )
    spread_out = torch.randn(num_experts, generator=generator) * (seed % 3) * 5  # the larger, the fewer are chosen
    scores = torch.randn(num_ranks, 5, num_experts, generator=generator) + spread_out
    probs, chosen = scores.double().softmax(-1).topk(top_k)

    def layer(rank: int, ep: int, etp: int) -> tuple[Tensor, ...]:
        ep_axis, etp_axis = axes(rank, ep, etp)
        here, width, share = num_experts // ep, 4 // etp, num_ranks // (ep * etp)
        mine = slice(rank * share, (rank + 1) * share)
        experts = slice(ep_axis.rank * here, (ep_axis.rank + 1) * here)
        part = slice(etp_axis.rank * width, (etp_axis.rank + 1) * width)
        up, down = first[experts, :, part].clone().requires_grad_(), second[experts, part].clone().requires_grad_()
        tokens, p = (v[mine].flatten(0, 1).clone().requires_grad_() for v in (x, probs))
        order, counts = route(chosen[mine].flatten(0, 1), num_experts)
        splits, shared, _ = splits_of_both(counts, ep_axis, etp_axis)
        came = there(permute(tokens, order, top_k), splits, shared, ep_axis, etp_axis)
        runs = came.split((shared or splits).counts.tolist())
        made = torch.cat([(rows @ up[e]).tanh() @ down[e] for e, rows in enumerate(runs)])
        out = unpermute(back_again(made, splits, shared, ep_axis, etp_axis), order, p)
        out.square().sum().backward()
        found = [out.detach(), tokens.grad, p.grad, up.grad, down.grad]
        for at, dim in ((3, 2), (4, 1)):  # the other parts of these experts are zeros here
            whole = torch.zeros(num_experts, *((3, 4) if at == 3 else (4, 3)), dtype=torch.float64)
            whole[experts].narrow(dim, part.start, width).copy_(found[at])
            found[at] = whole
        return tuple(found)  # pyright: ignore[reportReturnType]

    truth = Ranks(1).run(lambda rank: layer(rank, 1, 1))[0]
    ranks = list(zip(*Ranks(num_ranks).run(lambda rank: layer(rank, ep, etp)), strict=True))
    found = [*map(torch.cat, ranks[:3]), *(torch.stack(parts).sum(0) for parts in ranks[3:])]
    for value, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)

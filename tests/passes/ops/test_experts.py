"""Tokens go to their experts and come back as in the oracle, and as in one process that holds every expert."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.experts import dispatch, give_back, permute, route, splits_of, unpermute
from tests.tools.paths import ROOT
from tests.tools.simulated_ranks import on_threads

ORACLES = ROOT / "tests/oracles"
CASES = json.loads((ORACLES / "moe_dispatch.json").read_text())["cases"]
NUMERIC = json.loads((ORACLES / "moe_numeric.json").read_text())


def chosen_of(routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and weights of what a map marks, the same number in each row."""
    chosen = torch.stack([row.nonzero().flatten() for row in routing_map])
    return chosen, probs.gather(1, chosen)


@pytest.mark.parametrize("name", ["ep4", "ep4_1local"])
def test_the_all_to_all_is_that_of_the_oracle(name):
    ranks = CASES[name]

    def run(rank: int) -> dict[str, Any]:
        case, axis = ranks[rank], AxisHandle("ep", 4, rank)
        chosen, probs = chosen_of(torch.tensor(case["routing_map"]), torch.tensor(case["probs"]))
        x = torch.arange(len(probs), dtype=torch.float32)[:, None] + 100 * rank
        order, counts = route(chosen, len(case["routing_map"][0]))
        splits = splits_of(counts, axis)
        rows = permute(x, order, chosen.shape[1])
        came = dispatch(rows, splits, axis)
        weighted = unpermute(give_back(came, splits, axis), order, probs)
        return {
            "input_splits": splits.sent,
            "output_splits": splits.received,
            "tokens_per_expert": splits.counts.tolist(),
            "permuted_token_ids": rows[:, 0].tolist(),
            "dispatched_token_ids": came[:, 0].tolist(),
            "combined_col0": pytest.approx(weighted[:, 0].tolist(), rel=1e-6),
        }

    for found, case in zip(on_threads(4, run), ranks, strict=True):
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


@given(st.integers(0, 10_000), st.sampled_from([(1, 4), (2, 4), (2, 6), (4, 4)]), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_ranks_that_share_the_experts_compute_what_one_process_computes(seed, sizes, top_k):
    """Any routing, also an expert that nobody chose or that all did: results and every gradient, in float64."""
    ep, num_experts = sizes
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ep, 5, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(num_experts, 3, 3, generator=generator, dtype=torch.float64)
    spread = torch.randn(num_experts, generator=generator) * (seed % 3) * 5  # the larger, the fewer are chosen
    scores = torch.randn(ep, 5, num_experts, generator=generator) + spread
    probs, chosen = scores.double().softmax(-1).topk(min(top_k, num_experts))

    def layer(rank: int, size: int) -> tuple[Tensor, ...]:
        here, axis = num_experts // size, AxisHandle("ep", size, rank)
        mine = slice(rank * x.shape[0] // size, (rank + 1) * x.shape[0] // size)
        w = weights[rank * here : (rank + 1) * here].clone().requires_grad_()
        tokens, p = (v[mine].flatten(0, 1).clone().requires_grad_() for v in (x, probs))
        order, counts = route(chosen[mine].flatten(0, 1), num_experts)
        splits = splits_of(counts, axis)
        came = dispatch(permute(tokens, order, p.shape[1]), splits, axis)
        made = torch.cat([part @ w[e] for e, part in enumerate(came.split(splits.counts.tolist()))]).tanh()
        out = unpermute(give_back(made, splits, axis), order, p)
        out.square().sum().backward()
        found = out.detach(), tokens.grad, p.grad, w.grad
        assert all(v is not None for v in found)
        return found  # pyright: ignore[reportReturnType]

    whole = layer(0, 1)
    for found, truth in zip(
        map(torch.cat, zip(*on_threads(ep, lambda r: layer(r, ep)), strict=True)), whole, strict=True
    ):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)

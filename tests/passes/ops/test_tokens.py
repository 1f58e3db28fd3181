"""Tokens that go once to a rank, or first once to a node, give what one process computes; and no more leaves a rank."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from passes.ops import meeting
from passes.ops.axis import AxisHandle
from passes.ops.counts import ExpertLoad
from tests.tools.examples import examples
from tests.tools.expert_rows import route
from tests.tools.ranks import Ranks

EXPERTS, TOKENS = 8, 5
# ep, nodes, etp, tp
LAYOUTS = [
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (4, 2, 1, 1),
    (4, 4, 1, 1),
    (8, 2, 1, 1),
    (2, 1, 2, 1),
    (2, 2, 1, 2),
]


def axes(rank: int, ep: int, etp: int, tp: int) -> tuple[AxisHandle, AxisHandle, AxisHandle]:
    """rank = ep_rank · etp + etp_rank; the ranks of tp, which have the same tokens, lie next to each other."""
    over_ep = [dist.new_group([e * etp + t for e in range(ep)]) for t in range(etp)]
    over_etp = [dist.new_group([e * etp + t for t in range(etp)]) for e in range(ep)]
    found = AxisHandle("tp", tp, rank % tp), AxisHandle("ep", ep, rank // etp), AxisHandle("etp", etp, rank % etp)
    found[1].group, found[2].group = over_ep[rank % etp], over_etp[rank // etp]
    return found


def met(rank: int, chosen: Tensor, layout: tuple[int, int, int, int]) -> tuple[meeting.Meeting, AxisHandle, Tensor]:
    ep, nodes, etp, tp = layout
    load = ExpertLoad((), (), 0)
    load.note = lambda layer, counts: None
    order, counts = route(chosen, EXPERTS)
    token, handles = order // chosen.shape[1], axes(rank, ep, etp, tp)
    here = meeting.meet(counts, len(order), *handles, load, 0, token, len(chosen), nodes)
    return here, handles[1], order


def grad_of(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad


@given(st.integers(0, 10_000), st.sampled_from(LAYOUTS), st.integers(1, 3))
@examples(30)
def test_tokens_that_go_once_to_a_rank_compute_what_one_process_computes(seed, layout, top_k):
    """Any routing, also an expert that nobody chose: results and every gradient, in float64."""
    ep, _, etp, tp = layout
    generator = torch.Generator().manual_seed(seed)
    num_inputs = ep * etp // tp
    x, probs = (torch.randn(num_inputs, TOKENS, n, generator=generator, dtype=torch.float64) for n in (3, top_k))
    weights = torch.randn(EXPERTS, 3, 3, generator=generator, dtype=torch.float64)
    skew = torch.randn(EXPERTS, generator=generator) * (seed % 3) * 5
    chosen = (torch.randn(num_inputs, TOKENS, EXPERTS, generator=generator) + skew).topk(top_k).indices

    def layer(rank: int, layout: tuple[int, int, int, int], inputs: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ep, _, etp, _ = layout
        tokens, p = (v[inputs].flatten(0, 1).clone().requires_grad_() for v in (x, probs))
        here, axis, order = met(rank, chosen[inputs].flatten(0, 1), layout)
        own = weights.view(ep, -1, 3, 3)[axis.rank].clone().requires_grad_()
        w = meeting.dispatch(p.reshape(-1)[order], here)
        rows = meeting.dispatch_tokens(tokens, here)
        part = torch.cat([r @ m for r, m in zip(rows.split(here.sizes), own, strict=True)]) / etp
        out = meeting.combine(part.tanh() * w[:, None], here, part.dtype)
        out.backward(torch.ones_like(out) * (1 + torch.arange(3)))
        whole = torch.zeros(ep, EXPERTS // ep, 3, 3, dtype=torch.float64)
        whole[axis.rank] = grad_of(own)
        return out.detach(), grad_of(tokens), grad_of(p), whole.view(weights.shape)

    if etp > 1:  # each of etp has a part that a tanh does not add up: compare the ways alone
        weights = weights * 1e-9  # tanh(x) = x
    truth = Ranks(1).run(lambda rank: layer(rank, (1, 1, 1, 1), slice(None)))[0]
    found = Ranks(ep * etp).run(lambda rank: layer(rank, layout, slice(rank // tp, rank // tp + 1)))
    *of_tokens, of_weights = (torch.stack(values) for values in zip(*found, strict=True))
    by_input = [values.unflatten(0, (num_inputs, tp)).sum(1).flatten(0, 1) for values in of_tokens]
    for value, expected in zip([*by_input, of_weights.sum(0)], truth, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("nodes", "sent"), [(1, [4]), (2, [2, 4])])
def test_a_token_leaves_once_for_each_rank_or_node_of_its_experts(nodes: int, sent: list[int]):
    """Rank 0 of 4, two experts each: token 0 → ranks 0 and 1, token 1 → ranks 2 and 3, two rows each. Over two nodes
    it passes on the tokens of ranks 0 and 2 for its own.
    """
    chosen = torch.tensor([[0, 2, 1, 3], [4, 5, 6, 7]])
    here = Ranks(4).run(lambda rank: met(rank, chosen, (4, nodes, 1, 1)))[0][0]
    assert here.tokens is not None
    assert [sum(hop.sent) for hop in here.tokens.hops] == sent

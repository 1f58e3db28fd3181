"""Shards and full tensors are each other's inverse, and fresh weights do not depend on the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from passes.errors import PlanError
from passes.parameters import LocalParameter
from passes.program.matrices import parameter_roles
from passes.types.types import I, Placement, R, Segment, V
from planner.sharding.boxes import Part
from runtime.weights.shards import fresh_shard, shard
from runtime.weights.sources import InitialWeights, ModelWeights
from tests.tools.shards import assemble


@st.composite
def cuts(draw):
    """A tp size, a placement over a dim of random segments, and the tensor's shape."""
    tp = draw(st.sampled_from([1, 2, 4]))
    segments = draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4))
    padding = draw(st.integers(0, 3)) * tp if segments[-1][1] else 0
    pieces = tuple(Segment(n * tp if sharded else n, sharded) for n, sharded in segments)
    dim = draw(st.integers(0, 2))
    shape = [2, 3, 2]
    shape[dim] = sum(piece.size for piece in pieces)
    return tp, Placement("V", dim, pieces, padding), tuple(shape)


@given(cuts())
def test_assembled_shards_are_the_full_tensor(cut):
    tp, placement, shape = cut
    full = torch.randn(shape)
    parts = [Part(placement, tp, rank) for rank in range(tp)]
    shards = [shard(full, part) for part in parts]
    assert {tuple(s.shape) for s in shards} == {placement.local_shape(shape, tp)}
    assert torch.equal(assemble(parts, shards, shape), full)


@pytest.mark.parametrize("placement", [I, R], ids=str)
def test_a_whole_parameter_is_the_same_on_every_rank(placement):
    full = torch.randn(3, 2)
    assert all(torch.equal(shard(full, Part(placement, 4, rank)), full) for rank in range(4))
    assert torch.equal(assemble([Part(placement)], [full], (3, 2)), full)


def test_a_fused_weight_is_cut_in_each_segment():
    full = torch.arange(12)
    assert shard(full, Part(V(0, 4, 4, 4), 2, 1)).tolist() == [2, 3, 6, 7, 10, 11]


def test_padding_holds_zeros():
    assert shard(torch.ones(3), Part(V(0, 3, padding=5), 2, 0)).tolist() == [1, 1, 1, 0]
    assert shard(torch.ones(3), Part(V(0, 3, padding=5), 2, 1)).tolist() == [0, 0, 0, 0]


def test_the_gathered_tensor_does_not_alias_the_shard():
    full = torch.ones(3)
    assemble([Part(I)], [full], (3,)).zero_()
    assert full.tolist() == [1, 1, 1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + torch.nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.1)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.scale = nn.Embedding(10, 4), Block(), nn.Parameter(torch.ones(4))

    def forward(self, ids):
        return {"loss": (self.block(self.embed(ids)) * self.scale).sum()}


def roles() -> dict[str, str]:
    from planner.capture.export import capture

    program = capture(Scaled(), {"ids": torch.zeros(2, 3, dtype=torch.int64)})
    return parameter_roles(program.graph.graph, program.parameters)


def test_roles_come_from_the_structure_of_the_graph():
    assert roles() == {
        "embed.weight": "",
        "block.norm.weight": "scale",
        "block.norm.bias": "bias",
        "block.up.weight": "",
        "block.up.bias": "bias",
        "block.down.weight": "residual",
        "block.down.bias": "bias",
        "scale": "scale",
    }


def test_fresh_weights_are_seeded_by_name_and_scaled_by_role():
    with torch.device("meta"):
        model = Scaled()
    source = InitialWeights(model, {**roles(), "block.up.weight": "residual"}, seed=1, std=0.02, residual_scale=True)
    again = InitialWeights(model, {}, seed=1, std=0.02, residual_scale=True)
    assert torch.equal(source.parameter("scale", (4,), torch.float32), torch.ones(4))
    assert torch.equal(source.parameter("block.norm.bias", (4,), torch.float32), torch.zeros(4))
    embed = source.parameter("embed.weight", (10_000, 4), torch.float32)
    assert torch.equal(embed, again.parameter("embed.weight", (10_000, 4), torch.float32))
    assert embed.std().item() == pytest.approx(0.02, rel=0.02)
    down = source.parameter("block.down.weight", (1000, 8), torch.float32)
    assert down.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert not torch.equal(embed[:4], source.parameter("block.up.weight", (4, 4), torch.float32))


def test_a_meta_parameter_without_values_is_refused_with_a_way_out():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="parameter weight has no values") as caught:
        ModelWeights(model).parameter("weight", (2, 2), torch.float32)
    assert "load_pretrained" in caught.value.fix


@given(cuts(), st.integers(0, 3))
def test_a_fresh_shard_is_the_part_of_the_whole_fresh_tensor(cut, tp_rank):
    tp, placement, shape = cut
    with torch.device("meta"):
        source = InitialWeights(nn.Linear(1, 1), {}, seed=1, std=1.0, residual_scale=True)
    rank = tp_rank % tp
    parameter = LocalParameter("weight", placement.local_shape(shape, tp), torch.float32, placement, shape)
    part = Part(placement, tp, rank)
    expected = shard(source.parameter("weight", shape, torch.float32), part)
    assert torch.equal(fresh_shard(source, parameter, part), expected)

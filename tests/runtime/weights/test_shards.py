"""Shards and full tensors are each other's inverse, and fresh weights do not depend on the layout."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from passes.errors import PlanError
from passes.moe.layers import ExpertPart
from passes.parameters import LocalParameter
from passes.program.matrices import parameter_roles
from passes.types.types import I, Placement, R, Segment, V
from planner.mesh import Mesh
from planner.sharding.boxes import Part, part_of
from planner.sharding.parameters import ParameterPlan
from runtime.checkpoint.hub_tensors import read_ranges
from runtime.checkpoint.safetensors_files import SafetensorsFiles
from runtime.weights.shards import fresh_shard, senders_of, shard
from runtime.weights.sources import InitialWeights, ModelWeights
from tests.tools.examples import examples
from tests.tools.simulated_mesh import assemble


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


SIZES = [1, 2, 4]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """tp·dp = etp·ep·edp, a pipeline of 1 or 2, and stages' ranks that stand together."""
    etp, ep, edp = (draw(st.sampled_from(SIZES)) for _ in range(3))
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if (etp * ep * edp) % n == 0]))
    return Mesh(tp=tp, dp=etp * ep * edp // tp, ep=ep, etp=etp, pp=draw(st.sampled_from([1, 2])))


@st.composite
def rows(draw: st.DrawFn, mesh: Mesh) -> ParameterPlan:
    """A stack with its experts on some dim and its width on another, or the parameter of one expert alone."""
    num_experts, shape = mesh.ep * draw(st.integers(1, 2)), [draw(st.integers(1, 3)) for _ in range(3)]
    is_stack = draw(st.booleans())
    dim = draw(st.integers(0, 2)) if is_stack else -1
    expert = ExpertPart(num_experts, dim, -1 if is_stack else draw(st.integers(0, num_experts - 1)))
    placement = draw(st.sampled_from([I, R]))
    if draw(st.booleans()):
        width = draw(st.sampled_from([d for d in range(3) if d != dim]))
        segments = [Segment(mesh.etp * draw(st.integers(1, 2)), draw(st.booleans())) for _ in range(2)]
        padding = mesh.etp * draw(st.integers(0, 1)) if segments[-1].sharded else 0
        placement = Placement("V", width, tuple(segments), padding)
        shape[width] = sum(s.size for s in segments)
    if is_stack:
        shape[dim] = num_experts
    part = Part(placement, mesh.etp, 0, expert, mesh.ep, 0)
    stages = (draw(st.integers(0, mesh.pp - 1)),)
    return ParameterPlan.of(
        part, name="w", shape=tuple(shape), dtype="float32", style="expert", stages=stages, reason=""
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, ParameterPlan]:
    mesh = draw(meshes())
    return mesh, draw(rows(mesh))


def holders(mesh: Mesh, row: ParameterPlan) -> list[int]:
    """The ranks of its stage that have any of it."""
    assert row.expert is not None
    places = {rank: mesh.place(rank) for rank in range(mesh.world_size)}
    return [r for r, p in places.items() if p["pp"] == row.stages[0] and row.expert.is_held(mesh.ep, p["ep"])]


@pytest.mark.thorough
@given(cases())
def test_the_parts_of_all_who_send_are_the_whole_tensor_for_every_folding(case):
    mesh, row = case
    full = torch.arange(row.num_elements).view(row.shape)
    shards = {rank: shard(full, part_of(row, mesh, mesh.place(rank))) for rank in holders(mesh, row)}
    assert {tuple(s.shape) for s in shards.values()} == {row.local_shape}
    senders = senders_of(row, mesh)
    assert torch.equal(assemble(list(senders.values()), [shards[rank] for rank in senders], row.shape), full)


@given(cases())
def test_each_part_is_sent_once_and_by_the_first_rank_that_has_it(case):
    mesh, row = case
    first: dict[object, int] = {}
    for rank in holders(mesh, row):
        place = mesh.place(rank)
        first.setdefault((place["ep"], place["etp"] if row.dim is not None else 0), rank)
    assert sorted(senders_of(row, mesh)) == sorted(first.values())


@given(cases())
def test_ranks_at_one_ep_and_etp_coordinate_have_the_same_part(case):
    mesh, row = case
    seen: dict[tuple[int, int], Part] = {}
    for rank in holders(mesh, row):
        place = mesh.place(rank)
        part = part_of(row, mesh, place)
        assert seen.setdefault((place["ep"], place["etp"]), part) == part
    assert row.expert is not None
    assert len(seen) == mesh.etp * (mesh.ep if row.expert.dim >= 0 else 1)


@given(cases())
def test_a_fresh_part_is_that_of_the_whole_fresh_tensor(case):
    mesh, row = case
    with torch.device("meta"):
        source = InitialWeights(nn.Linear(1, 1), {}, seed=1, std=1.0, residual_scale=True)
    whole = source.parameter("w", row.shape, torch.float32)
    held = LocalParameter("w", row.local_shape, torch.float32, row.placement, row.shape, expert=row.expert)
    for rank in holders(mesh, row):
        part = part_of(row, mesh, mesh.place(rank))
        assert torch.equal(fresh_shard(source, held, part), shard(whole, part))


class Counted(InitialWeights):
    """Counts the rows that are drawn."""

    num_rows = 0

    def rows(self, fqn, shape, dtype, rows):
        self.num_rows += shape[0] if rows is None else rows[1] - rows[0]
        return super().rows(fqn, shape, dtype, rows)


def test_a_rank_draws_its_own_experts_alone():
    with torch.device("meta"):
        source = Counted(nn.Linear(1, 1), {}, seed=1, std=1.0, residual_scale=True)
    part = Part(V(2, 6), 2, 1, ExpertPart(8, 0), 4, 2)
    held = LocalParameter("w", (2, 5, 3), torch.float32, part.placement, (8, 5, 6), expert=part.expert)
    assert fresh_shard(source, held, part).shape == (2, 5, 3)
    assert source.num_rows == 2


@examples(40)
@given(cases())
def test_a_rank_reads_its_part_of_a_file(case):
    mesh, row = case
    full = torch.randn(row.shape)
    with TemporaryDirectory() as directory:
        save_file({"w": full}, Path(directory) / "model.safetensors")
        with SafetensorsFiles(Path(directory)) as files:
            for rank in holders(mesh, row):
                part = part_of(row, mesh, mesh.place(rank))
                read = torch.zeros(row.local_shape)
                read_ranges(read, files.source("w"), part.ranges, files.read)
                assert torch.equal(read, shard(full, part))


class Watched:
    """The file of one tensor, which notes the shape of every slice that is read."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.values, self.shapes = handle, None, []

    def get_slice(self, name: str) -> Watched:
        self.values = self.handle.get_slice(name)
        return self

    def __getitem__(self, slices: Any) -> Tensor:
        found = self.values[slices]
        self.shapes.append(tuple(found.shape))
        return found


def test_a_rank_reads_nothing_but_the_slices_of_its_part():
    with TemporaryDirectory() as directory:
        save_file({"w": torch.zeros(8, 5, 6)}, Path(directory) / "model.safetensors")
        with SafetensorsFiles(Path(directory)) as files:
            ((path, handle),) = files._handles.items()
            files._handles[path] = watched = Watched(handle)
            part = Part(V(1, 5, padding=1), 2, 1, ExpertPart(8, 0), 4, 2)
            read_ranges(torch.zeros(2, 3, 6), files.source("w"), part.ranges, files.read)
    assert watched.shapes == [(2, 2, 6)]


def test_a_stack_is_not_cut_twice_on_one_dim():
    with pytest.raises(PlanError, match="dim 0 of a stack of experts is cut over etp, and over ep"):
        Part(V(0, 8), 2, 0, ExpertPart(8, 0), 2, 0)

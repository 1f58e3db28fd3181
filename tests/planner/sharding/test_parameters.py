"""What a rank holds of a parameter: the row and the cut say the same, each element counts once, sums over the right."""

from collections import Counter
from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.parameters import LocalParameter
from passes.types.types import I, Placement, Segment
from planner import Plan, plan
from planner.sharding.boxes import Part
from planner.sharding.parameters import ParameterPlan, parameters_of_rank
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again

ROW = {"name": "w", "dtype": "float32", "style": "column", "stages": (0,), "reason": "", "origin": "solver"}


@st.composite
def cuts(draw: st.DrawFn, padding: bool = True) -> tuple[Placement, tuple[int, ...], int]:
    """A cut of a tensor, its shape, and the size of tp; some segments are whole, the last one may be padded."""
    tp = draw(st.sampled_from([2, 3, 4]))
    segments = [Segment(tp * draw(st.integers(1, 4)), draw(st.booleans())) for _ in range(draw(st.integers(1, 4)))]
    added = 0
    if padding and draw(st.booleans()):
        added = draw(st.integers(1, tp - 1))
        segments[-1] = Segment(segments[-1].size + tp - added)
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(s.size for s in segments)
    return Placement("V", dim, tuple(segments), added), tuple(shape), tp


@given(cuts())
def test_the_cut_of_a_row_is_the_cut_that_it_was_made_of(given_cut):
    placement, shape, tp = given_cut
    row = ParameterPlan.of(Part(placement, tp), shape=shape, **ROW)
    assert row.placement == placement
    assert row.local_shape == row.placement.local_shape(shape, tp)
    assert ParameterPlan.of(Part(I, tp), shape=shape, **ROW).placement == I


@given(cuts(padding=False), st.data())
def test_whole_elements_are_those_of_a_mask(given_cut, data):
    placement, shape, tp = given_cut
    held = LocalParameter("w", placement.local_shape(shape, tp), torch.float32, placement, shape, ("tp",))
    line = torch.cat([torch.full((s.local(tp),), not s.sharded) for s in placement.segments])
    along = [len(line) if d == placement.dim else 1 for d in range(len(shape))]
    mask = line.view(along).expand(held.shape).flatten()
    stop = data.draw(st.integers(0, mask.numel()))
    assert held.num_whole_elements(tp, stop) == int(mask[:stop].sum())
    assert held.has_whole_segment == bool(mask.any())


@cache
def planned(model: str, **mesh: int) -> Plan:
    return plan_again(build(model), spec_of(model, mesh=mesh))


def held_by(made: Plan, pp_rank: int, tp_rank: int = 0) -> list[LocalParameter]:
    assert made.decisions is not None
    return list(parameters_of_rank(made.decisions, pp_rank, made.mesh.place(made.mesh.rank_of(pp=pp_rank, tp=tp_rank))))


MESHES = [("gpt", {"tp": 2, "pp": 2}), ("llama, one key head", {"tp": 2}), ("fused, one key head", {"tp": 2, "pp": 2})]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh"), MESHES)
def test_every_element_is_counted_once_over_tp_and_stages(model, mesh):
    """Of a weight with whole segments every rank counts what is cut, and tp rank 0 alone what all of them hold."""
    made = planned(model, **mesh)
    counted: Counter[str] = Counter()
    for pp_rank in range(mesh.get("pp", 1)):
        for tp_rank in range(2):
            for p in held_by(made, pp_rank, tp_rank):
                repeated = p.num_whole_elements(2, prod(p.shape)) if p.has_whole_segment and tp_rank else 0
                counted[p.fqn] += p.counted * (prod(p.shape) - repeated)
    assert counted == {p.name: p.num_elements for p in made.parameters}


def test_the_sums_of_a_tied_weight_and_of_one_that_every_rank_reads():
    held = {p.fqn: p for rank in (0, 1) for p in held_by(planned("gpt", tp=2, pp=2), rank)}
    tied = held["tokens.weight"]
    assert (tied.partial_over, tied.tied_stages, tied.counted) == (("embedding",), (0, 1), False), "as of stage 1"
    assert (held["blocks.0.mlp.up.weight"].partial_over, held["blocks.0.mlp.up.weight"].tied_stages) == ((), ())
    one_key_head = {p.fqn: p for p in held_by(planned("llama, one key head", tp=2), 0)}
    assert one_key_head["model.layers.0.self_attn.k_proj.weight"].partial_over == ("tp",)
    assert not one_key_head["model.layers.0.self_attn.k_proj.weight"].has_whole_segment
    fused = {p.fqn: p for p in held_by(planned("fused, one key head", tp=2), 0)}
    assert fused["blocks.0.qkv.weight"].partial_over == ("tp",)
    assert fused["blocks.0.qkv.weight"].whole_runs(2) == ((16, 24), (24, 32))


def test_a_rank_of_two_chunks_holds_both_and_a_tied_weight_twice():
    spec = spec_of("gpt", mesh={"pp": 2, "vpp": 2}) | {"pipeline": {"schedule": "interleaved_1f1b"}}
    made = plan(build("gpt"), spec)
    names = [[p.fqn for p in held_by(made, rank)] for rank in (0, 1)]
    assert [any(n.startswith(f"blocks.{i}.") for n in names[i % 2]) for i in range(4)] == [True] * 4
    assert [n.count("tokens.weight") for n in names] == [1, 1]

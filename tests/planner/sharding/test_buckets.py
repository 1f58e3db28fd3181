"""The ZeRO-1 layout against the document's figure, against the reference's own numbers, and as properties."""

import json
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.buckets import default_bucket_size, end_multiple, lay_out, padded, start_multiple
from tests.tools.paths import ORACLES

pytestmark = pytest.mark.check

ORACLE = json.loads((ORACLES / "distopt.json").read_text())


def name_of(case, buffer):
    key = buffer["key"]
    return f"{case['id']}-{case['name']}-{key['param_dtype']}-{'expert' if key['is_expert_parallel'] else 'dense'}"


def is_of_its_own(case):
    """Whether the reference lays it out by options that we have not: buckets of tied weights alone, longer ends."""
    return case["pad_buckets_for_high_nccl_busbw"] or any(p["shared_embedding"] for p in case["params"])


BUFFERS = [pytest.param(c, b, id=name_of(c, b)) for c in ORACLE["cases"] for b in c["buffers"]]
SHARDED = [param for param in BUFFERS if not is_of_its_own(param.values[0])]


def parameters_of(case, buffer):
    sizes = {p["name"]: prod(p["shape"]) for p in case["params"]}
    return [(name, sizes[name]) for name in buffer["params"]]


def pair(r):
    return [r.start, r.stop]


def summary(layout):
    unpadded = [b.num_unpadded for b in layout.buckets]
    return {
        "param_index_map": {s.name: [*pair(s.world), s.bucket] for s in layout.slots},
        "bucket_indices": [pair(b.world) for b in layout.buckets],
        "per_bucket_numel_unpadded": unpadded,
        "numel": layout.num_elements,
        "numel_unpadded": sum(unpadded),
    }


def ranges(layout):
    starts = {slot.name: slot.world.start for slot in layout.slots}
    return [
        [
            {name: _places(r, starts[name], bucket.world.start) for name, r in owned.items()}
            for bucket, owned in zip(layout.buckets, owned_ranges(layout, rank), strict=True)
        ]
        for rank in range(layout.num_ranks)
    ]


def owned_ranges(layout, rank):
    return tuple(bucket.owned_ranges(rank, layout.num_ranks) for bucket in layout.buckets)


def _places(r, start, bucket_start):
    """In the buffer, in the bucket, in the rank's shard, in the parameter."""
    world = r.param.shifted(start)
    found = (world, world.shifted(-bucket_start), r.local, r.param)
    return dict(zip(("gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param"), map(pair, found), strict=True))


def test_figure_of_sixteen_elements_over_four_ranks():
    layout = lay_out([("p3", 2), ("p2", 6), ("p1", 5), ("p0", 3)], 4, alignment="none")
    assert [(s.name, pair(s.world)) for s in layout.slots] == [
        ("p0", [0, 3]),
        ("p1", [3, 8]),
        ("p2", [8, 14]),
        ("p3", [14, 16]),
    ]
    (rank0,), (rank1,), (rank2,), (rank3,) = (owned_ranges(layout, r) for r in range(4))
    assert list(rank0) == ["p0", "p1"]
    assert (pair(rank0["p1"].local), pair(rank0["p1"].param)) == ([3, 4], [0, 1])
    assert (pair(rank1["p1"].local), pair(rank1["p1"].param)) == ([0, 4], [1, 5])
    assert list(rank2) == ["p2"]
    assert (pair(rank3["p3"].local), pair(rank3["p3"].param)) == ([2, 4], [0, 2])


@pytest.mark.parametrize(("case", "buffer"), SHARDED)
def test_sharded_layout_and_every_rank_range_equal_the_reference(case, buffer):
    layout = lay_out(parameters_of(case, buffer), buffer["num_optimizer_shards"], bucket_size=case["bucket_size"])
    expected = dict(buffer["distopt"])
    assert ranges(layout) == expected.pop("ranges_by_dp_rank_then_bucket")
    assert summary(layout) == expected


@pytest.mark.parametrize(("case", "buffer"), BUFFERS)
def test_layout_without_sharding_equals_the_reference(case, buffer):
    layout = lay_out(parameters_of(case, buffer), 1, alignment="none", bucket_size=case["bucket_size"])
    assert summary(layout) == buffer["no_distopt"]


def test_padding_rules_equal_the_reference():
    rules = ORACLE["padding"]
    assert [padded(n, start_multiple("nccl")) for n, _ in rules["pad_param_start"]] == [
        e for _, e in rules["pad_param_start"]
    ]
    assert all(end_multiple(dp, "nccl") == e for dp, busbw, e in rules["bucket_end_divisor"] if not busbw)
    assert all(padded(n, end_multiple(dp, "nccl")) == e for n, dp, busbw, e in rules["pad_bucket_end"] if not busbw)


def test_default_bucket_is_forty_million_elements_or_one_million_a_rank():
    assert default_bucket_size(1) == default_bucket_size(40) == 40_000_000
    assert default_bucket_size(64) == 64_000_000
    assert default_bucket_size(64, "none") is None


def test_no_parameters_give_an_empty_buffer():
    layout = lay_out([], 4)
    assert (layout.num_elements, layout.buckets, owned_ranges(layout, 3)) == (0, (), ())


@given(
    sizes=st.lists(st.integers(0, 700), max_size=12),
    num_ranks=st.integers(1, 9),
    alignment=st.sampled_from(["none", "nccl"]),
    bucket_size=st.one_of(st.none(), st.integers(1, 900)),
)
def test_buckets_and_shards_cover_each_element_of_each_parameter_once(sizes, num_ranks, alignment, bucket_size):
    parameters = [(str(i), n) for i, n in enumerate(sizes)]
    layout = lay_out(parameters, num_ranks, alignment=alignment, bucket_size=bucket_size)
    assert [s.name for s in layout.slots] == [name for name, _ in reversed(parameters)]
    stops = [0, *(b.world.stop for b in layout.buckets)]
    assert [b.world.start for b in layout.buckets] == stops[:-1]
    assert all(len(b.world) % end_multiple(num_ranks, alignment) == 0 for b in layout.buckets)

    elements, starts = {name: [] for name, _ in parameters}, {slot.name: slot.world.start for slot in layout.slots}
    for rank in range(num_ranks):
        for bucket, owned in zip(layout.buckets, owned_ranges(layout, rank), strict=True):
            shard = bucket.shard(rank, num_ranks)
            for name, r in owned.items():
                assert len(r.local) == len(r.param)
                assert starts[name] + r.param.start == shard.start + r.local.start
                elements[name] += range(r.param.start, r.param.stop)
    assert all(sorted(elements[name]) == list(range(n)) for name, n in parameters)
    for bucket in layout.buckets:
        if bucket_size is not None and len(bucket.slots) > 1:
            assert bucket.slots[-2].world.stop - bucket.world.start < bucket_size

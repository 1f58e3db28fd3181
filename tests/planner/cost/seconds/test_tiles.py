"""Products in tiles: by hand, and never less work than the product has."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster.cluster import Device
from planner.cost.cut.units import Op, Size
from planner.cost.seconds.phases import ADDING, Roofline, Spent, tiled_flops
from tests.tools.examples import examples

SIDES = st.tuples(st.integers(1, 8), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))


def test_full_rounds_of_the_largest_tile_take_what_the_product_has() -> None:
    assert tiled_flops((1, 1024, 1024, 400), 32, 0) == 2 * 1024 * 1024 * 400


def test_a_round_with_one_tile_too_many_is_a_round_more() -> None:
    full, more = tiled_flops((1, 256, 128 * 108, 400), 108, 64), tiled_flops((1, 256, 128 * 109, 400), 108, 64)
    assert full == 2 * 108 * 256 * 128 * 464
    assert 1.5 < more / full <= 2.0  # of 109 tiles the last runs alone; smaller tiles fill part of its round


def test_heads_of_96_features_take_as_long_as_of_128_where_a_tile_has_128() -> None:
    long, short = (tiled_flops((64, 2048, head, 2048), 108, 64) for head in (128, 96))
    assert long / short < 128 / 96 - 0.05


def test_few_tiles_with_a_long_sum_are_computed_in_parts() -> None:
    whole = 2 * 4 * 256 * 128 * (4096 + 64)
    assert tiled_flops((1, 256, 128, 4096), 4, 64) == whole / 4 * (4096 / 4 + 64) * 4 / (4096 + 64) * ADDING


@given(sides=SIDES, processors=st.integers(1, 132), fill=st.sampled_from([0, 64]))
@examples(200)
def test_no_product_is_faster_than_the_device(sides: tuple[int, int, int, int], processors: int, fill: int) -> None:
    found = tiled_flops(sides, processors, fill)
    assert found >= 2.0 * prod(sides)
    b, m, n, k = sides
    assert tiled_flops((b, n, m, k), processors, fill) == found  # tiles stand both ways
    assert tiled_flops((b, m + 100, n, k), processors, fill) >= found


def device(**keys: object) -> Device:
    values = {"name": "x", "flops": {"float32": 1e12}, "memory": 10**9, "bandwidth": 1e12, "product_fraction": 1.0}
    return Device.model_validate({**values, "launch": 1e-9, **keys})


def test_kernels_wait_for_a_slow_host() -> None:
    small, roofline = Op("float32", Size(1e3)), Roofline(device(host=1e-5))
    assert roofline.host([(small, 100)]) == pytest.approx(100 * 1e-5)
    assert roofline.host([(small, 100)], saved=90) == pytest.approx(10 * 1e-5)
    assert roofline.all([(small, 100)], 1) < 1e-6
    assert Spent(compute=2.0, recompute=1.0, host=5.0).with_host() == Spent(compute=4.0, recompute=1.0)
    assert Spent(compute=2.0, tp_comm=9.0, host=1.0).with_host() == Spent(compute=2.0, tp_comm=9.0)


def test_attention_of_a_gpu_fills_its_heads() -> None:
    def seconds(head: int, **keys: object) -> float:
        of_one = Op("float32", Size(), attention=Size(1e9 * head), head=head)
        return Roofline(device(**keys)).seconds(of_one, 1)

    assert abs(seconds(112, processors=108) / seconds(128, processors=108) - 1) < 1e-6
    assert abs(seconds(96, processors=108) / seconds(128, processors=108) - 96 / 128) < 1e-6
    assert abs(seconds(160, processors=108) / seconds(192, processors=108) - 1) < 1e-6
    assert abs(seconds(112) / seconds(128) - 112 / 128) < 1e-6  # a CPU's do not

"""From measured seconds to a cluster file: what is put in comes out again."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import yaml

from passes.errors import RunError
from planner.cluster.cluster import GPU_SLACK, Cluster
from planner.cluster.links import Group, seconds, wires
from runtime.calibrate.fit import cluster_of
from runtime.calibrate.measurements import Machine, Measurements, Timed
from runtime.calibrate.run import cluster_text

LATENCY, RATE, PEAK, BANDWIDTH = 50e-6, 2e9, 40e9, 10e9
TILE, SIDES = 16, ((64, 128, 128), (32, 512, 512), (512, 32, 512), (512, 512, 512), (2048, 2048, 2048))
SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


def found(size: int = 4, cores: int = 0, noise: float = 0.0) -> Measurements:
    """What a machine with these numbers would show."""
    rng = random.Random(0)

    def timed(name: str, work: float, seconds: float) -> Timed:
        return Timed(name, work, seconds * (1 + rng.uniform(0, noise)))

    def product(dtype: str, *sides: int) -> Timed:
        padded = 2.0 * prod(side + TILE for side in sides)
        return replace(timed(dtype, 2.0 * prod(sides), 20e-6 + padded / PEAK), sides=sides)

    def exchange(kind: str, num_bytes: float) -> Timed:
        messages = 1.0 if kind == "p2p" else SENT[kind] * (size - 1)
        sent = num_bytes if kind == "p2p" else SENT[kind] * (size - 1) / size * num_bytes
        seconds = messages * LATENCY + sent / RATE
        return replace(timed(kind, num_bytes, seconds), ranks=2 if kind == "p2p" else size)

    return Measurements(
        Machine("a core: of 'X', 100%", "gloo", size, cores, 8 << 30, load=1.5, torch="2.13"),
        products=tuple(product(dtype, *sides) for dtype in ("float32", "float64") for sides in SIDES),
        attention=(timed("float32", 1e8, 1e8 / (0.5 * PEAK)),),
        moved=(timed("copy", 1e8, 1e8 / BANDWIDTH), timed("gelu", 1e7, 1e7 / (0.25 * BANDWIDTH))),
        small=timed("small", 1.0, 5e-6),
        exchanges=tuple(exchange(k, b) for k in (*SENT, "p2p") for b in (1e4, 1e6, 1e8)),
        overlap=(0.01, 0.008, 0.014),
    )


def fitted(measured: Measurements) -> Cluster:
    return Cluster.model_validate(yaml.safe_load(cluster_text(cluster_of(measured, "here"), measured, "2026-01-01")))


def test_latency_rate_and_fractions_come_out_as_they_were_put_in():
    cluster = fitted(found())
    (link,) = cluster.links
    assert link.latency == pytest.approx(LATENCY, rel=1e-2)
    assert link.bandwidth * link.fraction == pytest.approx(RATE, rel=1e-2)
    assert link.reduce_scatter == pytest.approx(1.0, abs=0.01)
    assert (link.devices, cluster.name, cluster.device.at_once) == (4, "here", None)
    assert cluster.device.half_tile == TILE
    assert cluster.device.flops["float32"] * cluster.device.product_fraction == pytest.approx(PEAK, rel=3e-2)
    assert cluster.device.flops["float32"] * cluster.device.attention_fraction == pytest.approx(0.5 * PEAK, rel=1e-2)
    assert cluster.device.bandwidth == pytest.approx(BANDWIDTH)
    assert cluster.device.bandwidth_fraction == pytest.approx(0.4)  # of the seconds of both, one after the other
    assert cluster.device.launch == pytest.approx(5e-6)
    assert cluster.overlap == pytest.approx(0.5)


def test_the_product_before_each_exchange_is_taken_off():
    measured = found()
    beside = replace(
        measured,
        before=Timed("product", 0.0, 0.01),
        exchanges=tuple(replace(t, seconds=t.seconds + 0.01) for t in measured.exchanges),
    )
    assert fitted(beside).links[0].latency == pytest.approx(fitted(measured).links[0].latency, rel=0.02)
    shorter = replace(beside, before=Timed("product", 0.0, 99.0))  # noise: never below nothing
    assert all(t.seconds > 0 for t in shorter.exchanged)


def test_a_slow_reduce_scatter_is_told_apart():
    measured = found()
    slow = replace(
        measured,
        exchanges=tuple(
            replace(t, seconds=3 * t.seconds) if t.name == "reduce_scatter" else t for t in measured.exchanges
        ),
    )
    (link,) = fitted(slow).links
    assert link.reduce_scatter == pytest.approx(3.0, rel=0.02)
    assert link.latency == pytest.approx(LATENCY, rel=1e-2)


def of_sizes(rate: Callable[[float], float], pairs: float = 1.0) -> Measurements:
    """A machine whose rate depends on the bytes of a tensor; groups of two reach ``pairs`` times as much."""

    def exchange(kind: str, num_bytes: float, ranks: int) -> Timed:
        messages = 1.0 if kind == "p2p" else SENT[kind] * (ranks - 1)
        sent = num_bytes if kind == "p2p" else messages / ranks * num_bytes
        reached = rate(num_bytes) * (pairs if ranks == 2 else 1.0)
        return Timed(kind, num_bytes, messages * LATENCY + sent / reached, ranks=ranks)

    sizes = (2**14, 2**17, 2**20, 2**23, 2**26)
    kinds = [(kind, ranks) for kind in SENT for ranks in (4, 2)] + [("p2p", 2)]
    return replace(found(), exchanges=tuple(exchange(kind, b, ranks) for kind, ranks in kinds for b in sizes))


def test_a_rate_that_depends_on_the_size_becomes_points():
    (link,) = fitted(of_sizes(lambda num_bytes: RATE * (num_bytes / 2**26) ** 0.3)).links
    measured = of_sizes(lambda num_bytes: RATE * (num_bytes / 2**26) ** 0.3).exchanges
    assert [at for at, _ in link.sizes] == [2**14, 2**17, 2**20, 2**23, 2**26]
    assert [link.bandwidth * fraction for _, fraction in link.sizes[2:]] == pytest.approx(
        [RATE * (at / 2**26) ** 0.3 for at, _ in link.sizes[2:]], rel=0.25
    )
    largest = next(t for t in measured if t.name == "all_gather" and t.work == 2**26)
    wire = wires(Cluster.model_validate({**fitted(found()).model_dump(), "links": [link.model_dump()]}))
    assert seconds("all_gather", 2.0**26, Group((4,)), wire) == pytest.approx(largest.seconds, rel=0.05)


def test_one_rate_for_all_sizes_and_groups_stays_one_number():
    (link,) = fitted(of_sizes(lambda _: RATE)).links
    assert (link.sizes, link.parts) == ((), ())


@pytest.mark.parametrize("faster", [3.0, 0.4])
def test_pairs_that_are_faster_or_slower_than_all_ranks_become_a_factor(faster):
    (link,) = fitted(of_sizes(lambda _: RATE, faster)).links
    of_two, of_all = (factor * link.bandwidth * link.fraction for _, factor in link.parts)
    assert [n for n, _ in link.parts] == [2, 4]
    assert (of_two, of_all) == (pytest.approx(faster * RATE, rel=0.01), pytest.approx(RATE, rel=0.01))


def test_sizes_and_pairs_together_explain_nearly_all():
    cluster = fitted(of_sizes(lambda num_bytes: RATE * (num_bytes / 2**26) ** 0.3, 2.0))
    assert len(cluster.links[0].sizes) == 5
    assert [n for n, _ in cluster.links[0].parts] == [2, 4]
    assert cluster.uncertainty.communication < 0.1


def test_a_larger_tensor_never_takes_less_time_by_the_file():
    (link,) = fitted(of_sizes(lambda num_bytes: RATE / 12 if num_bytes < 2**21 else RATE)).links
    taken = [at / fraction for at, fraction in link.sizes]
    assert len(taken) == 5
    assert taken == sorted(taken)


def test_noise_moves_the_numbers_by_no_more_than_itself():
    (link,) = fitted(found(noise=0.2)).links
    assert LATENCY <= link.latency <= 1.3 * LATENCY
    assert RATE / 1.3 <= link.bandwidth * link.fraction <= 1.05 * RATE


def test_ranks_that_share_cores_are_described_as_if_each_had_its_own():
    alone, shared = fitted(found(cores=4)), fitted(found(cores=2))
    assert (alone.device.at_once, shared.device.at_once) == (None, 2)
    assert shared.device.flops["float32"] == pytest.approx(2 * alone.device.flops["float32"], rel=1e-2)
    assert shared.device.launch == pytest.approx(alone.device.launch / 2)
    assert shared.links[0].latency == pytest.approx(alone.links[0].latency / 2, rel=1e-2)
    assert shared.links[0].bandwidth == pytest.approx(2 * alone.links[0].bandwidth, rel=1e-2)


def test_a_rank_alone_has_a_cluster_of_one_device():
    cluster = fitted(replace(found(1), exchanges=(), overlap=None))
    assert (cluster.devices, cluster.overlap) == (1, 1.0)


def test_one_size_or_no_slope_still_gives_numbers():
    measured = found()
    fewer = replace(
        measured,
        products=measured.products[:1],
        exchanges=tuple(replace(t, seconds=1e-3) for t in measured.exchanges),  # the same at every size
    )
    assert fitted(fewer).device.product_fraction == 1.0


def test_the_comments_say_when_how_and_what_was_seen():
    measured = replace(found(cores=2), skipped=("a product of float16: it would take 9 s",))
    text = cluster_text(cluster_of(measured, "here"), measured, "2026-01-01")
    for words in (
        "on 2026-01-01: 4 ranks at once on 2 cores; gloo, torch 2.13,",
        "load average 1.5 before",
        "#   all_reduce of 1 MB over 4 ranks: ",
        "#   product float32 [2048, 2048] · [2048, 2048]: 39",
        "# 2 ranks shared a core",
        "skipped: a product of float16",
    ):
        assert words in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_what_no_machine_has_makes_no_file():
    broken = replace(found(), machine=replace(found().machine, memory=100))
    with pytest.raises(RunError, match=r"do not make a valid cluster file: device\.memory is 100 bytes"):
        fitted(broken)


def test_the_fastest_of_several_passes_counts_and_of_each_measurement_alone():
    first, second = found(), found(noise=0.5)
    slower = replace(second, products=second.products[1:])
    assert Measurements.fastest([slower, first]).exchanges == first.exchanges
    assert Measurements.fastest([first, slower]).products == first.products
    assert Measurements.fastest([first]) == first


def of_a_gpu() -> Measurements:
    """What one H200 measured (benchmarks/RESULTS.md, "On a GPU: calibrated"): products in bfloat16, and a small op."""
    rates = {(256, 2048, 2048): 121e12, (2048, 256, 2048): 109e12, (4096,) * 3: 759e12, (8192,) * 3: 684e12}
    products = [Timed("bfloat16", 2.0 * prod(sides), 2.0 * prod(sides) / rate, sides) for sides, rate in rates.items()]
    machine = Machine("H200", "nccl", 1, 0, 150 << 30, processors=132, context=500_000_000)
    attention, copy = Timed("bfloat16", 206e9, 206e9 / 476e12), Timed("copy", 2.15e9, 2.15e9 / 4.27e12)
    return Measurements(machine, tuple(products), (attention,), (copy,), Timed("small", 1.0, 15.9e-6))


def test_a_gpu_is_a_gpu_to_the_planner_and_its_largest_product_runs_at_the_speed_of_a_step():
    device = fitted(of_a_gpu()).device
    assert device.is_gpu
    assert (device.processors, device.context, device.host) == (132, 500_000_000, 15.9e-6)
    assert (device.slack, device.slack_share) == (None, GPU_SLACK)
    rounds, tiles = 16, 32 * 64 / 132  # of the result 256 × 128 at a time
    filled = 1 + device.half_tile / 8192
    assert device.flops["bfloat16"] * device.product_fraction == pytest.approx(
        684e12 * rounds / tiles * filled, rel=1e-3
    )
    assert fitted(of_a_gpu()).uncertainty.compute == pytest.approx(0.15, abs=0.01)


def test_the_share_that_the_allocator_reserved_is_written():
    measured = of_a_gpu()
    assert fitted(replace(measured, machine=replace(measured.machine, slack=0.081))).device.slack_share == 0.081


def test_products_that_end_before_the_host_launches_the_next_do_not_count_on_a_gpu():
    measured = of_a_gpu()
    slower = [replace(t, seconds=1.2 * t.seconds) if t.work < 1e10 else t for t in measured.products]
    assert cluster_of(replace(measured, products=tuple(slower)), "here") == cluster_of(measured, "here")

"""From measured seconds to the numbers of a cluster file, by least squares of relative errors.

    product     seconds = launch' + 2 (m + t)(n + t)(k + t) / rate    rate / peak: the fraction; peak: the best seen
                t: half_tile, the best of a few; the same for all dtypes
                on a GPU: whole tiles (planner.cost.seconds.tiles), of products that take longer than their launch
    exchange    linked.py

Ranks that share cores were measured at half their speed, or less: peaks and rates are those of a rank that shares none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from statistics import median
from typing import Any

import numpy as np

from planner.cost.seconds.tiles import tiled_flops
from runtime.calibrate.found import Found, Timed
from runtime.calibrate.linked import LEAST_SECONDS, line, link_of, rounded, share, spread
from runtime.calibrate.linked import errors as errors_of_link

_OF_A_STEP = 0.15  # kernels of a step on an H200 were so much slower than in these loops (benchmarks/RESULTS.md)
_HALF_TILES = (0, 4, 8, 16, 32, 64, 128, 256)


def cluster_of(found: Found, name: str) -> dict[str, Any]:
    """The values of a cluster file."""
    device = _device(found)
    link = _link(found, device)
    values = {"name": name, "device": device, "links": [link], "overlap": _overlap(found)}
    return {**values, "uncertainty": _uncertainty(found, device, link)}


def _uncertainty(found: Found, device: dict[str, Any], link: dict[str, Any]) -> dict[str, float]:
    """Spread of what was measured around the fitted numbers: the root of the mean square of relative errors."""
    sharing, tile, processors = found.machine.sharing, device["half_tile"], found.machine.processors
    errors = [
        _whole(t, tile, processors) * sharing / (device["flops"][t.name] * device["product_fraction"] * t.seconds) - 1
        for t in _long_products(found)
    ]
    moved = device["bandwidth"] * device["bandwidth_fraction"]
    errors += [t.work * sharing / (moved * t.seconds) - 1 for t in found.moved]
    sent = errors_of_link(found.exchanged, link, sharing)
    return {"compute": max(spread(errors), _OF_A_STEP if processors else 0.0), "communication": spread(sent)}


def _device(found: Found) -> dict[str, Any]:
    sharing, processors = found.machine.sharing, found.machine.processors
    products = _by_name(_long_products(found))
    tile = min(_HALF_TILES, key=lambda side: sum(_misfit(timed, side, processors) for timed in products.values()))
    peaks, fraction = _of_cpu(products, tile) if not processors else (_sustained(products, tile, processors), 1.0)
    bandwidth = max(timed.rate for timed in found.moved)
    of_attention = [timed.rate / peaks[timed.name] for timed in found.attention]
    own = [timed.rate / bandwidth for timed in found.moved]
    device = {
        "name": found.machine.device,
        "flops": {name: rounded(peak * sharing) for name, peak in peaks.items()},
        "memory": found.machine.memory,
        "bandwidth": rounded(bandwidth * sharing),
        "product_fraction": share(fraction),
        "half_tile": tile,
        "attention_fraction": share(median(of_attention)),
        "bandwidth_fraction": share(1 / float(np.mean([1 / fraction for fraction in own]))),
    }
    if processors:
        device |= {"processors": processors, "host": _an_op(found), "context": found.machine.context}
        device |= {"cudnn_attention": True} if found.machine.cudnn else {}
        return device if found.machine.slack is None else device | {"slack": found.machine.slack}
    return device | {"launch": _an_op(found)} | ({"at_once": found.machine.cores} if sharing > 1 else {})


def _an_op(found: Found) -> float:
    """Of a GPU, the seconds of the host: it launches small ops one after the other, and kernels wait for it."""
    return rounded(max(found.small.seconds / found.machine.sharing, LEAST_SECONDS))


def _of_cpu(products: Mapping[str, Sequence[Timed]], tile: int) -> tuple[dict[str, float], float]:
    peaks = {name: max(t.rate for t in timed) for name, timed in products.items()}
    return peaks, median(_fraction(timed, peaks[name], tile) for name, timed in products.items())


def _sustained(products: Mapping[str, Sequence[Timed]], tile: int, processors: int) -> dict[str, float]:
    """Of the largest product: smaller ones draw less power, so that the clock stays higher than in a step."""
    return {name: _whole(timed[-1], tile, processors) / timed[-1].seconds for name, timed in products.items()}


def _long_products(found: Found) -> list[Timed]:
    """On a GPU those that take longer than the host needs to launch the next; of each dtype at least one."""
    if not found.machine.processors:
        return list(found.products)
    kept = [t for t in found.products if t.seconds > 2 * found.small.seconds]
    names = {t.name for t in kept}
    return kept + [timed[-1] for name, timed in _by_name(found.products).items() if name not in names]


def _fraction(timed: Sequence[Timed], peak: float, tile: int) -> float:
    """Of the peak that products reach when their work is much."""
    if len(timed) < 2:
        return 1.0
    _, slope = line([(1.0, _whole(t, tile, 0)) for t in timed], [t.seconds for t in timed])
    return min(1.0, 1 / slope / peak) if slope else 1.0


def _misfit(timed: Sequence[Timed], tile: int, processors: int) -> float:
    """Sum of the squares of relative errors with this tile; among equal tiles, the smallest wins."""
    terms = np.asarray([(1.0, _whole(t, tile, processors)) for t in timed])
    fitted = terms @ np.asarray(line([(1.0, work) for _, work in terms], [t.seconds for t in timed]))
    return float(np.sum((fitted / np.asarray([t.seconds for t in timed]) - 1) ** 2)) + 1e-9 * tile


def _whole(timed: Timed, tile: int, processors: int) -> float:
    """Operations of a matrix product with half-empty tiles at the edges."""
    if timed.sides is None:
        return timed.work
    if processors:
        m, k, n = timed.sides
        return tiled_flops((1, m, n, k), processors, tile)
    return 2.0 * prod(side + tile for side in timed.sides)


def _link(found: Found, device: dict[str, Any]) -> dict[str, Any]:
    machine = found.machine
    if not found.exchanged:  # one rank: a copy comes nearest to a message
        return {"name": "none", "devices": 1, "bandwidth": device["bandwidth"], "latency": _an_op(found)}
    return {"name": machine.backend, **link_of(found.exchanged, machine.num_ranks, machine.sharing)}


def _overlap(found: Found) -> float:
    """1: an exchange beside a product costs nothing; 0: both take as long as one after the other."""
    if found.overlap is None:
        return 1.0
    product, exchange, both = found.overlap
    hidden = (product + exchange - both) / min(product, exchange)
    return round(min(1.0, max(0.0, hidden)), 2)


def _by_name(timed: Iterable[Timed]) -> dict[str, list[Timed]]:
    groups: dict[str, list[Timed]] = {}
    for one in timed:
        groups.setdefault(one.name, []).append(one)
    return groups

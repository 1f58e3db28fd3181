"""From measured seconds to the numbers of a cluster file, by least squares of relative errors.

    product     seconds = launch' + 2 (m + t)(n + t)(k + t) / rate    rate / peak: the fraction; peak: the best seen
                t: half_tile, the best of a few; the same for all dtypes
    exchange    seconds = messages · latency + sent / rate     n ranks in a ring, a tensor of B bytes:

                                    messages    sent
                    all_reduce      2 (n − 1)   2 B (n − 1) / n
                    all_gather      n − 1       B (n − 1) / n
                    reduce_scatter  n − 1       B (n − 1) / n
                    p2p             1           B

Time of a reduce-scatter beyond its line in the table is reported separately: libraries differ in it.
Ranks that share cores were measured at half their speed, or less: peaks and rates are those of a rank that shares none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from runtime.calibrate.found import Found, Timed

_HALF_TILES = (0, 4, 8, 16, 32, 64, 128, 256)
_LEAST_SECONDS = 1e-9
_APART = "reduce_scatter"


def cluster_of(found: Found, name: str) -> dict[str, Any]:
    """The values of a cluster file."""
    values = {"name": name, "device": _device(found), "links": [_link(found)], "overlap": _overlap(found)}
    return {**values, "uncertainty": _uncertainty(found, values["device"], values["links"][0])}


def _uncertainty(found: Found, device: dict[str, Any], link: dict[str, Any]) -> dict[str, float]:
    """Spread of what was measured around the fitted numbers: the root of the mean square of relative errors."""
    sharing, tile = found.machine.sharing, device["half_tile"]
    errors = [
        _padded(t, tile) * sharing / (device["flops"][t.name] * device["product_fraction"] * t.seconds) - 1
        for t in found.products
    ]
    moved = device["bandwidth"] * device["bandwidth_fraction"]
    errors += [t.work * sharing / (moved * t.seconds) - 1 for t in found.moved]
    size, rate = found.machine.num_ranks, link["bandwidth"] * link.get("fraction", 1.0)
    sent = [
        (_messages(t.name, size) * link["latency"] + _sent(t.name, size) * t.work / rate) * sharing / t.seconds - 1
        for t in found.exchanged
        if t.name != _APART
    ]
    return {"compute": _spread(errors), "communication": _spread(sent)}


def _spread(errors: Sequence[float]) -> float:
    return round(min(1.0, float(np.sqrt(np.mean(np.square(errors))))), 3) if errors else 0.0


def _device(found: Found) -> dict[str, Any]:
    sharing = found.machine.sharing
    peaks = {name: max(t.rate for t in timed) for name, timed in _by_name(found.products).items()}
    bandwidth = max(timed.rate for timed in found.moved)
    of_attention = [timed.rate / peaks[timed.name] for timed in found.attention]
    own = [timed.rate / bandwidth for timed in found.moved]
    products = _by_name(found.products)
    tile = min(_HALF_TILES, key=lambda side: sum(_misfit(timed, side) for timed in products.values()))
    device = {
        "name": found.machine.device,
        "flops": {name: _rounded(peak * sharing) for name, peak in peaks.items()},
        "memory": found.machine.memory,
        "bandwidth": _rounded(bandwidth * sharing),
        "product_fraction": _share(median(_fraction(timed, peaks[name], tile) for name, timed in products.items())),
        "half_tile": tile,
        "attention_fraction": _share(median(of_attention)),
        "bandwidth_fraction": _share(1 / float(np.mean([1 / fraction for fraction in own]))),
        "launch": _rounded(max(found.small.seconds / sharing, _LEAST_SECONDS)),
    }
    return device | ({"at_once": found.machine.cores} if sharing > 1 else {})


def _fraction(timed: Sequence[Timed], peak: float, tile: int) -> float:
    """Of the peak that products reach when their work is much."""
    if len(timed) < 2:
        return 1.0
    _, slope = _line([(1.0, _padded(t, tile)) for t in timed], [t.seconds for t in timed])
    return min(1.0, 1 / slope / peak) if slope else 1.0


def _misfit(timed: Sequence[Timed], tile: int) -> float:
    """Sum of the squares of relative errors with this tile; among equal tiles, the smallest wins."""
    terms = np.asarray([(1.0, _padded(t, tile)) for t in timed])
    fitted = terms @ np.asarray(_line([(1.0, work) for _, work in terms], [t.seconds for t in timed]))
    return float(np.sum((fitted / np.asarray([t.seconds for t in timed]) - 1) ** 2)) + 1e-9 * tile


def _padded(timed: Timed, tile: int) -> float:
    """Operations of a matrix product with half-empty tiles at the edges."""
    return timed.work if timed.sides is None else 2.0 * prod(side + tile for side in timed.sides)


def _link(found: Found) -> dict[str, Any]:
    size = found.machine.num_ranks
    if not found.exchanged:  # one rank: a copy comes nearest to a message
        device = _device(found)
        return {"name": "none", "devices": 1, "bandwidth": device["bandwidth"], "latency": device["launch"]}
    terms = [(_messages(t.name, size), _sent(t.name, size) * t.work) for t in found.exchanged]
    plain = [(term, t.seconds) for term, t in zip(terms, found.exchanged, strict=True) if t.name != _APART]
    latency, slope = _line([term for term, _ in plain], [seconds for _, seconds in plain])
    best = max(sent / t.seconds for (_, sent), t in zip(terms, found.exchanged, strict=True))
    rate = min(1 / slope, best) if slope else best
    sharing = found.machine.sharing
    return {
        "name": found.machine.backend,
        "devices": size,
        "bandwidth": _rounded(best * sharing),
        "latency": _rounded(max(latency / sharing, _LEAST_SECONDS)),
        "fraction": _share(rate / best),
        "reduce_scatter": _times(found.exchanged, terms, latency, rate),
    }


def _times(exchanges: Sequence[Timed], terms: Sequence[tuple[float, float]], latency: float, rate: float) -> float:
    """How many times as long as by the line a reduce-scatter takes: of its sizes the mean of ratios."""
    ratios = [
        timed.seconds / (messages * latency + sent / rate)
        for timed, (messages, sent) in zip(exchanges, terms, strict=True)
        if timed.name == _APART
    ]
    return round(min(100.0, max(1.0, geometric_mean(ratios))), 2) if ratios else 1.0


def _messages(kind: str, size: int) -> float:
    return {"all_reduce": 2.0 * (size - 1), "p2p": 1.0}.get(kind, size - 1.0)


def _sent(kind: str, size: int) -> float:
    return {"all_reduce": 2.0 * (size - 1) / size, "p2p": 1.0}.get(kind, (size - 1) / size)


def _overlap(found: Found) -> float:
    """1: an exchange beside a product costs nothing; 0: both take as long as one after the other."""
    if found.overlap is None:
        return 1.0
    product, exchange, both = found.overlap
    hidden = (product + exchange - both) / min(product, exchange)
    return round(min(1.0, max(0.0, hidden)), 2)


def _line(terms: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Both factors, neither below zero; errors count by their share of the seconds."""
    weights = 1 / np.asarray(seconds)
    matrix = np.asarray(terms) * weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    factors, _ = nnls(matrix / scale, np.ones(len(seconds)))
    first, second = factors / scale
    return float(first), float(second)


def _by_name(timed: Iterable[Timed]) -> dict[str, list[Timed]]:
    groups: dict[str, list[Timed]] = {}
    for one in timed:
        groups.setdefault(one.name, []).append(one)
    return groups


def _share(value: float) -> float:
    return min(1.0, max(0.001, round(value, 3)))


def _rounded(value: float) -> float:
    """Three digits: no measurement has more."""
    return float(f"{value:.3g}")

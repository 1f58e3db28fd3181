"""Fit the values of a cluster file to measured seconds, by least squares of relative errors.

    product     seconds = launch' + 2 (m + t)(n + t)(k + t) / rate    rate / peak: the fraction; peak: the best seen
                t: half_tile, the best of a few; the same for all dtypes
                on a GPU: whole tiles (planner.cost.seconds.phases), of products that take longer than their launch
    exchange    seconds = messages · latency + sent / rate            n ranks in a ring, a tensor of B bytes:

                    messages    sent
    all_reduce      2 (n − 1)   2 B (n − 1) / n
    all_gather      n − 1       B (n − 1) / n
    reduce_scatter  n − 1       B (n − 1) / n
    p2p             1           B

Ranks that share cores run at half their speed, or less: fitted peaks and rates are those of a rank with its own core.

The first fit has one rate for all sizes and groups. A factor for pairs of ranks, and then a rate for each size, are
added if they clearly lower the errors. The time of a reduce-scatter beyond its line in the table is a separate value,
because libraries differ in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from planner.cluster.links import Wire
from planner.cost.seconds.phases import tiled_flops
from runtime.calibrate.measurements import Measurements, Timed

_OF_A_STEP = 0.15  # how much slower kernels of a step were than in these loops, on an H200 (benchmarks/RESULTS.md)
_HALF_TILES = (0, 4, 8, 16, 32, 64, 128, 256)
LEAST_SECONDS = 1e-9
_APART = "reduce_scatter"
_NEARER = 0.02  # how much further values must lower the spread to be kept
_PARTS_OF_LATENCY = (1.0, 0.75, 0.5, 0.25)  # with one rate for all sizes, slow small tensors look like latency
_LONGER = 1.01  # a larger tensor takes at least this many times as long as a smaller one


def cluster_of(measured: Measurements, name: str) -> dict[str, Any]:
    """Return the values of a cluster file. ``measured``: the measurements; ``name``: of the cluster."""
    device = _device(measured)
    # with one rank, a copy is the closest measurement to a message
    link = {"name": "none", "devices": 1, "bandwidth": device["bandwidth"], "latency": _an_op(measured)}
    if measured.exchanged:
        machine = measured.machine
        link = {"name": machine.backend, **link_of(measured.exchanged, machine.num_ranks, machine.sharing)}
    values = {"name": name, "device": device, "links": [link], "overlap": _overlap(measured)}
    return {**values, "uncertainty": _uncertainty(measured, device, link)}


def _uncertainty(measured: Measurements, device: dict[str, Any], link: dict[str, Any]) -> dict[str, float]:
    """Return the spread of measurements around the fitted values: the root mean square of relative errors."""
    sharing, tile, processors = measured.machine.sharing, device["half_tile"], measured.machine.processors
    errors = [
        _whole(t, tile, processors) * sharing / (device["flops"][t.name] * device["product_fraction"] * t.seconds) - 1
        for t in _long_products(measured)
    ]
    moved = device["bandwidth"] * device["bandwidth_fraction"]
    errors += [t.work * sharing / (moved * t.seconds) - 1 for t in measured.moved]
    sent = errors_of_link(measured.exchanged, link, sharing)
    return {"compute": max(spread(errors), _OF_A_STEP if processors else 0.0), "communication": spread(sent)}


def _device(measured: Measurements) -> dict[str, Any]:
    sharing, processors = measured.machine.sharing, measured.machine.processors
    products = _by_name(_long_products(measured))
    tile = min(_HALF_TILES, key=lambda side: sum(_misfit(timed, side, processors) for timed in products.values()))
    if processors:  # the largest product: smaller ones draw less power, which leaves the clock higher than in a step
        peaks = {name: _whole(t[-1], tile, processors) / t[-1].seconds for name, t in products.items()}
        fraction = 1.0
    else:
        peaks = {name: max(t.rate for t in timed) for name, timed in products.items()}
        fraction = median(_fraction(timed, peaks[name], tile) for name, timed in products.items())
    bandwidth = max(timed.rate for timed in measured.moved)
    of_attention = [timed.rate / peaks[timed.name] for timed in measured.attention]
    own = [timed.rate / bandwidth for timed in measured.moved]
    device = {
        "name": measured.machine.device,
        "flops": {name: rounded(peak * sharing) for name, peak in peaks.items()},
        "memory": measured.machine.memory,
        "bandwidth": rounded(bandwidth * sharing),
        "product_fraction": share(fraction),
        "half_tile": tile,
        "attention_fraction": share(median(of_attention)),
        "bandwidth_fraction": share(1 / float(np.mean([1 / fraction for fraction in own]))),
    }
    if processors:
        device |= {"processors": processors, "host": _an_op(measured), "context": measured.machine.context}
        device |= {"cudnn_attention": True} if measured.machine.cudnn else {}
        return device if measured.machine.slack is None else device | {"slack": measured.machine.slack}
    return device | {"launch": _an_op(measured)} | ({"at_once": measured.machine.cores} if sharing > 1 else {})


def _an_op(measured: Measurements) -> float:
    """Return the seconds of a small op; on a GPU those of the host, which launches one op after another."""
    return rounded(max(measured.small.seconds / measured.machine.sharing, LEAST_SECONDS))


def _long_products(measured: Measurements) -> list[Timed]:
    """Return the products that take longer than a launch by the host (on a GPU), at least one of each dtype."""
    if not measured.machine.processors:
        return list(measured.products)
    kept = [t for t in measured.products if t.seconds > 2 * measured.small.seconds]
    names = {t.name for t in kept}
    return kept + [timed[-1] for name, timed in _by_name(measured.products).items() if name not in names]


def _fraction(timed: Sequence[Timed], peak: float, tile: int) -> float:
    """Return the fraction of the peak that large products reach."""
    if len(timed) < 2:
        return 1.0
    _, slope = line([(1.0, _whole(t, tile, 0)) for t in timed], [t.seconds for t in timed])
    return min(1.0, 1 / slope / peak) if slope else 1.0


def _misfit(timed: Sequence[Timed], tile: int, processors: int) -> float:
    """Return the sum of squares of relative errors with this tile, plus a little that prefers smaller tiles."""
    terms = np.asarray([(1.0, _whole(t, tile, processors)) for t in timed])
    fitted = terms @ np.asarray(line([(1.0, work) for _, work in terms], [t.seconds for t in timed]))
    return float(np.sum((fitted / np.asarray([t.seconds for t in timed]) - 1) ** 2)) + 1e-9 * tile


def _whole(timed: Timed, tile: int, processors: int) -> float:
    """Return the operations of a matrix product with half-empty tiles at the edges."""
    if timed.sides is None:
        return timed.work
    if processors:
        m, k, n = timed.sides
        return tiled_flops((1, m, n, k), processors, tile)
    return 2.0 * prod(side + tile for side in timed.sides)


def _overlap(measured: Measurements) -> float:
    """Return 1 if an exchange beside a product takes no extra time, 0 if both take as long as in sequence."""
    if measured.overlap is None:
        return 1.0
    product, exchange, both = measured.overlap
    hidden = (product + exchange - both) / min(product, exchange)
    return round(min(1.0, max(0.0, hidden)), 2)


def _by_name(timed: Iterable[Timed]) -> dict[str, list[Timed]]:
    groups: dict[str, list[Timed]] = {}
    for one in timed:
        groups.setdefault(one.name, []).append(one)
    return groups


def link_of(exchanged: Sequence[Timed], size: int, sharing: float) -> dict[str, Any]:
    """Return the values of a link between ``size`` ranks, except its name. ``sharing``: number of ranks per core."""
    whole = [t for t in exchanged if t.ranks == size]
    plain = _plain(whole)
    latency, slope = line([(_messages(t), _sent(t)) for t in plain], [t.seconds for t in plain])
    best = max(_sent(t) / t.seconds for t in exchanged)
    rate = min(1 / slope, best) if slope else best
    link: dict[str, Any] = {
        "devices": size,
        "bandwidth": rounded(best * sharing),
        "latency": rounded(max(latency / sharing, LEAST_SECONDS)),
        "fraction": share(rate / best),
    }
    paired = {**link, **_by_pairs(exchanged, size, latency, rate, best)}
    link = _nearest(exchanged, sharing, [link, paired])
    sized = [{**link, **_by_size(whole, link, size, latency * part, best, sharing)} for part in _PARTS_OF_LATENCY]
    link = _nearest(exchanged, sharing, [link, *sized])
    ratios = _ratios([t for t in whole if t.name == _APART], link, sharing)
    times = 1 / geometric_mean(ratios) if ratios else 1.0  # mean over sizes, relative to the line
    return {**link, "reduce_scatter": round(min(100.0, max(1.0, times)), 2)}


def _nearest(exchanged: Sequence[Timed], sharing: float, links: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first link, unless another has clearly smaller errors."""
    first, *others = (spread(errors_of_link(exchanged, link, sharing)) for link in links)
    least = min(others)
    return links[1 + others.index(least)] if least < first - _NEARER else links[0]


def errors_of_link(exchanged: Sequence[Timed], link: Mapping[str, Any], sharing: float) -> list[float]:
    """Return the relative errors of the seconds by ``link``, without those of reduce-scatters."""
    return [ratio - 1 for ratio in _ratios(_plain(exchanged), link, sharing)]


def _ratios(timed: Sequence[Timed], link: Mapping[str, Any], sharing: float) -> list[float]:
    points = tuple((at, link["bandwidth"] * fraction) for at, fraction in link.get("sizes", ()))
    wire = Wire(
        link["latency"], link["bandwidth"] * link.get("fraction", 1.0), sizes=points, parts=tuple(link.get("parts", ()))
    )
    return [(_messages(t) * wire.latency + _sent(t) / wire.rate(t.work, t.ranks)) * sharing / t.seconds for t in timed]


def spread(relative: Sequence[float]) -> float:
    """Return the root mean square."""
    return round(min(1.0, float(np.sqrt(np.mean(np.square(relative))))), 3) if relative else 0.0


def _by_pairs(exchanged: Sequence[Timed], size: int, latency: float, rate: float, best: float) -> dict[str, Any]:
    """Return the fraction, and factors of the bandwidth of pairs and of all ranks; the faster has the factor 1."""
    pairs = [t for t in _plain(exchanged) if t.ranks != size]
    of_pairs = _rate(pairs, latency, best)
    if of_pairs is None:
        return {}
    faster = max(of_pairs, rate)
    parts = [(2, share(of_pairs / faster)), (size, share(rate / faster))]
    return {"fraction": share(faster / best), "parts": parts}


def _by_size(
    whole: Sequence[Timed], link: Mapping[str, Any], size: int, latency: float, best: float, sharing: float
) -> dict[str, Any]:
    """Return the rate of each size for this ``latency``. ``link``: has the factor of a group of all ranks."""
    factor, points, least = dict(link.get("parts", ())).get(size, 1.0), list[tuple[float, float]](), 0.0
    for num_bytes in sorted({t.work for t in whole}):
        rate = _rate([t for t in _plain(whole) if t.work == num_bytes], latency, best) or best
        least = max(num_bytes / min(rate / factor, best), least * _LONGER)
        points.append((round(num_bytes), float(f"{num_bytes / least / best:.4g}")))
    return {"latency": rounded(max(latency / sharing, LEAST_SECONDS)), "sizes": points}


def _rate(timed: Sequence[Timed], latency: float, best: float) -> float | None:
    """Return the bytes per second for this latency; None if the latency explains all the seconds."""
    per_byte = np.asarray([_sent(t) / t.seconds for t in timed])
    left = np.asarray([1 - _messages(t) * latency / t.seconds for t in timed])
    slope = float(per_byte @ left / (per_byte @ per_byte)) if timed else 0.0
    return min(1 / slope, best) if slope > 0 else None


def _plain(timed: Sequence[Timed]) -> list[Timed]:
    return [t for t in timed if t.name != _APART]


def _messages(timed: Timed) -> float:
    n = timed.ranks
    return {"all_reduce": 2.0 * (n - 1), "p2p": 1.0}.get(timed.name, n - 1.0)


def _sent(timed: Timed) -> float:
    n = timed.ranks
    return timed.work * {"all_reduce": 2.0 * (n - 1) / n, "p2p": 1.0}.get(timed.name, (n - 1) / n)


def line(terms: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit both factors of ``terms``, neither below zero, to ``seconds``, by relative errors."""
    weights = 1 / np.asarray(seconds)
    matrix = np.asarray(terms) * weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    factors, _ = nnls(matrix / scale, np.ones(len(seconds)))
    first, second = factors / scale
    return float(first), float(second)


def share(value: float) -> float:
    """Round a fraction to three digits."""
    return min(1.0, max(0.001, round(value, 3)))


def rounded(value: float) -> float:
    """Round to three significant digits: measurements are not more precise."""
    return float(f"{value:.3g}")

"""From measured exchanges to the numbers of a link, by least squares of relative errors.

    seconds = messages · latency + sent / rate     n ranks in a ring, a tensor of B bytes:

                    messages    sent
    all_reduce      2 (n − 1)   2 B (n − 1) / n
    all_gather      n − 1       B (n − 1) / n
    reduce_scatter  n − 1       B (n − 1) / n
    p2p             1           B

One rate for all sizes and groups first. A rate for each size is kept if it brings the line nearer to what was measured,
and so is a factor for pairs of ranks. Time of a reduce-scatter beyond its line in the table is reported separately:
libraries differ in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np
from scipy.optimize import nnls

from planner.cluster.links import Wire
from runtime.calibrate.found import Timed

LEAST_SECONDS = 1e-9
_APART = "reduce_scatter"
_NEARER = 0.02  # by so much of the seconds must further numbers lower the spread
_PARTS_OF_LATENCY = (1.0, 0.75, 0.5, 0.25)  # one rate for all sizes takes the slowness of small tensors for latency
_LONGER = 1.01  # a larger tensor takes at least so many times as long as a smaller one


def link_of(exchanged: Sequence[Timed], size: int, sharing: float) -> dict[str, Any]:
    """The values of a link between ``size`` ranks, but for its name; ``sharing`` ranks had one core."""
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
    return {**link, "reduce_scatter": _times(_ratios([t for t in whole if t.name == _APART], link, sharing))}


def _nearest(exchanged: Sequence[Timed], sharing: float, links: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first, unless another is clearly nearer to what was measured."""
    first, *others = (spread(errors(exchanged, link, sharing)) for link in links)
    least = min(others)
    return links[1 + others.index(least)] if least < first - _NEARER else links[0]


def errors(exchanged: Sequence[Timed], link: Mapping[str, Any], sharing: float) -> list[float]:
    """Of the seconds by ``link``, relative to those that were measured; a reduce-scatter is left out."""
    return [ratio - 1 for ratio in _ratios(_plain(exchanged), link, sharing)]


def _ratios(timed: Sequence[Timed], link: Mapping[str, Any], sharing: float) -> list[float]:
    points = tuple((at, link["bandwidth"] * fraction) for at, fraction in link.get("sizes", ()))
    wire = Wire(
        link["latency"], link["bandwidth"] * link.get("fraction", 1.0), sizes=points, parts=tuple(link.get("parts", ()))
    )
    return [(_messages(t) * wire.latency + _sent(t) / wire.rate(t.work, t.ranks)) * sharing / t.seconds for t in timed]


def spread(relative: Sequence[float]) -> float:
    """The root of the mean square."""
    return round(min(1.0, float(np.sqrt(np.mean(np.square(relative))))), 3) if relative else 0.0


def _by_pairs(exchanged: Sequence[Timed], size: int, latency: float, rate: float, best: float) -> dict[str, Any]:
    """Groups of two and messages reach another bandwidth than all ranks do; the faster of the two has the factor 1."""
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
    """Beside this latency the rate of each size; ``link`` has the factor of a group of all ranks."""
    factor, points, least = dict(link.get("parts", ())).get(size, 1.0), list[tuple[float, float]](), 0.0
    for num_bytes in sorted({t.work for t in whole}):
        rate = _rate([t for t in _plain(whole) if t.work == num_bytes], latency, best) or best
        least = max(num_bytes / min(rate / factor, best), least * _LONGER)
        points.append((round(num_bytes), float(f"{num_bytes / least / best:.4g}")))
    return {"latency": rounded(max(latency / sharing, LEAST_SECONDS)), "sizes": points}


def _rate(timed: Sequence[Timed], latency: float, best: float) -> float | None:
    """Bytes a second beside this latency; None if the messages alone explain the seconds."""
    per_byte = np.asarray([_sent(t) / t.seconds for t in timed])
    left = np.asarray([1 - _messages(t) * latency / t.seconds for t in timed])
    slope = float(per_byte @ left / (per_byte @ per_byte)) if timed else 0.0
    return min(1 / slope, best) if slope > 0 else None


def _times(ratios: Sequence[float]) -> float:
    """How many times as long as by the line a reduce-scatter takes: of its sizes the mean."""
    return round(min(100.0, max(1.0, 1 / geometric_mean(ratios))), 2) if ratios else 1.0


def _plain(timed: Sequence[Timed]) -> list[Timed]:
    return [t for t in timed if t.name != _APART]


def _messages(timed: Timed) -> float:
    n = timed.ranks
    return {"all_reduce": 2.0 * (n - 1), "p2p": 1.0}.get(timed.name, n - 1.0)


def _sent(timed: Timed) -> float:
    n = timed.ranks
    return timed.work * {"all_reduce": 2.0 * (n - 1) / n, "p2p": 1.0}.get(timed.name, (n - 1) / n)


def line(terms: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Both factors, neither below zero; errors count by their share of the seconds."""
    weights = 1 / np.asarray(seconds)
    matrix = np.asarray(terms) * weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    factors, _ = nnls(matrix / scale, np.ones(len(seconds)))
    first, second = factors / scale
    return float(first), float(second)


def share(value: float) -> float:
    """A fraction with three digits."""
    return min(1.0, max(0.001, round(value, 3)))


def rounded(value: float) -> float:
    """Three digits: no measurement has more."""
    return float(f"{value:.3g}")

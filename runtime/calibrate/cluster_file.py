"""The text of a cluster file, with the measurements in its comments; written atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from passes.errors import PlanError, RunError
from planner.cluster.cluster import Cluster
from planner.files.atomic import write_for_user
from planner.spec.messages import spec_error
from planner.spec.schema import json_schema
from runtime.calibrate.found import Found, Timed

_KEYS = {
    "memory": "bytes: all memory / ranks",
    "bandwidth": "bytes per second, the best copy or op",
    "product_fraction": "fraction of the peak, from the slope over sizes",
    "half_tile": "matrix size at which a product reaches half its speed",
    "attention_fraction": "forward and backward, all operations counted",
    "bandwidth_fraction": "copies and ops between products, both directions",
    "launch": "seconds",
    "processors": "multiprocessors",
    "host": "seconds in which the host launches an op",
    "context": "bytes that the driver held before the first tensor",
    "slack": "bytes reserved beyond tensors in steps of a few layers, as a fraction of the tensors",
}


def cluster_text(values: Mapping[str, Any], found: Found, date: str) -> str:
    """YAML with comments. Raises RunError if the measurements do not make a valid machine."""
    try:
        Cluster.model_validate(values)
    except ValidationError as error:
        told = spec_error(error, values, {}, json_schema(Cluster), "the cluster file")
        raise RunError(f"the measurements do not make a valid cluster file: {told}") from error
    lines = [*_head(found, date), f"name: {values['name']}", "device:"]
    for key, value in values["device"].items():
        said = f"  {key}: {_value(value)}"
        lines.append(f"{said:<42}  # {_comment(key, found)}" if _comment(key, found) else said)
    lines.append(f"{'links:':<42}  # bandwidth: bytes per second, one direction, per rank; latency: seconds")
    for link in values["links"]:
        lines += [f"  {' ' if at else '-'} {key}: {_value(value)}" for at, (key, value) in enumerate(link.items())]
    lines.append(f"overlap: {values['overlap']:g}{_overlap(found)}")
    lines.append(f"uncertainty: {_value(values['uncertainty'])}  # spread of the measurements around these numbers")
    return "\n".join(lines) + "\n"


def _head(found: Found, date: str) -> list[str]:
    machine = found.machine
    shared = f" on {machine.cores} cores" if machine.cores else ""
    lines = [
        f"Measured by `meshwright calibrate` on {date}: {machine.num_ranks} ranks at once{shared}; {machine.backend}, "
        f"torch {machine.torch},",
        f"load average {machine.load:.1f} before. The fastest of several passes, the slowest rank of each pass.",
    ]
    if machine.sharing > 1:
        lines += [
            f"{machine.sharing:g} ranks shared a core: peaks and bandwidths below are multiplied by this factor,",
            "latency and launch the measured values divided by it: values of a rank with a core of its own.",
        ]
    lines += ["", "Measured, on one rank while the others run:"]
    lines += [f"  product {_seen(t, 'FLOP/s')}" for t in found.products]
    lines += [f"  attention {_seen(t, 'FLOP/s')}" for t in found.attention]
    lines += [f"  {_seen(t, 'B/s')}" for t in found.moved]
    lines += [f"  {_exchange(t)}" for t in found.exchanged]
    lines += [f"  skipped: {what}" for what in found.skipped]
    return [f"# {line}".rstrip() for line in lines]


def _seen(timed: Timed, unit: str) -> str:
    sides = "" if timed.sides is None else " [{}, {}] · [{}, {}]".format(*timed.sides[:2], *timed.sides[1:])
    return f"{timed.name}{sides}: {_short(timed.rate)}{unit} at {_short(timed.work)}{unit.partition('/')[0]}"


def _exchange(timed: Timed) -> str:
    group = "" if timed.name == "p2p" else f" over {timed.ranks} ranks"
    return f"{timed.name} of {_short(timed.work)}B{group}: {timed.seconds * 1e3:.3g} ms"


def _comment(key: str, found: Found) -> str:
    if key == "at_once":
        return "ranks that compute at this speed at the same time: the number of cores"
    return _KEYS.get(key, "")


def _overlap(found: Found) -> str:
    if found.overlap is None:
        return ""
    product, exchange, both = (f"{seconds * 1e3:.3g}" for seconds in found.overlap)
    return f"  # products of {product} ms beside an all-reduce of {exchange} ms took {both} ms"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, bool) or not isinstance(value, float):
        return _quoted(value) if isinstance(value, str) else str(value)
    if 1e-3 <= value < 1e4:
        return f"{value:g}" if value % 1 else f"{value:.1f}"
    power = int(f"{value:e}".partition("e")[2]) // 3 * 3
    digits = f"{value / 10.0**power:.4g}"
    return f"{digits if '.' in digits else f'{digits}.0'}e{power}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _short(value: float) -> str:
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{value / power:.3g} {letter}"
    return f"{value:.3g} "


def check_writable(path: Path) -> None:
    """Before anything is measured. Raises PlanError."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a directory" if path.is_dir() else f"{folder} is not a writable directory"
        raise PlanError(f"cannot write {path}: {why}", where="--output", fix="give a writable file")


def write_whole(text: str, path: Path) -> None:
    """A reader sees the old file or the new one. Raises PlanError if it cannot be written."""
    try:
        write_for_user(path, text)
    except OSError as error:
        raise PlanError(
            f"cannot write {path}: {error.strerror}", where="--output", fix="give a writable file"
        ) from error

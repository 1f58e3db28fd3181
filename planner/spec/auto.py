"""Keys that a spec leaves to the search implicitly: missing keys become auto.

mesh: auto                 all axes and their order, batch.micro, recompute, sequence parallelism, the schedule, ZeRO
mesh: {tp: auto, pp: 4}    tp, and dp, which takes the remaining ranks; batch.micro, if it is not written
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.mesh import SIZES
from planner.spec.fields import AUTO

WITH_MICRO = (("batch", "micro"),)
WITH_ALL = (
    *WITH_MICRO,
    ("tensor_parallel", "sequence_parallel"),
    ("pipeline", "schedule"),
    ("optimizer", "zero"),
)


def with_auto(value: Any) -> Any:
    """The values of a spec, with auto for the keys that the search decides. Malformed values stay unchanged."""
    mesh = value.get("mesh") if isinstance(value, Mapping) else None
    if mesh == AUTO:
        return {"recompute": AUTO, **_filled(value, WITH_ALL)}
    if isinstance(mesh, Mapping) and any(mesh.get(axis) == AUTO for axis in SIZES):
        return _filled(value, WITH_MICRO)
    return value


def _filled(value: Mapping[str, Any], keys: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    filled = dict(value)
    for section, name in keys:
        given = filled.get(section, None if section == "batch" else {})  # without a batch there is an error to come
        if isinstance(given, Mapping):
            filled[section] = {name: AUTO, **given}
    return filled

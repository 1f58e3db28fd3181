"""The adapters of a model that peft has wrapped, as values that a save holds: enough to make peft's modules again.

configs     of each adapter, as its adapter_config.json has it
modules     a hash of the settings of all layers of peft: ranks, scales, which adapters are active, merged or disabled

Modules that are made from the base and the configs compute the same as the saved ones if that hash is the same.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from planner.capture.model.adapted import Adapted


def describe_adapters(adapted: Adapted) -> dict[str, Any]:
    """``configs`` and ``modules``."""
    configs = {name: json.loads(_text(adapted.config_of(name))) for name in adapted.adapters}
    layers = {path: _settings(adapted.module.get_submodule(path)) for path in sorted(adapted.wrappers.values())}
    return {"configs": configs, "modules": hashlib.sha256(_text(layers).encode()).hexdigest()}


def _text(values: Any) -> str:
    return json.dumps(values, sort_keys=True, default=_as_json)


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _settings(layer: nn.Module) -> dict[str, Any]:
    """Its plain values, without the mode of training."""
    return {name: value for name, value in vars(layer).items() if name != "training" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether it is a number or text, or is made of these."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(held) for key, held in value.items())
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))

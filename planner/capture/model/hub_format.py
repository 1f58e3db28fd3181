"""The content of a model's Hugging Face directory beside the weights' values, read from the model itself.

Everything is read by duck typing (``config.to_dict``, lists of names to ignore), so any nn.Module has a HubFormat; one
that is no transformers model has no config and no renamings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from planner.capture.model.adapted import Adapted, adapted
from planner.capture.model.describe_adapters import describe_adapters


@dataclass(frozen=True, slots=True)
class HubFormat:
    """Names and texts of a checkpoint.

    ``config``: content of config.json, None for a model without one. ``generation_config``: likewise.
    ``persistent_buffers``: buffers that a checkpoint holds; ``buffers``: all of them. ``rename``: a checkpoint's name →
    the model's, if transformers changed names since the checkpoint was made. ``converted``: conversions beyond
    ``rename``, since several tensors of the checkpoint make one parameter. ``adapted``: of a model that peft has
    wrapped; ``config``, ``rename`` and ``converted`` are then the base's. ``adapters``: what describes these adapters
    without the model (``describe_adapters``).
    """

    config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    persistent_buffers: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    may_be_unexpected: tuple[str, ...] = ()
    may_be_absent: tuple[str, ...] = ()
    adapters: dict[str, Any] | None = None
    rename: Callable[[str], str] = field(default=lambda name: name, compare=False)
    converted: Callable[[str], bool] = field(default=lambda name: False, compare=False)
    adapted: Adapted | None = field(default=None, compare=False, repr=False)

    def base_name(self, name: str) -> str | None:
        """The name in the base's files of a tensor of the model; None for one of an adapter."""
        return name if self.adapted is None else self.adapted.base_names.get(name)

    def ignores_unexpected(self, name: str) -> bool:
        """Whether a tensor that the model has no place for is no error: a buffer that the model makes itself."""
        return name in self.buffers or any(re.search(pattern, name) for pattern in self.may_be_unexpected)

    def ignores_absent(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.may_be_absent)


def hub_format(model: nn.Module) -> HubFormat:
    """The format of ``model``; it has no references to the model's tensors."""
    wrapped = adapted(model)
    own = model if wrapped is None else model.get_submodule(wrapped.base)
    config = _json_of(getattr(own, "config", None))
    if config is not None:
        config["architectures"] = [type(own).__name__]
    rename, converted = _renamings(own) if config is not None else (None, None)
    return HubFormat(
        config,
        _json_of(getattr(own, "generation_config", None)),
        tuple(_persistent_buffers(model)),
        tuple(name for name, _ in model.named_buffers(remove_duplicate=False)),
        _patterns(model, "_keys_to_ignore_on_load_unexpected"),
        _patterns(model, "_keys_to_ignore_on_load_missing"),
        adapters=None if wrapped is None else describe_adapters(wrapped),
        adapted=wrapped,
        **({"rename": rename, "converted": converted} if rename and converted else {}),
    )


def _json_of(config: Any) -> dict[str, Any] | None:
    """The file content of a transformers config: the values unlike its defaults, as its own save writes them."""
    text = getattr(config, "to_json_string", None)
    if not callable(text):
        return None
    content = json.loads(str(text()))
    return content if isinstance(content, dict) else None


def _persistent_buffers(model: nn.Module) -> Iterable[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name


def _patterns(model: nn.Module, attribute: str) -> tuple[str, ...]:
    found: set[str] = set()
    for module in model.modules():
        found.update(getattr(module, attribute, None) or ())
    return tuple(sorted(found))


def _renamings(model: nn.Module) -> tuple[Callable[[str], str] | None, Callable[[str], bool] | None]:
    """transformers' own table of renamed weights for this model; None if this version has no such table."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return None, None
    try:
        entries = get_model_conversion_mapping(model)  # pyright: ignore[reportArgumentType]
    except Exception:  # not a model of transformers, or a version with another kind of table
        return None, None
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]

    def rename(name: str) -> str:
        return rename_source_key(name, renamings, [])[0]

    def converted(name: str) -> bool:
        return rename_source_key(name, renamings, converters)[1] is not None

    return rename, converted

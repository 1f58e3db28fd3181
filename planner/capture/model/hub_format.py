"""The content of a model's Hugging Face directory beside the weights' values, read from the model itself.

Everything is read by duck typing (``config.to_dict``, lists of names to ignore), so any nn.Module has a HubFormat; one
that is no transformers model has no config and no renamings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from planner.capture.hub.assembly import Assembly, Shape, inverted, sources
from planner.capture.hub.conversions import Conversions, Converted, unconverted
from planner.capture.model.adapted import Adapted, adapted
from planner.capture.model.compiled import plain_name
from planner.capture.model.describe_adapters import describe_adapters


@dataclass(frozen=True, slots=True)
class HubFormat:
    """Names and texts of a checkpoint.

    ``config``: content of config.json, None for a model without one. ``generation_config``: likewise.
    ``persistent_buffers``: buffers that a checkpoint holds; ``buffers``: all of them. ``conversions``: of a model of
    transformers, between stored tensors and the model's. ``names``: ``stored_names``, of a plan that was loaded
    without its model. ``adapted``: of a model that peft has wrapped; ``config``, ``conversions`` and ``names`` are then
    the base's. ``adapters``: what describes these adapters without the model (``describe_adapters``).
    """

    config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    persistent_buffers: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    may_be_unexpected: tuple[str, ...] = ()
    may_be_absent: tuple[str, ...] = ()
    adapters: dict[str, Any] | None = None
    names: Mapping[str, Assembly] = field(default_factory=dict, compare=False, repr=False)
    conversions: Conversions | None = field(default=None, compare=False, repr=False)
    adapted: Adapted | None = field(default=None, compare=False, repr=False)

    @property
    def stored_names(self) -> Mapping[str, Assembly]:
        """Stored name → how it is made of the model's tensors, unless it is the model's of this name."""
        return self.names if self.conversions is None else self.conversions.names

    def converted(self, stored: Mapping[str, Shape]) -> Converted:
        """How files with these tensors make the model's."""
        if self.conversions is not None:
            return self.conversions.converted(stored)
        made = {
            name: assembly
            for name, assembly in inverted(self.names).items()
            if all(stored.get(source.name) == source.shape for source in sources(assembly))
        }
        used = {source.name for assembly in made.values() for source in sources(assembly)}
        found = unconverted({name: shape for name, shape in stored.items() if name not in used})
        for name, assembly in made.items():
            found.add(name, assembly)
        return found

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
    return HubFormat(
        config,
        _json_of(getattr(own, "generation_config", None)),
        tuple(_persistent_buffers(model)),
        tuple(name for name, _ in model.named_buffers(remove_duplicate=False)),
        _patterns(model, "_keys_to_ignore_on_load_unexpected"),
        _patterns(model, "_keys_to_ignore_on_load_missing"),
        adapters=None if wrapped is None else describe_adapters(wrapped),
        conversions=None if config is None else _conversions(model, own, wrapped),
        adapted=wrapped,
    )


def stored_in(config: Any) -> str:
    """The format of quantised weights by the content of a config.json; empty if they are plain."""
    found = config.get("quantization_config") if isinstance(config, dict) else None
    method = str(found.get("quant_method")) if isinstance(found, dict) else ""
    return {"mxfp4": "MXFP4", **dict.fromkeys(("fp8", "fbgemm_fp8", "compressed-tensors"), "FP8")}.get(method, method)


def in_its_dtype(texts: Mapping[Any, Any]) -> dict[str, Any]:
    """Texts of a directory with weights that are not quantised."""
    return {
        name: {k: v for k, v in text.items() if k != "quantization_config"} if isinstance(text, dict) else text
        for name, text in texts.items()
    }


def _conversions(model: nn.Module, own: nn.Module, wrapped: Adapted | None) -> Conversions | None:
    """None if it is no model of transformers, or of a version with another kind of table."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        base = plain_name(name) if wrapped is None else wrapped.base_names.get(name)
        if base is not None and isinstance(tensor, Tensor):
            tensors[base] = tensor
    try:
        return Conversions(own, tensors)
    except Exception:
        return None


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

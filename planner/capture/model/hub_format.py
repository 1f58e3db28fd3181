"""The content of a model's Hugging Face directory beside the weights' values, read from the model itself.

Everything is read by duck typing (``config.to_dict``, lists of names to ignore), so any nn.Module has a HubFormat; one
that is no transformers model has no config and no renamings.

Of a model that the package peft has wrapped: peft's own modules without values, and the names that the base has.

    base_model.model.layers.0.q_proj.base_layer.weight          layers.0.q_proj.weight of the base
    base_model.model.layers.0.q_proj.lora_A.default.weight      of the adapter `default`: no name in the base

peft decides what an adapter's files hold, and how each method is merged. So its modules are kept, with parameters on
the meta device, and run on the values of a few tensors at a time.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.model.assembly import Assembly, Shape, inverted, read_whole, sources
from planner.capture.model.conversions import Conversions, Converted, unconverted
from planner.capture.model.eager import plain_name
from planner.capture.model.exchange import registry_kept
from planner.capture.model.meta_init import copied

_MODULES = {  # peft's wrappers of a module of the base, and the attribute that holds it
    ("peft.utils.other", "TrainableTokensWrapper"): "token_adapter",
    ("peft.tuners.tuners_utils", "BaseTunerLayer"): "base_layer",
    ("peft.utils.other", "AuxiliaryTrainingWrapper"): "original_module",
    ("peft.tuners.adaption_prompt.layer", "_BaseAdaptedAttention"): "model",
}


@dataclass(frozen=True, slots=True, eq=False)
class Adapted:
    """``module``: the planned model as peft made it, with parameters on meta.

    ``base_names``: for each tensor of the base, under each of its names here, its name in the base. ``wrappers``: name
    in the base of each wrapped module → its name here. ``base``: the name of the base here.
    """

    module: Any
    base: str
    base_names: Mapping[str, str]
    wrappers: Mapping[str, str]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.module.peft_config)

    def config_of(self, adapter: str) -> dict[str, Any]:
        return dict(self.module.peft_config[adapter].to_dict())

    def files_of(self, adapter: str) -> dict[str, str | None]:
        """Return name in the adapter's file → name in the model; None for a tensor that peft computes."""
        encoder = self._prompt_encoder(adapter)
        zeros = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in encoder.items()}
        with held_by(self.module, zeros):
            held = dict(_tensors(self.module))
            stored = import_module("peft").get_peft_model_state_dict(self.module, state_dict=held, adapter_name=adapter)
        if encoder:
            return dict.fromkeys(stored, next(iter(encoder)) if len(encoder) == 1 else None)
        names = {id(value): name for name, value in reversed(held.items())}
        return {name: names.get(id(value)) for name, value in stored.items()}

    def needed_by(self, adapter: str) -> tuple[str, ...]:
        """Return names in the model of the tensors that the adapter's file is made of."""
        return tuple(self._prompt_encoder(adapter)) or tuple(name for name in self.files_of(adapter).values() if name)

    def _prompt_encoder(self, adapter: str) -> dict[str, Tensor]:
        """Return the tensors of the module that makes virtual tokens; none for a method without one."""
        if not self.module.peft_config[adapter].is_prompt_learning:
            return {}
        return {name: value for name, value in _tensors(self.module) if name.startswith(f"prompt_encoder.{adapter}.")}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, the objects themselves, under all their names."""
    yield from module.state_dict(keep_vars=True).items()


@contextmanager
def held_by(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace these tensors of ``module`` by ``values``; one value under several names is one parameter."""
    made = {id(value): nn.Parameter(value, requires_grad=False) for value in values.values()}
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in values}
    with registry_kept(owners.values()):
        for name, owner in owners.items():
            leaf, value = name.rpartition(".")[2], values[name]
            if leaf in owner._parameters:
                owner._parameters[leaf] = made[id(value)]
            else:
                owner._buffers[leaf] = value
        yield


def adapted(model: nn.Module) -> Adapted | None:
    """Return the adapters of a model, without reference to its tensors; None if peft has not wrapped it."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    if kind is None or not isinstance(model, kind):
        return None
    wrapper: Any = model
    base = next(name for name, inner in model.named_modules() if inner is wrapper.get_base_model())
    wrapped = dict(_wrapped(model))
    base_names = {name: own for name, _ in _tensors(model) if (own := _base_name(name, base, wrapped)) is not None}
    outermost_last = [(f"{path}.{attribute}", path) for path, attribute in reversed(wrapped.items())]
    wrappers = {own: path for held, path in outermost_last if (own := _base_name(held, base, wrapped)) is not None}
    # buffers keep their values, which a merge may read
    twin = copied(model, lambda buffer: buffer.detach().to("meta" if buffer.is_meta else "cpu", copy=True))
    return Adapted(twin, base, base_names, wrappers)


def _wrapped(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name of a wrapper, its attribute that holds the module of the base)."""
    kinds = [(getattr(sys.modules.get(file), name, None), held) for (file, name), held in _MODULES.items()]
    for path, module in model.named_modules():
        for kind, attribute in kinds:
            if kind is not None and isinstance(module, kind) and attribute in module._modules:
                yield path, attribute
                break


def _base_name(name: str, base: str, wrapped: Mapping[str, str]) -> str | None:
    """Return the name without peft's wrappers; None for a tensor beside a wrapped module, not in it."""
    if not name.startswith(f"{base}."):
        return None
    parts, path, own = name.removeprefix(f"{base}.").split("."), base, []
    for part in parts:
        if path not in wrapped:
            own.append(part)
        elif part != wrapped[path]:
            return None
        path = f"{path}.{part}"
    return ".".join(own)


def describe_adapters(adapted: Adapted) -> dict[str, Any]:
    """Return the record of adapters in a save: modules that peft makes of the base and these ``configs`` compute the
    same as the saved ones if ``modules``, the hash of the settings of all layers (ranks, scales, active, merged,
    disabled adapters), is equal.
    """
    configs = {name: json.loads(_text(adapted.config_of(name))) for name in adapted.adapters}
    settings = {path: vars(adapted.module.get_submodule(path)) for path in sorted(adapted.wrappers.values())}
    layers = {
        path: {name: value for name, value in own.items() if name != "training" and _is_plain(value)}
        for path, own in settings.items()
    }
    return {"configs": configs, "modules": hashlib.sha256(_text(layers).encode()).hexdigest()}


def _text(values: Any) -> str:
    plain: Any = lambda value: sorted(value) if isinstance(value, (set, frozenset)) else str(value)  # noqa: E731
    return json.dumps(values, sort_keys=True, default=plain)


def _is_plain(value: Any) -> bool:
    """Return whether it is a number or text, or consists of these."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(held) for key, held in value.items())
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True, slots=True)
class HubFormat:
    """Names and texts of a checkpoint.

    ``config``: content of config.json, None for a model without one. ``generation_config``: likewise.
    ``persistent_buffers``: buffers that a checkpoint holds; ``buffers``: all of them. ``conversions``: of a model of
    transformers, between stored tensors and the model's. ``names``: ``stored_names``, of a plan that was loaded
    without its model. ``adapted``: of a model that peft has wrapped; ``config``, ``conversions`` and ``names`` are then
    the base's. ``adapters``: of ``describe_adapters``.
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
        """Return stored name → how it is made of the model's tensors, unless it is the model's of this name."""
        return self.names if self.conversions is None else self.conversions.names

    @property
    def made_whole(self) -> dict[str, int]:
        """Return op by which stored tensors are made → elements that it reads, of which no part can be made alone."""
        sampled = self.names if self.conversions is None else self.conversions.sampled
        return read_whole(self.stored_names.values()) if read_whole(sampled.values()) else {}

    def converted(self, stored: Mapping[str, Shape]) -> Converted:
        """Return how files with these tensors make those of the model."""
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
        """Return the name in the base's files of a tensor of the model; None for one of an adapter."""
        return name if self.adapted is None else self.adapted.base_names.get(name)

    def ignores_unexpected(self, name: str) -> bool:
        """Return whether a stored tensor may be absent in the model, such as a buffer that it makes itself."""
        return name in self.buffers or any(re.search(pattern, name) for pattern in self.may_be_unexpected)

    def ignores_absent(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.may_be_absent)


def hub_format(model: nn.Module) -> HubFormat:
    """Return the format of ``model``; it has no references to the model's tensors."""
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
    """Return the format of quantised weights by the content of a config.json; empty if they are plain."""
    found = config.get("quantization_config") if isinstance(config, dict) else None
    method = str(found.get("quant_method")) if isinstance(found, dict) else ""
    return {"mxfp4": "MXFP4", **dict.fromkeys(("fp8", "fbgemm_fp8", "compressed-tensors"), "FP8")}.get(method, method)


def in_its_dtype(texts: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the texts of a directory with weights that are not quantised."""
    return {
        name: {k: v for k, v in text.items() if k != "quantization_config"} if isinstance(text, dict) else text
        for name, text in texts.items()
    }


def _conversions(model: nn.Module, own: nn.Module, wrapped: Adapted | None) -> Conversions | None:
    """Return None if the model is not of transformers, or of a version with another kind of table."""
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
    """Return the file content of a transformers config: values that differ from defaults, as it saves them."""
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

"""A model that the package peft has wrapped: peft's own modules without values, and the names that the base has.

    base_model.model.layers.0.q_proj.base_layer.weight          layers.0.q_proj.weight of the base
    base_model.model.layers.0.q_proj.lora_A.default.weight      of the adapter `default`: no name in the base

peft decides what an adapter's files hold, and how each method is merged. So its modules are kept, with parameters on
the meta device: they take no memory, and run on the values of a few tensors at a time.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

_MODULES = {  # peft's wrappers of a module of the base, and the attribute that holds it
    ("peft.utils.other", "TrainableTokensWrapper"): "token_adapter",
    ("peft.tuners.tuners_utils", "BaseTunerLayer"): "base_layer",
    ("peft.utils.other", "AuxiliaryTrainingWrapper"): "original_module",
    ("peft.tuners.adaption_prompt.layer", "_BaseAdaptedAttention"): "model",
}


@dataclass(frozen=True, slots=True, eq=False)
class Adapted:
    """``module``: the planned model as peft made it, with parameters on meta.

    ``base_names``: for each tensor of the base, under each of its names here, its name in the base.
    ``wrappers``: name in the base of each wrapped module → its name here. ``base``: the name of the base here.
    """

    module: Any
    base: str
    base_names: Mapping[str, str]
    wrappers: Mapping[str, str]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.module.peft_config)

    @property
    def base_class(self) -> type[nn.Module]:
        return type(self.module.get_submodule(self.base))

    def config_of(self, adapter: str) -> dict[str, Any]:
        """The settings of an adapter."""
        return dict(self.module.peft_config[adapter].to_dict())

    def files_of(self, adapter: str) -> dict[str, str | None]:
        """Name in the adapter's file → name in the model; None for a tensor that peft computes for the file."""
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
        """Names in the model of the tensors that the adapter's file is made of."""
        return tuple(self._prompt_encoder(adapter)) or tuple(name for name in self.files_of(adapter).values() if name)

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[Any]:
        """peft's module, in which the tensors named in ``values`` have these."""
        with held_by(self.module, values):
            yield self.module

    def _prompt_encoder(self, adapter: str) -> dict[str, Tensor]:
        """The tensors of the module that makes virtual tokens; empty for a method without one."""
        if not self.module.peft_config[adapter].is_prompt_learning:
            return {}
        return {name: value for name, value in _tensors(self.module) if name.startswith(f"prompt_encoder.{adapter}.")}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, the objects themselves, under all their names."""
    yield from module.state_dict(keep_vars=True).items()


@contextmanager
def held_by(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, these tensors of ``module`` are ``values``; one value under several names is one parameter."""
    made = {id(value): nn.Parameter(value, requires_grad=False) for value in values.values()}
    before = []
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        registry = owner._parameters if leaf in owner._parameters else owner._buffers
        before.append((registry, leaf, registry[leaf]))
        registry[leaf] = made[id(value)] if registry is owner._parameters else value  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for registry, leaf, old in before:
            registry[leaf] = old


def adapted(model: nn.Module) -> Adapted | None:
    """None for a model that peft has not wrapped. It refers to no tensor of ``model``."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    if kind is None or not isinstance(model, kind):
        return None
    wrapper: Any = model
    base = next(name for name, inner in model.named_modules() if inner is wrapper.get_base_model())
    wrapped = dict(_wrapped(model))
    base_names = {name: own for name, _ in _tensors(model) if (own := _base_name(name, base, wrapped)) is not None}
    outermost_last = [(f"{path}.{attribute}", path) for path, attribute in reversed(wrapped.items())]
    wrappers = {own: path for held, path in outermost_last if (own := _base_name(held, base, wrapped)) is not None}
    return Adapted(_without_values(model), base, base_names, wrappers)


def _wrapped(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name of a wrapper, its attribute that holds the module of the base)."""
    kinds = [(getattr(sys.modules.get(file), name, None), held) for (file, name), held in _MODULES.items()]
    for path, module in model.named_modules():
        for kind, attribute in kinds:
            if kind is not None and isinstance(module, kind) and attribute in module._modules:
                yield path, attribute
                break


def _base_name(name: str, base: str, wrapped: Mapping[str, str]) -> str | None:
    """The name without peft's wrappers; None for a tensor that stands beside a wrapped module, not in it."""
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


def _without_values(model: nn.Module) -> nn.Module:
    """A copy in which parameters are on meta; ties are kept. Buffers keep their values, which a merge may read."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta" if buffer.is_meta else "cpu", copy=True)
    return copy.deepcopy(model, memo)

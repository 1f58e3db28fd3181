"""transformers' own conversions between stored tensors and a model's, run without values and recorded.

    stored names, sorted --renamings, then one converter--> groups --each group's ops--> a parameter as an assembly
    names of the model   --transformers' own reverse-->                                  a stored tensor, likewise

Entries of the table have state, so each run has its own copies and walks all names in one order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import first_line
from planner.capture.hub.assembly import Assembly, Shape, Source
from planner.capture.hub.recorder import Recorder
from planner.capture.model.compiled import plain_name


@dataclass(frozen=True, slots=True)
class Converted:
    """``made``: name → the stored tensors that are it, or make it, more than one if it is stored twice; some of these
    names may be none of the model. ``problems``: of names that do not fit together.
    """

    made: dict[str, list[Assembly]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, made: Assembly) -> None:
        self.made.setdefault(name, []).append(made)


def unconverted(stored: Mapping[str, Shape]) -> Converted:
    """Each stored tensor as the model's of the same name."""
    found = Converted()
    for name, shape in stored.items():
        found.add(plain_name(name), Source(name, shape))
    return found


class _Asked:
    """What transformers asks a model while it converts: the full shapes of parameters, and settings."""

    def __init__(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        self.config, self.base_model_prefix = model.config, model.base_model_prefix
        made: dict[int, Tensor] = {}  # a tied one is one here too
        self.tensors = {
            name: made.setdefault(id(t), torch.empty(t.shape, dtype=t.dtype, device="meta"))
            for name, t in tensors.items()
        }

    def get_parameter(self, name: str) -> Tensor:
        return self.tensors[name]


class Conversions:
    """The table of one model, without a reference to its tensors. ``tensors``: the model's by their names in files."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Raises ImportError if this version of transformers has no such table, and any error for another model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        given: Any = model
        self._asked: Any = _Asked(model, tensors)
        self._forward = get_model_conversion_mapping(given)
        held = getattr(model, "_weight_conversions", None)
        own = get_model_conversion_mapping(given, add_legacy=False)
        self._backward = [e for e in own if not isinstance(e, PrefixChange)] if held is None else deepcopy(held)

    def converted(self, stored: Mapping[str, Shape]) -> Converted:
        """How files with these tensors make the model's."""
        from transformers.core_model_loading import dot_natural_key

        found, groups, plain = Converted(), _Groups(deepcopy(self._forward), self._asked), {}
        for name in sorted(stored, key=lambda each: dot_natural_key(plain_name(each))):
            plain[plain_name(name)] = name
        recorder = Recorder()
        for name, own in plain.items():
            if not groups.take(name, recorder.source(own, stored[own])):
                found.add(groups.renamed(name), Source(own, stored[own]))
        with recorder, torch.no_grad():
            for target, made in groups.run(recorder, found.problems):
                found.add(target, made)
        return found

    @cached_property
    def names(self) -> dict[str, Assembly]:
        """Stored name → how transformers' ``save_pretrained`` makes it of the model's tensors, unless it is the model's
        of this name. Empty if transformers cannot reverse its conversions.
        """
        from transformers.core_model_loading import revert_weight_conversion

        recorder, self._asked._weight_conversions = Recorder(), deepcopy(self._backward)
        first: dict[int, str] = {}
        for name, tensor in self._asked.tensors.items():
            first.setdefault(id(tensor), name)
        state = {name: recorder.source(name, self._asked.tensors[name].shape) for name in first.values()}
        try:
            with recorder, torch.no_grad():
                stored = revert_weight_conversion(self._asked, state)
            made = {name: recorder.made(tensor) for name, tensor in stored.items()}
        except Exception:  # an entry without a reverse, of transformers' or of the user's
            return {}
        return {name: each for name, each in made.items() if each != Source(name, tuple(stored[name].shape))}


class _Groups:
    """The stored tensors that each converter collects, as ``from_pretrained`` collects them."""

    def __init__(self, entries: Iterable[Any], asked: Any) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        entries = list(entries)
        self._asked = asked
        self._renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        self._of_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._groups: dict[str, Any] = {}
        self._names: dict[str, dict[str, list[str]]] = {}
        self._renamed: dict[str, str] = {}

    def renamed(self, name: str) -> str:
        return self._renamed[name]

    def take(self, name: str, tensor: Tensor) -> bool:
        """Give the tensor to its converter; False if it has none."""
        from transformers.core_model_loading import rename_source_key

        prefix, known = self._asked.base_model_prefix, self._asked.tensors
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = rename_source_key(name, [], [], prefix, known)
        self._renamed[name] = renamed
        if pattern is None or renamed not in known:
            return False
        group = self._groups.setdefault(renamed, deepcopy(self._of_pattern[pattern]))
        group.add_tensor(renamed, name, pattern, tensor)
        self._names.setdefault(renamed, {}).setdefault(pattern, []).append(name)
        return True

    def run(self, recorder: Recorder, problems: list[str]) -> Iterable[tuple[str, Assembly]]:
        for first, group in self._groups.items():
            names = self._names[first]
            problems += [gap for of_pattern in names.values() if (gap := _gap(of_pattern))]
            try:
                made = group.convert(first, model=self._asked, config=self._asked.config)
                for target, value in made.items():
                    yield target, recorder.made(value[0] if isinstance(value, list) else value)
            except Exception as error:  # of transformers or of an entry of the user's, for names that do not fit
                counts = " and ".join(f"{len(held)} tensors like {held[0]}" for held in names.values())
                problems.append(f"{counts} do not make {first}: {first_line(error)}")


def _gap(names: list[str]) -> str:
    """The number that is absent from names that one list of the model is made of; empty if they count from 0."""
    split = [re.split(r"(\d+)", name) for name in names]
    varied = [place for place, column in enumerate(zip(*split, strict=False)) if len(set(column)) > 1]
    if len(varied) != 1 or not split[0][varied[0]].isdigit():
        return ""
    (place,) = varied
    numbers = sorted(int(name[place]) for name in split)
    absent = next((number for number, held in enumerate(numbers) if held != number), None)
    if absent is None:
        return ""
    shown = "".join("*" if at == place else text for at, text in enumerate(split[0]))
    return f"{shown}: number {absent} is absent, the files have {len(numbers)} up to number {numbers[-1]}"

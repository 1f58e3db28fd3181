"""transformers' own conversions between stored tensors and a model's, run without values and recorded.

    stored names, sorted --renamings, then one converter--> groups --each group's ops--> a parameter as an assembly
    names of the model   --transformers' own reverse-->                                  a stored tensor, likewise

Entries of the table have state, so each run has its own copies and walks all names in one order. The recorder notes on
the meta device what a function does to tensors: of each result how it is made of the given ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import first_line
from passes.program.ops.aten import is_mutable, permutation
from passes.program.ops.groups import PERMUTES
from planner.capture.model.assembly import Assembly, Call, Permute, Shape, Source, cat, nodes, part, view
from planner.capture.model.eager import plain_name


@dataclass(frozen=True, slots=True)
class Converted:
    """``made``: name → the stored tensors that it is made of, several if it is stored twice; not all names are the
    model's. ``problems``: of names that do not fit together.
    """

    made: dict[str, list[Assembly]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, made: Assembly) -> None:
        self.made.setdefault(name, []).append(made)


def unconverted(stored: Mapping[str, Shape]) -> Converted:
    found = Converted()
    for name, shape in stored.items():
        found.add(plain_name(name), Source(name, shape))
    return found


class _Asked:
    """Stands for the model while transformers converts: full shapes of parameters, and settings."""

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
        """Return how files with these tensors make those of the model."""
        from transformers.core_model_loading import dot_natural_key

        found, groups, recorder = Converted(), _Groups(deepcopy(self._forward), self._asked), _Recorder()
        for own in sorted(stored, key=lambda each: dot_natural_key(plain_name(each))):
            name = plain_name(own)
            if not groups.take(name, recorder.source(own, stored[own])):
                found.add(groups.renamed(name), Source(own, stored[own]))
        with recorder, torch.no_grad():
            for target, made in groups.run(recorder, found.problems):
                found.add(target, made)
        return found

    @cached_property
    def names(self) -> dict[str, Assembly]:
        """Return stored name → the way in which ``save_pretrained`` of transformers makes it of the model's tensors,
        unless it is the model's of this name. Empty if transformers cannot reverse its conversions.
        """
        try:
            return self._names(self._asked.tensors)
        except Exception:  # an entry without a reverse, of transformers' or of the user's
            return {}

    @property
    def sampled(self) -> dict[str, Assembly]:
        """Return such ``names`` of one layer of each kind, which takes less time; all of them if that fails."""
        try:
            return self._names(_of_one_layer_of_each_kind(self._asked.tensors))
        except Exception:
            return self.names

    def _names(self, tensors: Mapping[str, Tensor]) -> dict[str, Assembly]:
        from transformers.core_model_loading import revert_weight_conversion

        recorder, self._asked._weight_conversions = _Recorder(), deepcopy(self._backward)
        first: dict[int, str] = {}
        for name, tensor in tensors.items():
            first.setdefault(id(tensor), name)
        state = {name: recorder.source(name, tensors[name].shape) for name in first.values()}
        with recorder, torch.no_grad():
            stored = revert_weight_conversion(self._asked, state)
        made = {name: recorder.made(tensor) for name, tensor in stored.items()}
        return {name: each for name, each in made.items() if each != Source(name, tuple(stored[name].shape))}


def _of_one_layer_of_each_kind(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep one layer of each kind: with the same names behind the number, and the same shapes."""
    layers: dict[tuple[str, ...], dict[str, Tensor]] = {}
    kinds: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layers.setdefault(tuple(re.split(r"(\d+)", name, maxsplit=1)[:2]), {})[name] = tensor
    for start, held in layers.items():
        kind = tuple((name.removeprefix("".join(start)), tensor.shape) for name, tensor in held.items())
        kinds.setdefault((start[0], kind), held)
    return {name: tensor for held in kinds.values() for name, tensor in held.items()}


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
        """Give the tensor to its converter; return False if it has none."""
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

    def run(self, recorder: _Recorder, problems: list[str]) -> Iterable[tuple[str, Assembly]]:
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
    """Return the error for a number that is absent from the names of a list; empty if they count from 0."""
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


class _Recorder(TorchDispatchMode):
    """Owns the recorded tensors, and the assembly of each."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Assembly] = {}
        self._alive: list[Tensor] = []

    def source(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor without values that stands for the stored one of this name."""
        tensor = torch.empty(tuple(shape), dtype=torch.float32, device="meta")
        self._keep(tensor, Source(name, tuple(shape)))
        return tensor

    def made(self, tensor: Tensor) -> Assembly:
        """Return the assembly of a tensor. Raises ValueError if it is made of no stored tensor."""
        found = self._made.get(id(tensor))
        if found is None:
            raise ValueError("it is made of none of the stored tensors")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = self._given(args)
        if next(nodes(given), None) is not None:
            if is_mutable(func):
                raise ValueError(f"{func} writes to a tensor in place")
            results = [out] if isinstance(out, Tensor) else list(out)
            options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            for tensor, made in zip(results, _results(func, given, options, results), strict=True):
                self._keep(tensor, made)
        return out

    def _keep(self, tensor: Tensor, made: Assembly) -> None:
        self._alive.append(tensor)  # so that no other object takes its number
        self._made[id(tensor)] = made

    def _given(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(self._given, value))
        return self._made.get(id(value), value) if isinstance(value, Tensor) else value


def _results(func: Any, given: tuple[Any, ...], options: dict[str, Any], out: Sequence[Tensor]) -> list[Assembly]:
    if func in PERMUTES:
        whole, *rest = given
        return [Permute(tuple(permutation(func, len(whole.shape), rest, options)), whole)]
    rule = _RULES.get(func.overloadpacket.__name__)
    made = None if rule is None else rule(out, *given, **options)
    if made is not None:
        return list(made)
    if options or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(given)):
        raise ValueError(f"{func} is called with values that no plan can hold")
    return [Call(str(func), given, index, tuple(tensor.shape)) for index, tensor in enumerate(out)]


def _same(out: Sequence[Tensor], whole: Assembly, *_: Any, **__: Any) -> list[Assembly]:
    return [whole]


def _view(out: Sequence[Tensor], whole: Assembly, *_: Any, **__: Any) -> list[Assembly] | None:
    shape = tuple(out[0].shape)
    return [view(whole, shape)] if prod(shape) == prod(whole.shape) else None


def _cat(out: Sequence[Tensor], parts: Sequence[Any], dim: int = 0) -> list[Assembly] | None:
    return [cat(parts, dim % out[0].dim())] if all(isinstance(each, Assembly) for each in parts) else None


def _stack(out: Sequence[Tensor], parts: Sequence[Any], dim: int = 0) -> list[Assembly] | None:
    dim %= out[0].dim()
    shape = tuple(1 if d == dim else n for d, n in enumerate(out[0].shape))
    return _cat(out, [view(each, shape) if isinstance(each, Assembly) else each for each in parts], dim)


def _split(out: Sequence[Tensor], whole: Assembly, _: Any, dim: int = 0) -> list[Assembly]:
    dim, found, start = dim % len(whole.shape), [], 0
    for tensor in out:
        found.append(part(whole, dim, start, start + tensor.shape[dim]))
        start += tensor.shape[dim]
    return found


def _unbind(out: Sequence[Tensor], whole: Assembly, dim: int = 0) -> list[Assembly]:
    return [_select([tensor], whole, dim, index)[0] for index, tensor in enumerate(out)]


def _select(out: Sequence[Tensor], whole: Assembly, dim: int, index: int) -> list[Assembly]:
    dim %= len(whole.shape)
    index %= whole.shape[dim]
    return [view(part(whole, dim, index, index + 1), tuple(out[0].shape))]


def _slice(
    out: Sequence[Tensor], whole: Assembly, dim: int = 0, start: int | None = None, _: Any = None, step: int = 1
) -> list[Assembly] | None:
    dim %= len(whole.shape)
    size, first = whole.shape[dim], start or 0
    first = min(max(first + size if first < 0 else first, 0), size)
    return [part(whole, dim, first, first + out[0].shape[dim])] if step == 1 else None


_RULES: dict[str, Callable[..., list[Assembly] | None]] = {
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh", "_to_copy"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape", "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "cat": _cat,
    "select": _select,
    "slice": _slice,
    "stack": _stack,
    "unbind": _unbind,
}

"""What a function does to tensors, recorded on the meta device: of each result how it is made of the given tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from passes.program.ops.aten import is_mutable
from planner.capture.hub.assembly import Assembly, Call, Permute, Source, cat, part, view


class Recorder(TorchDispatchMode):
    """Owns the tensors it has seen, and how each is made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Assembly] = {}
        self._alive: list[Tensor] = []

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor without values that stands for the one of this name."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._keep(tensor, Source(name, tuple(shape)))
        return tensor

    def made(self, tensor: Tensor) -> Assembly:
        """Raises ValueError for a tensor that no given one is part of."""
        found = self._made.get(id(tensor))
        if found is None:
            raise ValueError("it is made of none of the stored tensors")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = self._given(args)
        if _holds_source(given):
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


def _holds_source(given: Any) -> bool:
    return isinstance(given, Assembly) or (isinstance(given, tuple) and any(map(_holds_source, given)))


def _results(func: Any, given: tuple[Any, ...], options: dict[str, Any], out: Sequence[Tensor]) -> list[Assembly]:
    rule = _RULES.get(func.overloadpacket.__name__)
    made = None if rule is None else rule(out, *given, **options)
    if made is not None:
        return list(made)
    if options or any(isinstance(leaf, Tensor) for leaf in _leaves(given)):
        raise ValueError(f"{func} is called with values that no plan can hold")
    return [Call(str(func), given, index, tuple(tensor.shape)) for index, tensor in enumerate(out)]


def _leaves(value: Any) -> Iterable[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, tuple) else [value]


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


def _permute(out: Sequence[Tensor], whole: Assembly, dims: Sequence[int]) -> list[Assembly]:
    return [Permute(tuple(dim % len(dims) for dim in dims), whole)]


def _transpose(out: Sequence[Tensor], whole: Assembly, first: int = 0, second: int = 1) -> list[Assembly]:
    dims = list(range(len(whole.shape)))
    dims[first], dims[second] = dims[second], dims[first]
    return [Permute(tuple(dims), whole)]


_RULES: dict[str, Callable[..., list[Assembly] | None]] = {
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh", "_to_copy"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape", "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("transpose", "t"), _transpose),
    "cat": _cat,
    "permute": _permute,
    "select": _select,
    "slice": _slice,
    "stack": _stack,
    "unbind": _unbind,
}

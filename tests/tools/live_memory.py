"""What is alive of what ops made: memory that somebody beside this tool still holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Owns: every storage that an op has made while it is open; freed are those of which this is the only holder."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._storages.setdefault(storage._cdata, storage)
        return result

    def alive(self, apart: Iterable[Tensor] = ()) -> dict[int, int]:
        """Bytes of each storage that is held; ``apart``: tensors that do not count."""
        others = {tensor.untyped_storage()._cdata for tensor in apart}
        return {
            key: storage.nbytes()
            for key, storage in self._storages.items()
            if key not in others and _num_holders(storage) > 1
        }

    def alive_bytes(self, apart: Iterable[Tensor] = ()) -> int:
        return sum(self.alive(apart).values())


class MostMade(Made):
    """Owns ``most_bytes``: the most that was alive at once after an op. Views of what was there do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        there = given - self._storages.keys()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = {key: storage for key, storage in self._storages.items() if key not in there}
        self._storages = {key: storage for key, storage in made.items() if _num_holders(storage) > 1}
        self.most_bytes = max(self.most_bytes, self.alive_bytes())
        return result


def _num_holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportAttributeAccessIssue]

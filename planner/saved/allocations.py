"""Memory of ops while they run: every tensor that an op allocates, and the time at which its memory is freed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Owns the live allocations made under it, by memory; ``peak``: the most bytes at once since ``restart``.

    ``known``: tensors without counted memory. ``settling``: seconds before a new peak is read, in which a thread that
    ends a collective releases its tensors. Workspaces inside a kernel are not seen.
    """

    reads_memory_alone = True  # so that compiled functions may run under it

    def __init__(self, known: Iterable[Tensor] = (), *, settling: float = 0.0) -> None:
        super().__init__()
        self._settling = settling
        self._known: dict[int, StorageWeakRef] = {}
        self.know(known)
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        """Bytes that live now."""
        return sum(self.living.values())

    @property
    def living(self) -> dict[int, int]:
        """Each memory that lives now → bytes."""
        for memory in [memory for memory, (storage, _) in self._made.items() if storage.expired()]:
            del self._made[memory]
        return {memory: size for memory, (_, size) in self._made.items()}

    @property
    def known(self) -> Set[int]:
        """The memory that is not counted."""
        return self._known.keys()

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Count no memory of ``tensors``."""
        self._known |= {storage.cdata: storage for storage in map(_reference, tensors)}

    def restart(self) -> None:
        """Count the live allocations no longer, and reset the peak."""
        self._known |= {memory: storage for memory, (storage, _) in self._made.items()}
        self._made, self.peak = {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = False
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = _reference(leaf)
                if storage.cdata not in self._known and storage.cdata not in self._made:
                    self._made[storage.cdata] = (storage, leaf.untyped_storage().nbytes())
                    new = True
        if new and self.live > self.peak:
            if self._settling:
                time.sleep(self._settling)
            self.peak = max(self.peak, self.live)
        return result


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())

"""What autograd really keeps of a stage module: ranks as threads, under the hooks of saved tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes.base import RankProgram, StageModule
from planner import Plan
from planner.trace.trace import StageTrace
from tests.tools.simulated_mesh import Batch, Spread, given_to


@dataclass
class Kept:
    """Memory of one rank by its place in the process → bytes; ``tensors`` keep it there."""

    bytes_at: dict[int, int]
    tensors: list[Tensor]

    @property
    def total(self) -> int:
        return sum(self.bytes_at.values())


def kept_by(run: Callable[[], Any], outside: Iterable[Tensor]) -> tuple[Any, Kept]:
    """What ``run`` returns, and all memory that it saved, but for that of ``outside``."""
    apart = {place_of(t) for t in outside}
    kept = Kept({}, [])

    def pack(tensor: Tensor) -> Tensor:
        if place_of(tensor) not in apart:
            kept.bytes_at[place_of(tensor)] = tensor.untyped_storage().nbytes()
        kept.tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), kept


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def held_by(stage: StageModule) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers()]


def measured(
    make: Callable[[], nn.Module], batch: Batch, mesh: Mapping[str, int], **more: Any
) -> tuple[Plan, list[Kept]]:
    """One microbatch of every rank of a mesh without pipeline, forward alone."""
    spread = Spread(make, batch, mesh, **more)
    return spread.plan, spread.run(_kept)


def _kept(program: RankProgram, batch: Batch, totals: list[Tensor]) -> Kept:
    (stage,) = program.stages
    given = given_to(stage, batch, totals)
    loss, kept = kept_by(lambda: stage.module(*given), [*held_by(stage), *given])
    assert loss[-1].requires_grad
    return kept


def kept_bytes(trace: StageTrace) -> int:
    """All that autograd keeps of one microbatch, as a trace has it."""
    return sum(trace.kept.values()) + trace.hidden


# ---- What is alive of what ops made: memory that somebody beside this tool still holds


class Made(TorchDispatchMode):
    """Owns: every storage that an op has made while it is open; freed are those of which this is the only holder."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not value.is_meta:  # one without values has no memory
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

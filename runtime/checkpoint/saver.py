"""Saves the training state: each rank writes its file, then rank 0 the manifest, the name and ``latest``.

    step-00000012 exists     ⟺   the files of all ranks and the manifest are on the disk
    wait=False               values are copied to host memory, on a GPU during the next
                             step; a thread writes them, and the ranks' threads agree

An error on one rank is raised on all: the previous save stays, the new one is removed, and training can continue.
torch.distributed.checkpoint is not used: it reads damaged and mixed files without an error, and it pickles.

The first save in the background allocates host memory, and later ones reuse it. It is pinned: a copy to pageable memory
would block the host, which launches steps. The update that overwrites copied memory waits on the device for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor

from passes.errors import PlanError
from runtime.checkpoint.atomic_directory import replaced_directory
from runtime.checkpoint.hub_tensors import json_of_names, stored_names
from runtime.checkpoint.lines import NO_LINE, Line
from runtime.checkpoint.manifest import (
    MANIFEST,
    AdaptersEntry,
    Axis,
    LossScaleEntry,
    Manifest,
    ModelFile,
    OptimizerEntry,
    draft,
    json_of,
    write_manifest,
)
from runtime.checkpoint.pieces import Record, WrittenPiece, completed, write_pieces
from runtime.checkpoint.pretrained_save import texts_of
from runtime.checkpoint.saves import free_name, write_latest
from runtime.checkpoint.training_state import TrainingState
from runtime.distributed.agreement import PATIENCE, agreed, broadcast_json, gather_json, of_kind
from runtime.distributed.default_group import in_thread
from runtime.distributed.groups import Groups

# a power of two, since the allocator of pinned memory rounds up to one; a larger tensor has its own block
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 64  # bytes


class InOrder:
    """The queue of copies on a CPU, which run synchronously."""

    def memory(self, num_bytes: int) -> Tensor:
        """Return host memory to copy to, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copying(self) -> AbstractContextManager[object]:
        """Return a context in which copies are queued; they read values that were computed before it."""
        return nullcontext()

    def hold(self) -> None:
        """Make work that is queued afterwards run after the copies."""

    def wait(self) -> None:
        """Wait for the copies."""


class SideStream(InOrder):
    """The queue of copies on a CUDA device. Owns its stream, beside that of the steps, and the event after the last
    copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied.record(self._stream)

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        self._copied.synchronize()


@dataclass
class _Block:
    memory: Tensor
    used: int = 0


class Staging:
    """Host memory for one save at a time. Owns its blocks, and the queue of copies to them."""

    def __init__(self, queue: InOrder) -> None:
        self._queue, self._blocks = queue, list[_Block]()
        self._is_copying = False

    @classmethod
    def on(cls, device: torch.device) -> Staging:
        return cls(SideStream(device) if device.type == "cuda" else InOrder())

    @property
    def num_bytes(self) -> int:
        return sum(len(block.memory) for block in self._blocks)

    def take(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Queue copies of ``tensors`` to host memory and return them: valid after ``wait`` and until the next call."""
        tensors = [tensor.detach() for tensor in tensors]
        for block in self._blocks:
            block.used = 0
        left, places = sum(_room(tensor) for tensor in tensors), []
        for tensor in tensors:
            places.append(self._place(tensor, left))
            left -= _room(tensor)
        with self._queue.copying():
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
        self._is_copying = True
        return places

    def hold(self) -> None:
        """Make work that is queued afterwards run after the copies: call this before overwriting copied memory."""
        if self._is_copying:
            self._queue.hold()
            self._is_copying = False

    def wait(self) -> None:
        """Wait until the values are in host memory."""
        self._queue.wait()

    def _place(self, tensor: Tensor, left: int) -> Tensor:
        """Return memory for a tensor. ``left``: bytes that still need a place, with this tensor."""
        room = _room(tensor)
        block = next((block for block in self._blocks if len(block.memory) - block.used >= room), None)
        if block is None:
            block = _Block(self._queue.memory(max(room, min(left, BLOCK_BYTES))))
            self._blocks.append(block)
        start, block.used = block.used, block.used + room
        return block.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Content:
    """The data that one rank writes. ``names``: all saved tensors → aliases. ``manifest``: the rank's draft.
    ``arrived``: waits until the pieces have their values.
    """

    pieces: list[WrittenPiece]
    names: dict[str, tuple[str, ...]]
    manifest: Manifest
    arrived: Callable[[], None] = lambda: None


def content_of(
    state: TrainingState, step: int, line: Line, extra: dict[str, JsonValue], staging: Staging | None = None
) -> Content:
    """Return the content of a save. ``staging``: holds copies, so that training can continue; None: no copies."""
    pieces = list(state.written())
    if staging is not None:
        copies = staging.take(piece.values for piece in pieces)
        pieces = [replace(piece, values=copy) for piece, copy in zip(pieces, copies, strict=True)]
    plan, mesh, (updates, rested) = state.plan, state.plan.mesh, state.updates()
    leads, adapters, scale = state.groups.rank == 0, plan.hub.adapters, state.loss_scale
    entry = LossScaleEntry(scale=scale.value, num_good=int(scale.num_good)) if scale.is_dynamic else None
    manifest = draft(
        step=step,
        line=line,
        mesh={axis: mesh.size(axis) for axis in get_args(Axis)},
        order=mesh.order,
        zero=plan.optimizer.zero,
        seed=int(plan.spec.get("seed", 0)),
        optimizer=OptimizerEntry(name=plan.optimizer.name, updates=updates, rested=rested),
        loss_scale=entry,  # None for a constant, which is in the spec
        texts=texts_of(state.weights) if leads else {},
        stored_names=json_of_names(stored_names(plan.hub, state.kept.names)) if leads else {},
        adapters=None if adapters is None else AdaptersEntry(**adapters),
        extra=extra,
    )
    return Content(pieces, state.names(), manifest, staging.wait if staging is not None else lambda: None)


class Saver:
    """The writer of training states. Owns the line that saves continue, the entries of model files (rank 0's count),
    the group over which ranks agree about saves, the host memory of saves in the background, and the running save.

    The saver has its own group, since the thread's exchanges must not mix with those of steps. Its timeout is long: the
    disk of one rank may be slower than another's by more than the engine's timeout.
    """

    def __init__(self, groups: Groups) -> None:
        self.line = Line.new()
        self.model_files: tuple[ModelFile, ...] = ()
        self.staging = Staging.on(groups.device)
        self._engine_groups = groups
        self._groups: Groups | None = None
        self._under_way: Future[None] | None = None

    @property
    def groups(self) -> Groups:
        """The saver's groups; all ranks create them together at the first use."""
        if self._groups is None:
            groups, host = self._engine_groups, None
            if groups.host is not None:
                host = dist.new_group(timeout=PATIENCE, backend="gloo")
                groups.made.append(host)  # pyright: ignore[reportArgumentType]
            self._groups = replace(groups, world=None, host=host, made=[], timeout=PATIENCE)
        return self._groups

    def save(self, state: TrainingState, directory: str | PathLike[str], step: int, extra: Any, *, wait: bool) -> None:
        """Write a save, in the background unless ``wait``. All ranks must call it.

        Raises PlanError on all ranks, also for an error of the previous save.
        """
        self.wait()
        # over the engine's groups: nothing is written yet, so a rank that is late is reported after the usual timeout
        with agreed(self._engine_groups), _refusing(directory):
            content = content_of(state, step, self.line, json_of(extra), None if wait else self.staging)
            content = replace(content, manifest=content.manifest.model_copy(update={"model_files": self.model_files}))
        write = partial(self._write, self.groups, Path(directory).absolute(), content)
        if wait:
            write()
        else:
            self._under_way = in_thread(write, "meshwright-save", outlives=True)

    def went_on_from(self, manifest: Manifest, checksum: str) -> None:
        """Note that the state was loaded from a save: the next saves continue its line."""
        line = manifest.line
        if line.id == NO_LINE:
            line = line.branch(Line.new().id, manifest.step)
        self.line = line.after(checksum)

    def _write(self, groups: Groups, directory: Path, content: Content) -> None:
        if checksum := write_save(groups, directory, content):
            self.line = content.manifest.line.after(checksum)

    def wait(self) -> None:
        """Wait for the running save. Raises its error, once, on every rank."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


def write_save(groups: Groups, directory: Path, content: Content) -> str:
    """Write a save; return the manifest's checksum on rank 0, "" elsewhere. All ranks must call it.

    Raises PlanError on all ranks; the unfinished save is then removed.
    """
    try:
        return _write(groups, directory, content)
    except PlanError:
        groups.barrier()
        raise


def _write(groups: Groups, directory: Path, content: Content) -> str:
    name = checksum = ""
    with ExitStack() as unfinished:
        new = directory
        with agreed(groups), _refusing(directory):
            if groups.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                name = free_name(directory, content.manifest.step, content.manifest.line)
                place = replaced_directory(directory / name, lambda _: True, lambda file: file == MANIFEST)
                new = unfinished.enter_context(place)
        new = directory / broadcast_json(groups, new.name)
        with agreed(groups), _refusing(directory):
            content.arrived()
            record = write_pieces(new, groups.rank, content.pieces, content.manifest.optimizer)
        content.pieces.clear()
        records = gather_json(groups, record, of_kind(Record))
        with agreed(groups), _refusing(directory):
            if groups.rank == 0:
                checksum = write_manifest(new / MANIFEST, completed(content.manifest, content.names.items(), records))
                unfinished.close()  # the new directory gets its name
                write_latest(directory, name)
    return checksum


@contextmanager
def _refusing(directory: str | PathLike[str]) -> Iterator[None]:
    """Raise any failure as a PlanError, which ``agreed`` raises on all ranks: no rank waits for one that failed."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        fix = "free space there or save elsewhere; earlier saves are intact, and training can continue"
        raise PlanError(f"cannot write the checkpoint: {reason}", where=str(directory), fix=fix) from error

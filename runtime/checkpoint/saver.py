"""Save the training state: every rank its own file, then rank 0 the manifest, then the name, then ``latest``.

    step-00000012 is there   ⟺   all ranks have said that their files are on the disk, and the manifest is
    wait=False               values are copied to host memory that is kept, on a GPU beside
                             the next step; a thread writes them, and the ranks' threads agree

An error on one rank is raised on all: the previous save stays, the new one is removed, and training can continue.
torch.distributed.checkpoint is not used: it reads damaged and mixed files without an error, and it pickles.

Host memory for saves in the background is allocated by the first one, and reused by later ones. It is pinned: a copy
into pageable memory holds the host until it is through, so that no step is launched meanwhile. The update that
overwrites copied memory waits for the copies on the device.
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

# A power of two: the allocator of pinned memory rounds up to one. A larger tensor has memory of its own.
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 64  # bytes


class InOrder:
    """The queue of copies for a CPU: they run at once."""

    def memory(self, num_bytes: int) -> Tensor:
        """Of the host, to copy into."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copying(self) -> AbstractContextManager[object]:
        """Inside, copies read values that were computed before."""
        return nullcontext()

    def hold(self) -> None:
        """Work that is queued from here on runs after the copies."""

    def wait(self) -> None:
        """Return when the copies are done."""


class SideStream(InOrder):
    """Of a CUDA device: a stream beside that of the steps, and the event behind its last copy. Owns both."""

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
    """Owns: blocks of host memory, and the queue of copies into them. One save at a time uses it."""

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
        """Begin to copy: the same values in host memory, to be read after ``wait`` and until the next call."""
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
        """Call this before overwriting copied memory: work that is queued afterwards runs after the copies."""
        if self._is_copying:
            self._queue.hold()
            self._is_copying = False

    def wait(self) -> None:
        """Return when the values are in host memory."""
        self._queue.wait()

    def _place(self, tensor: Tensor, left: int) -> Tensor:
        """``left``: bytes that are still to be placed, this tensor's among them."""
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
    """Data that one rank writes. ``names``: of all that is saved, with aliases. ``manifest``: the rank's draft of it.
    ``arrived``: returns when the pieces have their values."""

    pieces: list[WrittenPiece]
    names: dict[str, tuple[str, ...]]
    manifest: Manifest
    arrived: Callable[[], None] = lambda: None


def content_of(
    state: TrainingState, step: int, line: Line, extra: dict[str, JsonValue], staging: Staging | None = None
) -> Content:
    """``staging``: takes copies, so that training can continue."""
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
        loss_scale=entry,  # a number is the spec's
        texts=texts_of(state.weights) if leads else {},
        stored_names=json_of_names(stored_names(plan.hub, state.kept.names)) if leads else {},
        adapters=None if adapters is None else AdaptersEntry(**adapters),
        extra=extra,
    )
    return Content(pieces, state.names(), manifest, staging.wait if staging is not None else lambda: None)


class Saver:
    """Owns: the line that saves continue, the files of the run that they list, the group over which ranks agree about
    saves, the host memory of saves in the background, and the thread of the one that is under way. Only the line and
    the files of rank 0 count.

    The group is one of its own, since the thread's exchanges must not mix with those of the steps; and patient, since
    one rank's disk may be slower than another's by more than the engine's timeout.
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
        """Made at the first use, by all ranks together."""
        if self._groups is None:
            given = self._engine_groups
            host = None
            if given.host is not None:
                host = dist.new_group(timeout=PATIENCE, backend="gloo")
                given.made.append(host)  # pyright: ignore[reportArgumentType]
            self._groups = replace(given, world=None, host=host, made=[], timeout=PATIENCE)
        return self._groups

    def save(self, state: TrainingState, directory: str | PathLike[str], step: int, extra: Any, *, wait: bool) -> None:
        """The same call on every rank. Raises PlanError on all, also for an error of the previous save."""
        self.wait()
        # Without patience: nothing is written yet, and a rank that a callback holds is named in the usual time.
        with agreed(self._engine_groups), _told(directory):
            content = content_of(state, step, self.line, json_of(extra), None if wait else self.staging)
            content = replace(content, manifest=content.manifest.model_copy(update={"model_files": self.model_files}))
        write = partial(self._write, self.groups, Path(directory).absolute(), content)
        if wait:
            write()
        else:
            self._under_way = in_thread(write, "meshwright-save", outlives=True)

    def went_on_from(self, manifest: Manifest, checksum: str) -> None:
        """The state is that of a save, and the next ones continue its line."""
        line = manifest.line
        if line.id == NO_LINE:
            line = line.branch(Line.new().id, manifest.step)
        self.line = line.after(checksum)

    def _write(self, groups: Groups, directory: Path, content: Content) -> None:
        if checksum := write_save(groups, directory, content):
            self.line = content.manifest.line.after(checksum)

    def wait(self) -> None:
        """Return when no save is under way. Raises the error of the last one in the background, once, on every rank."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


def write_save(groups: Groups, directory: Path, content: Content) -> str:
    """Returns the manifest's checksum, on rank 0. Every rank calls it; on a failure all raise PlanError, and the
    unfinished save is removed.
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
        with agreed(groups), _told(directory):
            if groups.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                name = free_name(directory, content.manifest.step, content.manifest.line)
                place = replaced_directory(directory / name, lambda _: True, lambda file: file == MANIFEST)
                new = unfinished.enter_context(place)
        new = directory / broadcast_json(groups, new.name)
        with agreed(groups), _told(directory):
            content.arrived()
            record = write_pieces(new, groups.rank, content.pieces, content.manifest.optimizer)
        content.pieces.clear()
        records = gather_json(groups, record, of_kind(Record))
        with agreed(groups), _told(directory):
            if groups.rank == 0:
                checksum = write_manifest(new / MANIFEST, completed(content.manifest, content.names.items(), records))
                unfinished.close()  # the new directory takes its place
                write_latest(directory, name)
    return checksum


@contextmanager
def _told(directory: str | PathLike[str]) -> Iterator[None]:
    """Any failure is a PlanError, which all ranks hear of: a rank that only raised would leave the others waiting."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        fix = "free space there or save elsewhere; earlier saves are intact, and training can continue"
        raise PlanError(f"cannot write the checkpoint: {reason}", where=str(directory), fix=fix) from error

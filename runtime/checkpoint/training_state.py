"""The training state of one rank: the elements that it writes, and the destinations of those that it reads.

    written   each logical element by one rank, the first of those with equal copies over dp, tp and stages
    read      all elements that this rank owns, in place; ZeRO's all-gather brings the rest

The elements of a parameter that this rank owns are views of its memory, by kind:

    parameter      in the model's precision
    main           in the optimizer's precision, if that is higher
    ema            the running mean of the weights, if the spec has optimizer.ema
    exp_avg, …     the moments of the update rule; there are none before the first update that is not skipped

Padding is not written, and is zero after reading. An engine of any layout can load a save.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from passes.errors import PlanError
from passes.parameters import LocalParameter
from planner.sharding.boxes import Box, Piece, part_of, pieces_of_run
from planner.sharding.buckets import Range
from planner.sharding.buffers import Buffer
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.pieces import PieceReader, WrittenPiece, check_files
from runtime.checkpoint.safetensors_files import listed, require_fit
from runtime.checkpoint.saves import read_step, resolve
from runtime.distributed.agreement import agreed, broadcast_json, halfway, unlike_rank_0
from runtime.distributed.groups import Groups
from runtime.optimizer.scalars import LossScale
from runtime.optimizer.slots import DataParallel
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.weights.initial_weights import buffers_of
from runtime.weights.shards import RankWeights

Reads = Literal["all", "weights", "average"]
AVERAGE = "ema"
_SPREAD_FROM = 1 << 16  # elements: ranks with equal copies share the writing of larger runs
BEGIN_ANEW = (
    "load a save with this optimizer; or begin with the weights alone, and adamw, muon or a class of torch.optim: "
    "meshwright checkpoint DIR --export HF_DIR"
)
OTHER = "load a save of this model with this precision, or export it: meshwright checkpoint DIR --export HF_DIR"


@dataclass(frozen=True, slots=True)
class OwnedRun:
    """Elements ``range`` of this rank's flattened part of a parameter. ``values``: kind → their values, 1-d.

    ``num_equal`` ranks own the same elements; this rank is number ``copy`` of them.
    """

    local: LocalParameter
    range: Range
    values: dict[str, Tensor]
    num_equal: int = 1
    copy: int = 0


@dataclass
class TrainingState:
    """The tensors and counters that an engine saves and restores, by reference.

    ``reads``: "all" of a save; for an engine that only evaluates "weights", or "average", their running mean.
    """

    weights: RankWeights
    optimizer: DistributedOptimizer
    loss_scale: LossScale
    reads: Reads = "all"

    def __post_init__(self) -> None:
        self.plan, self.groups, self.kept = self.weights.plan, self.weights.groups, self.weights.kept

    # ---- out

    def written(self) -> Iterator[WrittenPiece]:
        """Yield the pieces that this rank writes, as views of its memory."""
        for run in self._runs():
            for piece in self._of_run(run, self._written_range(run)):
                if not (piece.is_shared and self.groups.place[run.local.axis]):
                    for kind, values in run.values.items():
                        yield WrittenPiece(run.local.fqn, kind, piece.box, view_of(values, piece))
        for kind, tensors in (("parameter", self.kept.parameters), ("buffer", self.kept.buffers)):
            for name, tensor in tensors.items():
                yield WrittenPiece(name, kind, Box.whole(tensor.shape), tensor)

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return name → aliases of all saved tensors, in the model's order; buffers come last."""
        rows = {row.name: tuple(row.aliases) for row in self.plan.parameters}
        return rows | dict.fromkeys(self.plan.hub.persistent_buffers, ())

    def updates(self) -> tuple[int, dict[str, int]]:
        """Return the number of updates that were not skipped, and the smaller numbers of parameters on this rank, by
        name, that no row chose in some steps.
        """
        most, own = updates_of(self.optimizer)
        return most, {name: updates for name, updates in own.items() if updates != most}

    # ---- in

    def check(self, manifest: Manifest) -> None:
        """Raise PlanError, naming the tensor, unless the save fits the model, the optimizer and ``reads``."""
        if self.reads == "average" and not manifest.has_average:
            fix = "load its weights, or a save of a run with optimizer: {ema: 0.999}"
            raise PlanError("the save has no running mean of the weights", where="optimizer.ema", fix=fix)
        is_whole = self.reads == "all" and not manifest.has_weights_alone
        if is_whole and manifest.optimizer.name != self.plan.optimizer.name:
            raise PlanError(f"the save is of the optimizer {manifest.optimizer.name[:100]}", fix=BEGIN_ANEW)
        saved = {name: entry for name, entry in manifest.tensors.items() if not entry.is_statistic}
        parameters = {name for name, entry in saved.items() if "buffer" not in entry.values}
        known = {row.name: row for row in self.plan.parameters}
        buffers = set(self.plan.hub.persistent_buffers)
        absent_buffers = sorted(buffers - (saved.keys() - parameters))
        if manifest.has_weights_alone:
            absent_buffers = [name for name in absent_buffers if not self.plan.hub.ignores_absent(name)]
        absent = [*(n for n in known if n not in parameters), *absent_buffers]
        extra = [n for n in saved if n not in (known if n in parameters else buffers)]
        wrong = self._misfits(manifest, [name for name in known if name in parameters])
        require_fit("the save is of another model", {"absent": absent, "unexpected": extra}, wrong, fix=OTHER)

    @torch.no_grad()
    def restore(self, manifest: Manifest, reader: PieceReader) -> None:
        """Read all elements that this rank owns. Raises PlanError if a file cannot be read."""
        begin_at(self.optimizer, manifest.optimizer.updates, manifest.optimizer.rested)
        for target, name, kind, box in self._targets():
            if (kind == AVERAGE and not manifest.has_average) or name not in manifest.tensors:
                continue
            if self.reads == "average" and AVERAGE in manifest.tensors[name].values:
                kind = AVERAGE
            elif kind == "main" and manifest.has_weights_alone:
                kind = "parameter"
            reader.read_into(target, name, kind, box)
        if self.optimizer.average is not None and not manifest.has_average:
            self.optimizer.average.start()
        saved, scale = manifest.loss_scale, self.loss_scale
        if saved is not None and scale.tensor is not None and scale.is_dynamic:
            scale.tensor.fill_(saved.scale)
            scale.num_good.fill_(saved.num_good)

    def told_of_average(self, manifest: Manifest) -> str:
        """Return a warning if only one of the save and the spec has a running mean of the weights, else ""."""
        if self.reads != "all":
            return ""
        is_wanted = self.optimizer.average is not None
        if is_wanted and not manifest.has_average:
            return (
                "the save has no running mean of the weights (optimizer.ema): the mean starts from the loaded weights"
            )
        if manifest.has_average and not is_wanted:
            return "the running mean of the weights in the save is not loaded: the spec has no optimizer.ema"
        return ""

    def needed(self, manifest: Manifest) -> set[str]:
        """Return the names of the files with elements that this rank owns."""
        pieces = {name: list(zip(entry.pieces, entry.boxes, strict=True)) for name, entry in manifest.tensors.items()}
        files = set()
        for _, name, kind, box in self._targets():
            if kind in ("parameter", "buffer") and name in pieces:
                files |= {index for (index, *_), other in pieces[name] if other.intersection(box) is not None}
        return {manifest.files[index].name for index in files}

    def _targets(self) -> Iterator[tuple[Tensor, str, str, Box]]:
        """Yield (memory, name, kind, box of the full tensor) of all values that this rank owns."""
        for run in self._runs():
            for piece in self._of_run(run, Range(0, len(run.range))):
                for kind, values in run.values.items():
                    yield view_of(values, piece), run.local.fqn, kind, piece.box
        for name, tensor in self.kept.parameters.items():
            yield tensor, name, "parameter", Box.whole(tensor.shape)
        for name in self.plan.hub.persistent_buffers:
            kept = [self.kept.buffers[name]] if name in self.kept.buffers else []
            for tensor in (*kept, *buffers_of(self.plan, self.weights.program, name)):
                yield tensor, name, "buffer", Box.whole(tensor.shape)

    # ---- the elements of each tensor that this rank owns

    def _runs(self) -> Iterator[OwnedRun]:
        """Yield runs of parameters in buckets, then parameters in no buffer as a whole; each once."""
        yield from owned_runs(self.optimizer)
        for buffer in self.optimizer.buffers.buffers:
            for bucket in buffer.buckets if buffer.planned.is_frozen else ():
                for fqn, owned in bucket.owned.items():
                    local, within = buffer.planned.by_name[fqn], owned.local
                    values = {"parameter": bucket.own_parameters[within.start : within.stop]}
                    yield OwnedRun(local, owned.param, values, *_copies(self.optimizer, bucket.shared_by, local))
        seen = {name for buffer in self.optimizer.buffers.buffers for name in buffer.planned.by_name}
        for stage in self.weights.program.stages:
            for local in stage.parameters:
                if local.fqn not in seen:
                    seen.add(local.fqn)
                    values = stage.parameter(local.fqn).data.view(-1)
                    over = self.groups.mesh.data_axis if local.expert is None else "edp"
                    equal = self.groups.mesh.size(over), self.groups.place[over]
                    yield OwnedRun(local, Range(0, len(values)), {"parameter": values}, *equal)

    def _written_range(self, run: OwnedRun) -> Range:
        """Return the elements of a run that this rank writes: ranks with equal copies write a share each."""
        local, mesh, place = run.local, self.groups.mesh, self.groups.place
        if local.tied_stages and place["pp"] != mesh.pp_rank_of(min(local.tied_stages)):
            return Range(0, 0)
        copies = 1 if local.placement.is_sharded else mesh.size(local.axis)
        index = run.copy * copies + place[local.axis] % copies
        count, size = run.num_equal * copies, len(run.range)
        if count > 1 and size < _SPREAD_FROM:
            return Range(0, 0 if index else size)
        return Range(size * index // count, size * (index + 1) // count)

    def _of_run(self, run: OwnedRun, within: Range) -> Iterator[Piece]:
        """Yield pieces of the elements ``within`` of a run, with positions that count from the begin of the run."""
        local = run.local
        part = part_of(local, self.groups.mesh, self.groups.place)
        start = run.range.start
        for piece in pieces_of_run(part, local.global_shape, local.shape, start + within.start, start + within.stop):
            yield Piece(piece.box, piece.first + within.start, piece.outer, piece.inner, piece.is_shared)

    def _misfits(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Return a line for each shape or dtype that differs from the plan, and each parameter that is trained only in
        the save or only in the plan.
        """
        rows = {row.name: row for row in self.plan.parameters}
        buffers, lines = self.plan.to_run()[1].buffer_of(self.plan.mesh.ep), []
        for name in names:
            entry, row = manifest.tensors[name], rows[name]
            wanted = _kinds(row.dtype, buffers.get(name), manifest)
            if entry.shape != tuple(row.shape):
                lines.append(f"{name} has shape {list(entry.shape)}, the model has {list(row.shape)}")
            elif manifest.has_weights_alone:
                continue  # cast as they are read
            elif entry.values.get("parameter") != row.dtype:
                lines.append(f"{name} is {entry.values.get('parameter')}, the model has {row.dtype}")
            elif self.reads == "all" and entry.values != wanted:
                lines.append(
                    f"{name} was saved with {listed(entry.values, 5)}, and resuming needs {listed(wanted, 5)} "
                    "(it is trained in one, and frozen in the other)"
                )
        return lines


def _kinds(dtype: str, buffer: Buffer | None, manifest: Manifest) -> dict[str, str]:
    """Return kind → dtype of the values that are saved of a parameter; ``buffer`` None: it is not trained."""
    kinds = {"parameter": dtype}
    if buffer is not None:
        of_main = str(buffer.main_dtype).removeprefix("torch.")
        kinds |= {"main": of_main} if of_main != dtype else {}
        kinds |= {AVERAGE: of_main} if manifest.has_average else {}
        kinds |= dict.fromkeys(buffer.moments if manifest.optimizer.updates > 0 else (), of_main)
    return kinds


def view_of(values: Tensor, piece: Piece) -> Tensor:
    whole = values[piece.first : piece.first + piece.outer.num_elements].view(piece.outer.shape)
    return whole[piece.inner.slices_in(piece.outer)]


def load_save(state: TrainingState, groups: Groups, directory: str | PathLike[str]) -> tuple[Manifest, str]:
    """Restore ``state``, and return the manifest and its checksum. All ranks must call it.

    ``groups``: the saver's, which wait for a slow disk. Raises PlanError on every rank, naming the file; then nothing
    was changed, unless it says so.
    """
    directory = Path(directory)
    with agreed(groups):
        save = resolve(directory) if groups.rank == 0 else directory
        name = "" if save == directory else save.name
    name = broadcast_json(groups, name)
    save = directory / name if name else directory
    with agreed(groups):
        manifest, checksum = read_step(save)
        state.check(manifest)
    if odd := unlike_rank_0(groups, checksum):
        what = f"rank {odd[0]} sees another save under this name than rank 0"
        raise PlanError(what, where=str(save), fix="save to and load from a directory that all nodes share")
    with agreed(groups):
        check_files(save, manifest.files[groups.rank :: groups.mesh.world_size])
    with agreed(groups):
        reader = PieceReader(save, manifest, state.needed(manifest))
    with reader, halfway(groups, "the training state is"):
        state.restore(manifest, reader)
    return manifest, checksum


def owned_runs(optimizer: DistributedOptimizer) -> Iterator[OwnedRun]:
    """Yield the runs of all trainable parameters; a tied one once."""
    has_moments = updates_of(optimizer)[0] > 0  # they are zero while every step was skipped
    for index, shard in enumerate(optimizer.shards):
        dp = shard.bucket.shared_by
        locals_ = {slot.local.fqn: slot.local for slot in shard.bucket.slots}
        tensors = {"parameter": shard.bucket.own_parameters} | ({"main": shard.main} if shard.owns_main else {})
        tensors |= {} if optimizer.average is None else {AVERAGE: optimizer.average.of(index)}
        if has_moments and optimizer.optimizer is not None:
            tensors |= optimizer.optimizer.state[shard.main]
        for fqn, owned in shard.bucket.owned.items():
            values = {kind: tensor[owned.local.start : owned.local.stop] for kind, tensor in tensors.items()}
            yield OwnedRun(locals_[fqn], owned.param, values, *_copies(optimizer, dp, locals_[fqn]))


def _copies(optimizer: DistributedOptimizer, shared_by: DataParallel, local: LocalParameter) -> tuple[int, int]:
    """Return how many ranks own the same elements, and the number of this rank among them."""
    within, here = shared_by.size // shared_by.num_shards, 0 if shared_by.sharded else shared_by.rank
    copy, copies = optimizer.copy_of_shards if local.expert is None else (0, 1)
    return within * copies, copy * within + here


def updates_of(optimizer: DistributedOptimizer) -> tuple[int, dict[str, int]]:
    """Return the number of updates that were not skipped (0 on a rank without trainable parameters), and the numbers of
    parameters on this rank that may rest.
    """
    return optimizer.optimizer.updates() if optimizer.optimizer is not None else (0, {})


def begin_at(optimizer: DistributedOptimizer, updates: int, updates_of: Mapping[str, int]) -> None:
    """Create zero moments and set the numbers of updates, before moments are read from a checkpoint."""
    if optimizer.optimizer is not None:
        optimizer.optimizer.begin(updates, updates_of)

"""The weights of an engine: gathered, loaded, saved, merged with adapters, replaced by their mean for a while."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from passes.base import RankProgram
from passes.errors import PlanError
from planner.capture.model.meta_init import give_back_freed
from planner.frozen_plan import Plan
from planner.sharding.shards import Shards
from runtime.checkpoint.adapters import adapted_in, load_adapters, save_adapters
from runtime.checkpoint.hub_tensors import MAX_SHARD_BYTES, names_in
from runtime.checkpoint.merged import save_hub
from runtime.checkpoint.pretrained_load import load_pretrained
from runtime.checkpoint.saver import Saver
from runtime.checkpoint.training_state import Reads, TrainingState, load_save
from runtime.distributed.agreement import broadcast_json
from runtime.distributed.faults.faults import shared_call
from runtime.distributed.groups import Groups
from runtime.engine.build import Mode, need_training, parameters_of
from runtime.optimizer.scalars import LossScale
from runtime.optimizer.whole_weights import Opened
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.weights.initial_weights import Fresh
from runtime.weights.shards import Kept, OwnParameters, by_all_names, collect, initialise
from runtime.weights.sources import ModelWeights, RecordedWeights


class EngineWeights:
    """What an Engine does with its weights beside training them. The Engine owns all that is named here."""

    plan: Plan
    mode: Mode
    program: RankProgram
    groups: Groups
    optimizer: DistributedOptimizer
    loss_scale: LossScale
    saver: Saver
    step_index: int
    _shards: Shards
    _weights: ModelWeights
    _kept: Kept
    _fresh: Fresh
    _gradients_ready: bool
    _is_averaged: bool
    _is_exchange_due: bool

    @shared_call("gather")
    def gather_parameters(self) -> dict[str, Tensor]:
        """Full parameters on rank 0 (CPU) under every name that the user's model has for them; ``{}`` elsewhere."""
        self._ready()
        unused = broadcast_json(self.groups, [*self._kept.parameters])
        dtypes = {row.name: getattr(torch, row.dtype) for row in self.plan.parameters if row.name not in unused}
        with self._own() as own:
            found = collect(self.plan.parameters, own, dtypes, self.groups)
        return by_all_names(self.plan.parameters, {**found, **self._kept.parameters})

    @shared_call("gather")
    def gather_gradients(self) -> dict[str, Tensor]:
        """Full gradients on rank 0 (CPU), before clipping, of every trainable parameter; ``{}`` elsewhere.

        After ``forward_backward`` and before ``optimizer_step``. Raises PlanError at other times.
        """
        need_training(self.mode, "gather_gradients")
        if not self._gradients_ready:
            raise PlanError(
                "there are no gradients: an update has consumed them, or no backward ran",
                fix="call it between forward_backward(batch) and optimizer_step()",
            )
        gradients = self.optimizer.gather_gradients(grad_scale=self.loss_scale.value)
        dtypes = {n: b.main_dtype for n, b in self._shards.buffer_of(self.groups.mesh.ep).items()}
        found = collect(self.plan.parameters, gradients, dtypes, self.groups)
        return by_all_names(self.plan.parameters, found)

    @shared_call("load")
    def load_pretrained(self, directory: str | PathLike[str]) -> None:
        """Take the weights of a Hugging Face directory (config.json and safetensors, one file or an index of several).

        Each rank reads only its slices. The same call on every rank, before the first step: the optimizer's moments and
        the count of steps stay as they are. If peft has wrapped the model, the directory is its base's, and adapters
        keep their values. Raises PlanError on every rank, naming file and tensor; then no weight has changed.
        """
        self._need_own_weights("load_pretrained")
        self.optimizer.wait_parameters()
        self.saver.staging.hold()
        with self._opened(writes=True) as opened:

            def rest(found: frozenset[str], read: Callable[[str], Tensor]) -> None:
                opened.close()
                self._take_rest(found, read)

            load_pretrained(self.plan, self.program.stages, self.groups, self._kept, directory, rest, opened)
        self._gradients_ready = False
        self.optimizer.sync_main_from_parameters()

    @shared_call("save")
    def save_pretrained(
        self, directory: str | PathLike[str], *, max_shard_bytes: int = MAX_SHARD_BYTES, names: str = "hf"
    ) -> None:
        """Write config.json and safetensors that ``transformers`` loads; other files of the directory stay.

        ``names``: "hf", the tensors and names of the directory that was loaded, else those of transformers' own
        ``save_pretrained``; "model", those of the model.

        The same call on every rank; rank 0 writes, one tensor at a time. An existing directory is replaced entirely,
        so a run that is killed leaves the old one or the new. Raises PlanError on every rank.
        """
        self._save_hub(directory, max_shard_bytes=max_shard_bytes, names=names, merged=False)

    @shared_call("save")
    def save(
        self, directory: str | PathLike[str], wait: bool = True, *, extra: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Write the training state to ``directory``/step-…, then its name to ``directory``/latest.

        The same call on every rank, between steps; each writes its own shards. ``extra``: values that ``load`` returns,
        as JSON, from rank 0. ``wait=False``: the state is copied to host memory, which is kept for the next save;
        on a GPU the next update waits for the copies, and the host does not. A thread writes them; a later save waits
        for it, and raises its error. Raises PlanError on every rank; earlier saves stay.
        """
        need_training(self.mode, "save")
        self._need_own_weights("save")
        self._ready()
        self.saver.save(self._training_state(), directory, self.step_index, extra, wait=wait)

    @shared_call("save")
    def wait_saves(self) -> None:
        """Return when no save is under way. Raises PlanError on every rank if the last one failed."""
        self.saver.wait()

    @shared_call("load")
    def load(self, directory: str | PathLike[str], *, averaged: bool = False) -> dict[str, JsonValue]:
        """Take the training state of a save, or of the last one in a directory of saves; returns its ``extra``.

        The same call on every rank; the save may be of any layout. The next steps are those that would have followed
        it under the same spec. Raises PlanError on every rank, naming the file; then nothing has changed, unless it
        says so.

        If the save has no running mean of the weights and the spec asks for one, it begins with the loaded weights:
        a warning on rank 0 says so. An engine with mode "evaluate" takes the weights alone, of a save with any
        optimizer; ``averaged``: the save's running mean of them (``optimizer.ema``).
        """
        self._need_own_weights("load")
        if averaged and self.mode == "train":
            fix = "load the save, and evaluate inside averaged_weights()"
            raise PlanError("load(averaged=True) would leave the mean as the weights to train", where="load", fix=fix)
        self.saver.wait()
        self.optimizer.wait_parameters()
        state = self._training_state("all" if self.mode == "train" else "average" if averaged else "weights")
        manifest, checksum = load_save(state, self.saver.groups, directory)
        self.saver.went_on_from(manifest, checksum)
        self.optimizer.buffers.weights.drop()
        self.optimizer.buffers.start_parameter_gather()
        self.step_index = manifest.step
        self._kept.names.clear()
        self._kept.names.update(names_in(manifest))
        self._fresh = []
        self._gradients_ready = False
        if self.groups.rank == 0 and (told := state.told_of_average(manifest)):
            warnings.warn(told, stacklevel=3)
        return manifest.extra

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the weights are their running mean (``optimizer.ema``, or that of a schedule-free rule), to evaluate,
        score, gather or ``save_pretrained``; training, saving and loading are refused inside. Afterwards they are
        bitwise as before.

        The same call on every rank. Raises PlanError if the spec has neither.
        """
        need_training(self.mode, "averaged_weights")
        if self.optimizer.average is None:
            fix = "set optimizer: {ema: 0.999}"
            raise PlanError("the spec has no running mean of the weights", where="optimizer.ema", fix=fix)
        self._need_own_weights("averaged_weights")
        self._exchange_average()
        self._is_averaged = True
        try:
            yield
        except BaseException:  # of this rank alone, perhaps: the next call of all changes them back
            self._is_exchange_due = True
            raise
        else:
            self._exchange_average()
        finally:
            self._is_averaged = False

    # ---- adapters of a model that the package peft has wrapped

    @shared_call("save")
    def save_adapters(self, directory: str | PathLike[str]) -> None:
        """Write peft's own files: ``adapter_model.safetensors`` and ``adapter_config.json``, as peft's
        ``save_pretrained`` in one process writes them. Adapters other than ``default`` have subdirectories.

        The same call on every rank; rank 0 writes. Each adapter is replaced atomically. Raises PlanError on every rank.
        """
        adapted_in(self.plan.hub)
        self._ready()
        with self._own() as own:
            save_adapters(self.plan, own, self.groups, self._kept, directory)

    @shared_call("load")
    def load_adapters(self, directory: str | PathLike[str]) -> None:
        """Take the adapters that ``save_adapters`` or peft wrote. Each rank reads only its slices.

        The same call on every rank, before the first step: the optimizer's moments and the count of steps stay as they
        are. Raises PlanError on every rank, for adapters of another base or another config too; then no weight has
        changed.
        """
        adapted_in(self.plan.hub)
        self._need_own_weights("load_adapters")
        self._ready()
        self.saver.staging.hold()
        with self._opened(writes=True) as opened:
            load_adapters(self.plan, self.program.stages, self.groups, self._kept, directory, opened)
        self._gradients_ready = False
        self.optimizer.sync_main_from_parameters()

    @shared_call("save")
    def save_merged(
        self, directory: str | PathLike[str], *, max_shard_bytes: int = MAX_SHARD_BYTES, names: str = "hf"
    ) -> None:
        """Write the base with its active adapters merged into it, as a directory that ``transformers`` loads.

        ``names``: as of ``save_pretrained``.

        The same call on every rank; rank 0 merges and writes one tensor at a time. Atomic, as ``save_pretrained``.
        Raises PlanError on every rank, also for a method that cannot be merged.
        """
        adapted_in(self.plan.hub)
        self._save_hub(directory, max_shard_bytes=max_shard_bytes, names=names, merged=True)

    def _save_hub(self, directory: str | PathLike[str], **options: Any) -> None:
        self._ready()
        with self._own() as own:
            save_hub(self.plan, own, self.groups, self._kept, directory, **options)

    # ---- before they are read or replaced

    @shared_call("averaged weights")
    def _exchange_average(self) -> None:
        self._ready()
        self._gradients_ready = False
        self.optimizer.exchange_average()

    def _need_own_weights(self, name: str) -> None:
        self._settle_exchange()
        if self._is_averaged:
            raise PlanError(
                f"{name} inside averaged_weights: the weights are replaced by their running mean",
                where="averaged_weights",
                fix=f"leave the `with` before you call {name}",
            )

    def _settle_exchange(self) -> None:
        """Restore the weights if an error ended ``averaged_weights``."""
        if self._is_exchange_due:
            self._is_exchange_due = False
            self._exchange_average()

    def _ready(self) -> None:
        """Make the parameters ready to read: updated by all ranks, and initialised if nothing was loaded."""
        self._settle_exchange()
        self.optimizer.wait_parameters()
        self._initialise()

    def _initialise(self) -> None:
        if self._fresh:
            source = self._weights
            if isinstance(source, RecordedWeights) and any(source.waits_for_base(p.fqn) for _, p in self._fresh):
                fix = "call load_pretrained(DIR) with its directory"
                raise PlanError("the weights of the base were not read", where="MODEL", fix=fix)
            with self._opened(writes=True) as opened:
                initialise(self._fresh, self._weights, self.groups.mesh, self.groups.place, opened)
            self._fresh = []
            give_back_freed()  # full parameters, of which shards were taken
            self.optimizer.sync_main_from_parameters()

    def _take_rest(self, found: frozenset[str], read: Callable[[str], Tensor]) -> None:
        """Initial values for the parameters that files of a base do not hold, and for those that peft made of it."""
        source = self._weights
        if not isinstance(source, RecordedWeights):
            self._fresh = [held for held in self._fresh if held[1].fqn not in found]
            return
        self._fresh = [
            held
            for held in self._fresh
            if (fqn := held[1].fqn) not in found or (source.waits_for_base(fqn) and not source.is_of_base(fqn))
        ]
        with source.recorded.reading(read):
            self._initialise()

    def _training_state(self, reads: Reads = "all") -> TrainingState:
        return TrainingState(self.plan, self.program, self.optimizer, self.groups, self._kept, self.loss_scale, reads)

    def _opened(self, *, writes: bool = False) -> AbstractContextManager[Opened]:
        """A call with the name of a parameter brings its weights here, if ranks hold shards of them; ``writes``: they
        may be replaced. The same calls on all ranks."""
        unit_of = self._shards.bucket_of(self.groups.place)
        return self.optimizer.buffers.weights.one_by_one(unit_of, writes=writes)

    @contextmanager
    def _own(self) -> Iterator[Mapping[str, Tensor]]:
        """This rank's parts of parameters; of a tied weight's copies any, they are equal."""
        with self._opened() as opened:
            yield OwnParameters({p.fqn: parameter.data for p, parameter in parameters_of(self.program)}, opened)

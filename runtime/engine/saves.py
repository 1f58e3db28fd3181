"""Saves and loads of an engine: its training state, and its weights as directories of the Hub."""

import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

from pydantic import JsonValue

from passes.errors import PlanError
from runtime.checkpoint.adapters import adapted_in, save_adapters
from runtime.checkpoint.hub_tensors import MAX_SHARD_BYTES, names_in
from runtime.checkpoint.merged import save_hub
from runtime.checkpoint.saver import Saver
from runtime.checkpoint.training_state import Reads, TrainingState, load_save
from runtime.distributed.faults.faults import shared_call
from runtime.engine.build import Running, need_training
from runtime.engine.weights import EngineWeights


class EngineSaves:
    """The saves of an engine. Owns the saver of the training state."""

    def __init__(self, running: Running, weights: EngineWeights) -> None:
        self.running, self._weights = running, weights
        self.saver = Saver(running.groups)
        running.optimizer.before_overwriting = self.saver.staging.hold

    @shared_call("save")
    def save(
        self, directory: str | PathLike[str], wait: bool = True, *, extra: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Write the training state to ``directory``/step-…, then its name to ``directory``/latest.

        Call it on all ranks, between steps; each writes its own shards. ``extra``: JSON values of rank 0 that ``load``
        returns. ``wait=False``: copy the state to host memory, which is kept for the next save, and write it in a
        thread; on a GPU the next update waits for the copies, the host does not. A later save waits for the thread, and
        raises its error. Raises PlanError on every rank; earlier saves stay.
        """
        need_training(self.running.mode, "save")
        self._weights.need_own("save")
        self._weights.ready()
        self.saver.save(self.training_state(), directory, self.running.step_index, extra, wait=wait)

    @shared_call("save")
    def wait_saves(self) -> None:
        """Wait for the running save. Raises PlanError on every rank if it failed."""
        self.saver.wait()

    @shared_call("load")
    def load(self, directory: str | PathLike[str], *, averaged: bool = False) -> dict[str, JsonValue]:
        """Load the training state of a save, or of the last one in a directory of saves; return its ``extra``.

        Call it on all ranks; the save may be of any layout. The next steps are those that would have followed it under
        the same spec. Raises PlanError on every rank, naming the file; then nothing has changed, unless it says so.

        If the spec has a running mean of the weights and the save has none, the mean starts from the loaded weights,
        with a warning on rank 0. An engine with mode "evaluate" loads the weights alone, of a save with any optimizer;
        ``averaged``: the save's running mean of them (``optimizer.ema``).
        """
        running = self.running
        self._weights.need_own("load")
        if averaged and running.mode == "train":
            fix = "load the save, and evaluate inside averaged_weights()"
            raise PlanError("load(averaged=True) would leave the mean as the weights to train", where="load", fix=fix)
        self.saver.wait()
        running.optimizer.wait_parameters()
        state = self.training_state("all" if running.mode == "train" else "average" if averaged else "weights")
        manifest, checksum = load_save(state, self.saver.groups, directory)
        self.saver.went_on_from(manifest, checksum)
        running.optimizer.buffers.weights.drop()
        running.optimizer.buffers.start_parameter_gather()
        running.step_index = manifest.step
        running.weights.kept.names.clear()
        running.weights.kept.names.update(names_in(manifest))
        self._weights.loaded()
        running.gradients_ready = False
        if running.groups.rank == 0 and (told := state.told_of_average(manifest)):
            warnings.warn(told, stacklevel=4)
        return manifest.extra

    @shared_call("save")
    def save_pretrained(
        self, directory: str | PathLike[str], *, max_shard_bytes: int = MAX_SHARD_BYTES, names: str = "hf"
    ) -> None:
        """Write config.json and safetensors that ``transformers`` loads; other files of the directory stay.

        ``names``: "hf", the tensors and names of the directory that was loaded, else those of transformers' own
        ``save_pretrained``; "model", those of the model.

        Call it on all ranks; rank 0 writes, one tensor at a time. An existing directory is replaced atomically: a
        killed run leaves the old one or the new one. Raises PlanError on every rank.
        """
        self._save_hub(directory, max_shard_bytes=max_shard_bytes, names=names, merged=False)

    @shared_call("save")
    def save_merged(
        self, directory: str | PathLike[str], *, max_shard_bytes: int = MAX_SHARD_BYTES, names: str = "hf"
    ) -> None:
        """Write the base with its active adapters merged into it, as a directory that ``transformers`` loads.

        Otherwise as ``save_pretrained``; PlanError also for a method that cannot be merged.
        """
        adapted_in(self.running.plan.hub)
        self._save_hub(directory, max_shard_bytes=max_shard_bytes, names=names, merged=True)

    @shared_call("save")
    def save_adapters(self, directory: str | PathLike[str]) -> None:
        """Write peft's own files: ``adapter_model.safetensors`` and ``adapter_config.json``, as peft's
        ``save_pretrained`` in one process writes them. Adapters other than ``default`` have subdirectories.

        Call it on all ranks; rank 0 writes. Each adapter is replaced atomically. Raises PlanError on every rank.
        """
        adapted_in(self.running.plan.hub)
        with self._weights.own() as own:
            save_adapters(self.running.weights, own, directory)

    def training_state(self, reads: Reads = "all") -> TrainingState:
        running = self.running
        return TrainingState(running.weights, running.optimizer, running.loss_scale, reads)

    def _save_hub(self, directory: str | PathLike[str], **options: Any) -> None:
        with self._weights.own() as own:
            save_hub(self.running.weights, own, directory, **options)

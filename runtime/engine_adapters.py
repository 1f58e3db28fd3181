"""The adapters of a model that the package peft has wrapped: saved, loaded, and merged into the base."""

from __future__ import annotations

from os import PathLike

from runtime.checkpoint.adapters_load import load_adapters
from runtime.checkpoint.adapters_save import adapted_of, save_adapters
from runtime.checkpoint.entries import MAX_SHARD_BYTES
from runtime.checkpoint.merged_save import save_merged
from runtime.distributed.faults.shared_call import shared_call
from runtime.engine_weights import EngineWeights


class EngineAdapters(EngineWeights):
    """What an Engine does with the adapters of its model. The Engine owns all that is named here."""

    @shared_call("save")
    def save_adapters(self, directory: str | PathLike[str]) -> None:
        """Write peft's own files: ``adapter_model.safetensors`` and ``adapter_config.json``, as peft's
        ``save_pretrained`` in one process writes them. Adapters other than ``default`` have subdirectories.

        The same call on every rank; rank 0 writes. Each adapter is replaced atomically. Raises PlanError on every rank.
        """
        adapted_of(self.plan)
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
        adapted_of(self.plan)
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
        adapted_of(self.plan)
        self._ready()
        with self._own() as own:
            save_merged(self.plan, own, self.groups, self._kept, directory, max_shard_bytes, names)

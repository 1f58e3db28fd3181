"""Load a save into an engine of any layout: check everything on all ranks, then read the shards of each rank.

    manifest      every rank: sound, of this model, the same on all
    files         each is read by one rank, evenly over the ranks, and its checksum compared
    values        every rank: the boxes that it owns, straight into place

The engine does not change before the last step.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from passes.errors import PlanError
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.pieces import PieceReader, check_files
from runtime.checkpoint.saves import read_step, resolve
from runtime.checkpoint.training_state import TrainingState
from runtime.distributed.agreement import agree, agreed
from runtime.distributed.exchange_json import all_gather_json, broadcast_json
from runtime.distributed.groups import Groups


def load_save(state: TrainingState, groups: Groups, directory: str | PathLike[str]) -> tuple[Manifest, str]:
    """The manifest and its checksum. The same call on every rank. ``groups``: the saver's, which wait for a slow disk.

    Raises PlanError on every rank, naming the file; then nothing was changed, unless it says so.
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
    _require_same(groups, checksum, save)
    with agreed(groups):
        check_files(save, manifest.files[groups.rank :: groups.mesh.world_size])
    with agreed(groups):
        reader = PieceReader(save, manifest, state.needed(manifest))
    with reader:
        try:
            state.restore(manifest, reader)
            error = None
        except (PlanError, OSError) as failed:  # a file that changed since it was checked, or a disk that fails
            what = failed.what if isinstance(failed, PlanError) else str(failed)
            error = PlanError(
                f"loading failed halfway, and the training state is incomplete: {what}", fix="load it again"
            )
        agree(groups, error)
    return manifest, checksum


def _require_same(groups: Groups, checksum: str, save: Path) -> None:
    seen = all_gather_json(groups, checksum)
    odd = [rank for rank, told in enumerate(seen) if told != seen[0]]
    if odd:
        raise PlanError(
            f"rank {odd[0]} sees another save under this name than rank 0",
            where=str(save),
            fix="save to and load from a directory that all nodes share",
        )

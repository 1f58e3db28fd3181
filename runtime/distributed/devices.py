"""Reads the rank, the world size and the device of this process from the environment.

    requested        this process      the launcher says               device
    cpu              any               anything                        cpu
    cuda:i           sees GPU i        anything                        cuda:i
    cuda, nothing    sees no GPU       anything                        an error, cpu
    cuda, nothing    sees one GPU      anything                        cuda:0   (two ranks on one GPU: see ``meeting``)
    cuda, nothing    sees several      local rank r, and GPU r is here cuda:r
    cuda, nothing    sees several      local rank r, more local ranks than GPUs    an error, never silently the CPU
    cuda, nothing    sees several      no local rank                   an error; a rank alone: cuda:0

All functions are pure: they get the environment and the number of GPUs as arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from passes.errors import PlanError

# torchrun's names take precedence over those of the process manager. Slurm's are those of the step, which only srun
# sets: a batch script also has SLURM_NTASKS, though it is one process.
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_NRANKS", "FLUX_JOB_SIZE")
LOCAL_RANK = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    *("PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID"),
)
LOCAL_WORLD_SIZE = (
    *("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    *("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
)
ON_THE_CPU = 'use the CPU on every rank: Engine(plan, device="cpu"), or CUDA_VISIBLE_DEVICES=""'
OWN_DEVICE = 'name the device: Engine(plan, device=f"cuda:{index}")'


@dataclass(frozen=True, slots=True)
class Launched:
    """The launcher's environment; None for absent variables."""

    rank: int | None = None
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None


def launched(environment: Mapping[str, str], joined: tuple[int, int] | None = None) -> Launched:
    """Return rank and sizes from torchrun, srun or mpirun; a process without a launcher is a single rank.

    ``joined``: rank and world size of an existing process group. Raises PlanError if the environment has a rank without
    a world size. (``known_rank`` checks the rank later: a wrong world is reported before an absent rank.)
    """
    slurm = "SLURM_STEP_NUM_TASKS" in environment
    local_rank, _ = _number(environment, (*LOCAL_RANK, "SLURM_LOCALID") if slurm else LOCAL_RANK)
    local_world_size, _ = _number(environment, LOCAL_WORLD_SIZE)
    if joined is not None:
        return Launched(*joined, local_rank, local_world_size)
    world_size, _ = _number(environment, (*WORLD_SIZE, "SLURM_STEP_NUM_TASKS"))
    rank, name = _number(environment, (*RANK, "SLURM_PROCID") if slurm else RANK)
    if rank is not None and world_size is None:
        raise PlanError(f"the environment sets {name} but not WORLD_SIZE", where="WORLD_SIZE", fix=_START)
    return Launched(rank, world_size or 1, local_rank, local_world_size)


def known_rank(place: Launched) -> int:
    """Return the rank of this process. Raises PlanError if several ranks run and its rank is unknown or invalid."""
    if place.rank is None and place.world_size > 1:
        raise PlanError("the environment sets WORLD_SIZE but not RANK", where="RANK", fix=_START)
    rank = place.rank or 0
    if not 0 <= rank < place.world_size:
        raise PlanError(f"rank {rank} is not one of {place.world_size} ranks", where="RANK", fix="count ranks from 0")
    return rank


_START = "start the ranks with torchrun, srun or mpirun, or set RANK and WORLD_SIZE on each"


def choose_device(
    requested: torch.device | str | None, place: Launched, *, cuda_available: bool, device_count: int
) -> torch.device:
    """Return this rank's device by the table above. Raises PlanError."""
    try:
        wanted = None if requested is None else torch.device(requested)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"no device {requested!r}", where="device", fix='give "cuda", "cuda:0" or "cpu"') from error
    if wanted is not None and wanted.type != "cuda":
        return wanted
    num_gpus = device_count if cuda_available else 0
    if wanted is not None and num_gpus == 0:
        raise PlanError(f'the device "{wanted}" was requested, but this process sees no GPU', where="device", fix=_SEE)
    if num_gpus == 0:
        return torch.device("cpu")
    if wanted is None or wanted.index is None:
        return torch.device("cuda", _own_index(place, num_gpus))
    if wanted.index >= num_gpus:
        raise PlanError(
            f'the device "{wanted}" was requested, but this process sees {_gpus(num_gpus)}', where="device", fix=_SEE
        )
    return wanted


_SEE = f"check CUDA_VISIBLE_DEVICES and the driver, or {ON_THE_CPU}"


def _own_index(place: Launched, num_gpus: int) -> int:
    if num_gpus == 1:  # if all ranks see the same one, the rendezvous detects it
        return 0
    if place.local_rank is None:
        if place.world_size == 1:
            return 0
        what = f"it is not known which of the {num_gpus} GPUs belongs to this rank: LOCAL_RANK is not set"
        fix = f"start the ranks with torchrun, set LOCAL_RANK, show each rank only one GPU, or {OWN_DEVICE}"
        raise PlanError(what, where="LOCAL_RANK", fix=fix)
    if max(place.local_rank + 1, place.local_world_size or 0) > num_gpus:
        ranks = f"{place.local_world_size} ranks" if place.local_world_size else f"a local rank {place.local_rank}"
        raise PlanError(
            f"this host runs {ranks}, but a rank sees {_gpus(num_gpus)}",
            where="LOCAL_WORLD_SIZE" if place.local_world_size else "LOCAL_RANK",
            fix="launch one rank per GPU (torchrun --nproc-per-node); if each rank sees its own GPUs, "
            f"{OWN_DEVICE}; or {ON_THE_CPU}",
        )
    return place.local_rank


def _gpus(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"


def _number(environment: Mapping[str, str], names: Sequence[str]) -> tuple[int | None, str]:
    """Return the number in the first of ``names`` that is set, and that name. Raises PlanError for another value."""
    name = next((name for name in names if environment.get(name, "").strip()), None)
    if name is None:
        return None, ""
    try:
        return int(environment[name]), name
    except ValueError:
        raise PlanError(f"{name} is {environment[name]!r}", where=name, fix="set it to a whole number") from None

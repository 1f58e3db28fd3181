"""One process plans for all ranks of its host, which load its plan instead of capturing and planning again.

    the launcher, or under torchrun the first rank of a host     plans, and writes the plan to a private directory
    each other rank                                              builds the model for its values, and reads the plan

The directory has mode 0700 and exists during the launch. If the plan cannot be saved (its graph calls a function of the
user's own, for example), each rank plans by itself, and one line says why.
"""

import multiprocessing.util
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn
from torch.distributed import Store

from passes.errors import PlanError
from planner.capture.model.hub_format import hub_format
from planner.capture.own_loss import loss_function
from planner.frozen_plan import Plan
from planner.saved_plan.model import difference
from planner.saved_plan.plan_file import SUFFIX
from planner.spec.spec import Spec
from runtime.distributed.default_group import faults_board, next_store
from runtime.distributed.devices import known_rank, launched
from runtime.distributed.faults.board import Signer
from runtime.distributed.meeting import came
from runtime.distributed.this_host import stay_on_one_host

NONE = ""  # no file: each rank plans by itself
TIMEOUT_SECONDS = 600.0
_SAME = "build the same model in every process: from the spec's seed, without regard to the rank"


@dataclass
class Planned:
    """A plan and its model (None for a saved plan). ``directory``: of the file that ranks of this host read."""

    plan: Plan
    model: nn.Module | None
    directory: TemporaryDirectory[str] | None = None

    def forget_file(self) -> None:
        """Remove the file, once all ranks have read it."""
        if self.directory is not None:
            self.directory.cleanup()


@contextmanager
def shared(plan: Plan, *, is_saved: bool = False) -> Iterator[str]:
    """Yield the file of ``plan`` for ranks that are started inside, or NONE. ``is_saved``: ranks have another file."""
    if is_saved:
        yield NONE
        return
    # in the directory of the fork server, which orphaned ranks remove too
    with TemporaryDirectory(dir=multiprocessing.util.get_temp_dir()) as directory:
        file = _written(plan, directory)
        del plan  # and the model with its weights
        yield file


def _written(plan: Plan, directory: str) -> str:
    file = os.path.join(directory, f"plan{SUFFIX}")
    try:
        plan.save(file)
    except PlanError as error:
        print(f"each rank captures the model by itself: {error.what}", file=sys.stderr, flush=True)
        return NONE
    return file


def read_shared(file: str, model: nn.Module, spec: Spec) -> Plan:
    """Load the plan of ``file`` for ``model``, built on this rank. Raises PlanError if another model was planned."""
    loss_function(spec.loss)  # its file may register ops
    loaded = Plan.load(file, own_functions=True)
    hub = hub_format(model)
    for each in loaded.of_all_lengths:
        assert each.owner is not None
        assert each.model is not None
        if (other := difference(each.model, model)) is not None:
            raise PlanError(f"the model of this rank differs from the planned one: {other}", fix=_SAME)
        each.owner.take(model, hub)
    return loaded


def planned(model: nn.Module, spec: Spec, file: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> Planned:
    """Return the plan of ``model``, from the launcher's ``file``, or made by this rank (NONE).

    ``file`` None: there is no launcher of ours. Then the first rank of each host plans for the others, and its result
    has the directory of the file, to remove when all ranks have read it.
    """
    if file:
        return Planned(read_shared(file, model, spec), model)
    place = launched(os.environ)
    if file == NONE or place.world_size == 1 or place.local_rank is None or place.local_world_size == 1:
        return Planned(_planned_here(model, spec), model)
    stay_on_one_host()
    timeout = timedelta(seconds=timeout_seconds)
    store = next_store(known_rank(place), place.world_size, timeout)
    if place.local_rank == 0:
        return _lead(store, model, spec)
    file = _file_of_first_rank(store, timeout)
    return Planned(_planned_here(model, spec) if file is None else read_shared(file, model, spec), model)


def _planned_here(model: nn.Module, spec: Spec) -> Plan:
    # imported late: a rank that loads a plan starts in half the time without the planner and torch.export
    from planner.api import plan

    return plan(model, spec)


def _lead(store: Store, model: nn.Module, spec: Spec) -> Planned:
    directory, file, key = TemporaryDirectory(), NONE, _key()
    try:
        made = _planned_here(model, spec)
        file = _written(made, directory.name)
    finally:  # the other ranks of this host wait; after an error each plans too, and raises the same
        store.set(key, Signer.of(os.environ).signed(key, file))
    return Planned(made, model, directory)


def _file_of_first_rank(store: Store, timeout: timedelta) -> str | None:
    """Return the file of this host's first rank; None without one that this process can read.

    Raises the error of a rank that has failed.
    """
    key = _key()
    if not came(store, [key], timeout, faults_board()):  # timeout, or the host of the store has ended
        return None
    stored = store.get(key)
    file = Path(Signer.of(os.environ).checked(key, stored, "the file of the plan"))
    return str(file) if _is_own(file.parent, stat.S_ISDIR) and _is_own(file, stat.S_ISREG) else None


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether no other user can have written ``path``."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _key() -> str:
    return f"plan/{socket.gethostname()}"


def num_ranks_of(plan: Plan, spec: Spec, asked: int | None) -> int:
    """Return the world size of the plan. Raises PlanError if ``asked`` (--nproc) is another number."""
    world_size = plan.mesh.world_size
    if asked not in (None, world_size):
        what = f"--nproc {asked}, but the mesh needs {world_size} processes"
        raise PlanError(what, where=spec.location("mesh"), fix=f"use --nproc {world_size}, or change the mesh")
    return world_size

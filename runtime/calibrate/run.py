"""The command ``calibrate``: start the ranks, measure on all of them at once, and fit the values of a cluster file."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from passes.errors import PlanError
from runtime.calibrate.cluster_file import cluster_text
from runtime.calibrate.computing import attention, moved, products, small
from runtime.calibrate.exchanging import exchanges, measured_mesh, overlap, product
from runtime.calibrate.fit import cluster_of
from runtime.calibrate.found import Found, Machine, Timed
from runtime.calibrate.reserving import reserved_share
from runtime.calibrate.timing import Clock
from runtime.distributed.groups import Groups
from runtime.distributed.launch import launch
from runtime.distributed.opening import open_groups

SECONDS = 12.0
MOST_SECONDS, MOST_RANKS = 3600.0, 1024
_PASSES = 3  # over all measurements, some seconds apart: a burst of other programs slows one pass only
_MEASUREMENTS = 80  # about; each takes its share of the seconds
_START_SECONDS = 90.0  # for the rendezvous of the ranks, and for one slow call that takes more than its share


def calibrate(nproc: int | None = None, seconds: float = SECONDS, name: str = "this-machine") -> str:
    """The text of a cluster file for this machine. Raises PlanError for bad input, RunError if a rank fails."""
    size = nproc if nproc is not None else _own_number_of_ranks()
    _check(size, seconds)
    print(f"measuring on {size} ranks at once, about {seconds:g} s", file=sys.stderr, flush=True)
    limit = _START_SECONDS + 4 * seconds
    found = launch(measure_rank, size, seconds, limit, timeout_seconds=limit)[0]
    return cluster_text(cluster_of(found, name), found, time.strftime("%Y-%m-%d"))


def _own_number_of_ranks() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else max(2, len(os.sched_getaffinity(0)))


def _check(size: int, seconds: float) -> None:
    if not 1 <= size <= MOST_RANKS:
        raise PlanError(f"{size} ranks cannot be measured", where="--nproc", fix=f"give 1 to {MOST_RANKS}")
    if not 0.5 <= seconds <= MOST_SECONDS:
        what = f"{seconds:g} s are too short to measure anything" if seconds < 0.5 else f"{seconds:g} s are too long"
        raise PlanError(what, where="--seconds", fix=f"give 0.5 to {MOST_SECONDS:g}; {SECONDS:g} if left out")
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        what = f"{size} ranks, but this machine has {torch.cuda.device_count()} GPUs"
        raise PlanError(what, where="--nproc", fix='give fewer, or set CUDA_VISIBLE_DEVICES="" to measure the CPU')


def measure_rank(seconds: float, timeout_seconds: float) -> Found:
    """This rank's part; all ranks call everything in the same order, and rank 0 reports progress."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    load = os.getloadavg()[0]
    with _opened(size, timeout_seconds) as groups:
        machine, clock = _machine(groups, load), Clock(groups, seconds / _PASSES / _MEASUREMENTS)
        return Found.fastest([_measure(machine, clock, number) for number in range(_PASSES)])


def _measure(machine: Machine, clock: Clock, number: int) -> Found:
    """One pass over everything."""
    several, skipped, tell = machine.num_ranks > 1, list[str](), _teller(clock, number)
    longer = Clock(clock.groups, 2 * clock.window)  # of a difference both sides
    with torch.enable_grad():
        return Found(
            machine,
            products=tuple(tell("products", lambda: list(products(clock, skipped)))),
            attention=tuple(tell("attention", lambda: list(attention(clock)))),
            moved=tuple(tell("memory", lambda: list(moved(clock)))),
            small=tell("small ops", lambda: small(clock)),
            exchanges=tuple(tell("exchanges", lambda: list(exchanges(longer)))) if several else (),
            before=Timed("product", 0.0, longer.seconds(product(longer))) if several else None,
            overlap=tell("a product during a collective", lambda: overlap(clock)) if several else None,
            skipped=tuple(skipped),
        )


@contextmanager
def _opened(size: int, timeout_seconds: float) -> Iterator[Groups]:
    mesh, combined = measured_mesh(size)
    groups = open_groups(mesh, {}, (), timeout_seconds=timeout_seconds, combined=combined)
    try:
        yield groups
    except BaseException as error:
        groups.faults.publish(error)
        groups.abort()
        raise
    groups.close()


def _teller(clock: Clock, number: int) -> Callable[[str, Callable[[], Any]], Any]:
    def tell(what: str, measure: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = measure()
        if clock.groups.rank == 0:
            print(
                f"  {number + 1} of {_PASSES}, {what}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True
            )
        return result

    return tell


def _machine(groups: Groups, load: float) -> Machine:
    size, version = groups.mesh.world_size, torch.__version__
    if groups.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(groups.device)  # it opens the context
        context = whole - free - torch.cuda.memory_reserved(groups.device)
        gpu = torch.cuda.get_device_properties(groups.device)
        backend = groups.backend or "nccl"
        processors, slack = gpu.multi_processor_count, reserved_share(groups.device)
        rows = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=groups.device)
        cudnn = torch._fused_sdp_choice(rows, rows, rows) == SDPBackend.CUDNN_ATTENTION.value
        return Machine(gpu.name, backend, size, 0, whole, load, version, processors, context, slack, cudnn)
    cores = len(os.sched_getaffinity(0))
    return Machine(_cpu_name(), "gloo", size, cores, _memory() // size, load, version)


def _memory() -> int:
    """Bytes of the machine, or of the container that this runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(total, int(file.read()))
    except (OSError, ValueError):
        return total


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            named = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        named = []
    return f"a core of {named[0] if named else platform.machine() or 'a CPU'}"

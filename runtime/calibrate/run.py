"""The command ``calibrate``: start the ranks, measure on all of them at once, and return the text of a cluster file.

The measurements are comments of the file.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError
from torch.nn.attention import SDPBackend

from passes.errors import PlanError, RunError
from planner.cluster.cluster import Cluster
from planner.spec.fields import json_schema
from planner.spec.messages import spec_error
from runtime.calibrate import measuring
from runtime.calibrate.fit import cluster_of
from runtime.calibrate.measurements import Clock, Machine, Measurements, Timed
from runtime.distributed.groups import Groups
from runtime.distributed.launch import launch
from runtime.distributed.opening import open_groups

SECONDS = 12.0
MOST_SECONDS, MOST_RANKS = 3600.0, 1024
_PASSES = 3  # over all measurements, some seconds apart, so that a short load slows only one pass
_MEASUREMENTS = 80  # about; each gets an equal part of the seconds
_START_SECONDS = 90.0  # for the rendezvous of the ranks, and for a slow call that takes more than its part
_KEYS = {
    "memory": "bytes: all memory / ranks",
    "bandwidth": "bytes per second, the best copy or op",
    "product_fraction": "fraction of the peak, from the slope over sizes",
    "half_tile": "matrix size at which a product reaches half its speed",
    "attention_fraction": "forward and backward, all operations counted",
    "bandwidth_fraction": "copies and ops between products, both directions",
    "launch": "seconds",
    "processors": "multiprocessors",
    "host": "seconds that the host needs to launch an op",
    "context": "bytes that the driver held before the first tensor",
    "slack": "bytes reserved beyond tensors in steps of a few layers, as a fraction of the tensors",
    "at_once": "ranks that reach this speed at the same time: the number of cores",
}


def calibrate(nproc: int | None = None, seconds: float = SECONDS, name: str = "this-machine") -> str:
    """Return the text of a cluster file for this machine. Raises PlanError for bad input, RunError if a rank fails."""
    size = nproc
    if size is None:
        size = torch.cuda.device_count() if torch.cuda.is_available() else max(2, len(os.sched_getaffinity(0)))
    _check(size, seconds)
    print(f"measuring on {size} ranks at once, about {seconds:g} s", file=sys.stderr, flush=True)
    limit = _START_SECONDS + 4 * seconds
    measured = launch(measure_rank, size, seconds, limit, timeout_seconds=limit)[0]
    return cluster_text(cluster_of(measured, name), measured, time.strftime("%Y-%m-%d"))


def _check(size: int, seconds: float) -> None:
    if not 1 <= size <= MOST_RANKS:
        raise PlanError(f"{size} ranks cannot be measured", where="--nproc", fix=f"give 1 to {MOST_RANKS}")
    if not 0.5 <= seconds <= MOST_SECONDS:
        what = f"{seconds:g} s are too short to measure anything" if seconds < 0.5 else f"{seconds:g} s are too long"
        raise PlanError(what, where="--seconds", fix=f"give 0.5 to {MOST_SECONDS:g}; {SECONDS:g} if left out")
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        what = f"{size} ranks, but this machine has {torch.cuda.device_count()} GPUs"
        raise PlanError(what, where="--nproc", fix='give fewer, or set CUDA_VISIBLE_DEVICES="" to measure the CPU')


def measure_rank(seconds: float, timeout_seconds: float) -> Measurements:
    """Measure on this rank; all ranks run the same calls in the same order, and rank 0 reports progress."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    load = os.getloadavg()[0]
    with _opened(size, timeout_seconds) as groups:
        machine, clock = _machine(groups, load), Clock(groups, seconds / _PASSES / _MEASUREMENTS)
        return Measurements.fastest([_measure(machine, clock, number) for number in range(_PASSES)])


def _measure(machine: Machine, clock: Clock, number: int) -> Measurements:
    """Run one pass over all measurements."""
    several, skipped = machine.num_ranks > 1, list[str]()
    longer = Clock(clock.groups, 2 * clock.window)  # for times that are subtracted from each other

    def tell(what: str, measure: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = measure()
        if clock.groups.rank == 0:
            said = f"  {number + 1} of {_PASSES}, {what}: {time.perf_counter() - began:.1f} s"
            print(said, file=sys.stderr, flush=True)
        return result

    with torch.enable_grad():
        return Measurements(
            machine,
            products=tuple(tell("products", lambda: list(measuring.products(clock, skipped)))),
            attention=tuple(tell("attention", lambda: list(measuring.attention(clock)))),
            moved=tuple(tell("memory", lambda: list(measuring.moved(clock)))),
            small=tell("small ops", lambda: measuring.small(clock)),
            exchanges=tuple(tell("exchanges", lambda: list(measuring.exchanges(longer)))) if several else (),
            before=Timed("product", 0.0, longer.seconds(measuring.product(longer))) if several else None,
            overlap=tell("a product during a collective", lambda: measuring.overlap(clock)) if several else None,
            skipped=tuple(skipped),
        )


@contextmanager
def _opened(size: int, timeout_seconds: float) -> Iterator[Groups]:
    mesh, combined = measuring.measured_mesh(size)
    groups = open_groups(mesh, {}, (), timeout_seconds=timeout_seconds, combined=combined)
    try:
        yield groups
    except BaseException as error:
        groups.faults.publish(error)
        groups.abort()
        raise
    groups.close()


def _machine(groups: Groups, load: float) -> Machine:
    size, version = groups.mesh.world_size, torch.__version__
    if groups.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(groups.device)  # it opens the context
        context = whole - free - torch.cuda.memory_reserved(groups.device)
        gpu = torch.cuda.get_device_properties(groups.device)
        backend = groups.backend or "nccl"
        processors, slack = gpu.multi_processor_count, measuring.reserved_share(groups.device)
        rows = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=groups.device)
        cudnn = torch._fused_sdp_choice(rows, rows, rows) == SDPBackend.CUDNN_ATTENTION.value
        of_gpu = {"processors": processors, "context": context, "slack": slack, "cudnn": cudnn}
        return Machine(gpu.name, backend, size, cores=0, memory=whole, load=load, torch=version, **of_gpu)
    cores = len(os.sched_getaffinity(0))
    return Machine(_cpu_name(), "gloo", size, cores=cores, memory=_memory() // size, load=load, torch=version)


def _memory() -> int:
    """Return the memory in bytes of the machine, or of the container of this process."""
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


def cluster_text(values: Mapping[str, Any], measured: Measurements, date: str) -> str:
    """Return YAML with comments. Raises RunError if the measurements do not make a valid cluster file."""
    try:
        Cluster.model_validate(values)
    except ValidationError as error:
        problem = spec_error(error, values, {}, json_schema(Cluster), "the cluster file")
        raise RunError(f"the measurements do not make a valid cluster file: {problem}") from error
    lines = [*_head(measured, date), f"name: {values['name']}", "device:"]
    for key, value in values["device"].items():
        said = f"  {key}: {_value(value)}"
        lines.append(f"{said:<42}  # {_KEYS[key]}" if key in _KEYS else said)
    lines.append(f"{'links:':<42}  # bandwidth: bytes per second, one direction, per rank; latency: seconds")
    for link in values["links"]:
        lines += [f"  {' ' if at else '-'} {key}: {_value(value)}" for at, (key, value) in enumerate(link.items())]
    lines.append(f"overlap: {values['overlap']:g}{_overlap(measured)}")
    lines.append(f"uncertainty: {_value(values['uncertainty'])}  # spread of the measurements around these values")
    return "\n".join(lines) + "\n"


def _head(measured: Measurements, date: str) -> list[str]:
    machine = measured.machine
    shared = f" on {machine.cores} cores" if machine.cores else ""
    lines = [
        f"Measured by `meshwright calibrate` on {date}: {machine.num_ranks} ranks at once{shared}; {machine.backend}, "
        f"torch {machine.torch},",
        f"load average {machine.load:.1f} before. The fastest of several passes, the slowest rank of each pass.",
    ]
    if machine.sharing > 1:
        lines += [
            f"{machine.sharing:g} ranks shared a core: peaks and bandwidths below are multiplied by this factor,",
            "latency and launch the measured values divided by it: values of a rank with a core of its own.",
        ]
    lines += ["", "Measured, on one rank while the others run:"]
    lines += [f"  product {_seen(t, 'FLOP/s')}" for t in measured.products]
    lines += [f"  attention {_seen(t, 'FLOP/s')}" for t in measured.attention]
    lines += [f"  {_seen(t, 'B/s')}" for t in measured.moved]
    lines += [f"  {_exchange(t)}" for t in measured.exchanged]
    lines += [f"  skipped: {what}" for what in measured.skipped]
    return [f"# {line}".rstrip() for line in lines]


def _seen(timed: Timed, unit: str) -> str:
    sides = "" if timed.sides is None else " [{}, {}] · [{}, {}]".format(*timed.sides[:2], *timed.sides[1:])
    return f"{timed.name}{sides}: {_short(timed.rate)}{unit} at {_short(timed.work)}{unit.partition('/')[0]}"


def _exchange(timed: Timed) -> str:
    group = "" if timed.name == "p2p" else f" over {timed.ranks} ranks"
    return f"{timed.name} of {_short(timed.work)}B{group}: {timed.seconds * 1e3:.3g} ms"


def _overlap(measured: Measurements) -> str:
    if measured.overlap is None:
        return ""
    product, exchange, both = (f"{seconds * 1e3:.3g}" for seconds in measured.overlap)
    return f"  # products of {product} ms beside an all-reduce of {exchange} ms took {both} ms"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if not isinstance(value, float):
        return str(value)
    if 1e-3 <= value < 1e4:
        return f"{value:g}" if value % 1 else f"{value:.1f}"
    power = int(f"{value:e}".partition("e")[2]) // 3 * 3
    digits = f"{value / 10.0**power:.4g}"
    return f"{digits if '.' in digits else f'{digits}.0'}e{power}"


def _short(value: float) -> str:
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{value / power:.3g} {letter}"
    return f"{value:.3g} "

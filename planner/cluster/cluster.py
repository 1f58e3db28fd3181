"""The machines of a cluster file: one kind of device, and links from the inside outwards.

    links:
      - {name: NVSwitch, devices: 8, bandwidth: 450.0e9, latency: 3.0e-6}        8 devices in a node
      - {name: InfiniBand, devices: 1024, bandwidth: 50.0e9, latency: 6.0e-6}    128 such nodes

Peaks are those of a data sheet; a fraction is the part of a peak that large kernels reach. A value that no machine
reaches is a mistake of units, and is refused.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from passes.errors import SpecError
from planner.spec.cluster import cluster_path, cluster_values, no_cluster
from planner.spec.fields import Count, File, Flag, Name, Section, key, number, required, whole

Times = Annotated[float, Field(strict=True, ge=1, le=100, allow_inf_nan=False), BeforeValidator(number)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Point = tuple[Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(number)], Share]
Spread = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False), BeforeValidator(number)]
Float = Literal["float32", "bfloat16", "float16", "float64"]
# The most that PyTorch's allocator reserved beyond the tensors on an H200 was 6.8 % of them (benchmarks/RESULTS.md).
GPU_SLACK = 0.07
_FLOPS = {"float32": 67e12, "bfloat16": 989e12}
_LINK = {"name": "NVSwitch", "devices": 8, "bandwidth": 450e9, "latency": 3e-6}


# Wide limits (a phone, and ten times the largest machine): they only detect wrong units, such as gigabytes for bytes.
def _within(least: float, most: float, unit: str, fix: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not least <= value <= most:
            few = f"less than {least:g}" if value < least else f"more than {most:g}"
            raise SpecError(f"is {value:g} {unit}: no machine has {few}", fix=fix)
        return value

    return check


def _limits(least: float, most: float, unit: str, fix: str, kind: Any = number) -> Any:
    bounds: dict[str, Any] = {"minimum": least, "maximum": most}
    finite = {"allow_inf_nan": False} if kind is number else {}
    field = Field(strict=True, json_schema_extra=bounds, **finite)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return field, BeforeValidator(kind), AfterValidator(_within(least, most, unit, fix))


Flops = Annotated[float, *_limits(1e8, 1e18, "FLOP/s", "write FLOP/s: a TFLOP/s is 1.0e12")]
Bytes = Annotated[int, *_limits(10**7, 10**14, "bytes", "write bytes: a GB is 1.0e9", whole)]
Bandwidth = Annotated[float, *_limits(1e5, 1e15, "bytes per second", "write bytes per second: a GB/s is 1.0e9")]
Seconds = Annotated[float, *_limits(1e-9, 1.0, "seconds", "write seconds: a microsecond is 1.0e-6")]
Devices = Annotated[int, *_limits(1, 10**8, "devices", "write the number of devices that it joins", whole)]


def _with_peaks(flops: dict[Float, float]) -> dict[Float, float]:
    if not flops:
        raise SpecError("is empty", fix="give the peak of a dtype: {float32: 67.0e12}")
    return flops


class Device(Section):
    name: Name = required("name of the device", "H100 SXM")
    flops: Annotated[dict[Float, Flops], AfterValidator(_with_peaks)] = required("peak FLOP/s, by dtype", _FLOPS)
    memory: Bytes = required("bytes", 80_000_000_000)
    bandwidth: Bandwidth = required("peak memory bandwidth, in bytes per second", 3.35e12)
    product_fraction: Share = key(0.7, "fraction of the peak that large matrix products reach")
    half_tile: Count = key(64, "matrix size at which a product reaches half its speed: half a tile of the kernels")
    attention_fraction: Share = key(0.5, "fraction of the peak that attention reaches")
    bandwidth_fraction: Share = key(0.8, "fraction of the bandwidth that ops other than matrix products reach")
    processors: Devices | None = key(
        None, "multiprocessors of a GPU; each computes one tile of a product at a time; null: one"
    )
    launch: Seconds = key(5e-6, "seconds of the smallest op")
    host: Seconds | None = key(
        None, "seconds in which the host launches one kernel of many; null: kernels never wait for it"
    )
    context: Bytes | None = key(None, "bytes that the driver and the libraries hold in every process; null: none")
    at_once: Devices | None = key(
        None,
        "devices that compute at this speed at the same time: the number of cores, if more processes share "
        "them; null: all",
    )
    slack: Spread | None = key(
        None,
        f"bytes that the allocator reserves beyond tensors, as a fraction of these; null: {GPU_SLACK} on a GPU, else 0",
    )
    cudnn_attention: Flag = key(
        False, "whether PyTorch takes cuDNN's attention first: on Hopper and Blackwell, with cuDNN 9.9 or later"
    )
    usable_memory: Share = key(0.92, "fraction of the memory that a process may use")

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU: only a GPU has ``processors``."""
        return self.processors is not None

    @property
    def slack_share(self) -> float:
        """``slack``, or the default of a device that was not measured."""
        return self.slack if self.slack is not None else GPU_SLACK if self.is_gpu else 0.0


def _ascending(points: tuple[Point, ...]) -> tuple[Point, ...]:
    for (low, _), (high, _) in pairwise(points):
        if low >= high:
            raise SpecError(f"has {high:g} after {low:g}", fix="list the points from the smallest to the largest")
    return points


def _rising(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Raise SpecError if more bytes would take less time than fewer."""
    for (low, slow), (high, fast) in pairwise(_ascending(points)):
        if high / fast < low / slow:
            what = f"says that {high:g} bytes take less time than {low:g}"
            raise SpecError(what, fix="measure again, or leave one of the two points out")
    return points


class Link(Section):
    name: Name = required("name of the link", "NVSwitch")
    devices: Devices = required("devices that the link joins, including those of inner links", 8)
    bandwidth: Bandwidth = required("bytes per second that each device can send while it receives as many", 450e9)
    latency: Seconds = required("seconds per message", 3e-6)
    fraction: Share = key(0.8, "fraction of the bandwidth that large collectives reach")
    communicator: Bytes | None = key(
        None, "bytes of buffers that the library of collectives holds for a group over this link; null: none"
    )
    reduce_scatter: Times = key(
        1.0,
        "duration relative to a ring: about 3 if the library sums all parts on every device, as gloo does",
    )
    sizes: Annotated[tuple[Point, ...], AfterValidator(_rising)] = key(
        (),
        "[bytes of the tensor, fraction of the bandwidth that it reaches]; [] means fraction for all sizes",
    )
    parts: Annotated[tuple[Point, ...], AfterValidator(_ascending)] = key(
        (), "[number of nodes, or parts, that a group joins here, factor on its bandwidth]; [] means 1 for all"
    )


class Uncertainty(Section):
    """How far real seconds may be from estimated ones, as a fraction of each part of a step."""

    compute: Spread = key(0.1, "of kernels, their recomputation and the update, and of the bubble that they leave")
    communication: Spread = key(0.3, "of collectives and messages")


def _nested(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """Raise SpecError unless each link joins complete groups of the link before it."""
    if not links:
        raise SpecError("is empty", fix="give at least one link, which joins all devices")
    errors = []
    for index, (inner, outer) in enumerate(pairwise(links), start=1):
        at = f"links.{index}.devices"
        if outer.devices <= inner.devices:
            what = f"{at} is {outer.devices}, but the link before it already joins {inner.devices}"
            fix = "list links from the inside outwards, each with all devices that it joins"
            errors.append(SpecError(what, where=at, fix=fix))
        elif outer.devices % inner.devices:
            what = f"{at} = {outer.devices} is not a multiple of the {inner.devices} devices of the link before it"
            whole = outer.devices // inner.devices * inner.devices
            errors.append(SpecError(what, where=at, fix=f"set it to {whole} or {whole + inner.devices}"))
    if errors:
        raise SpecError.of(errors)
    return links


class Cluster(File):
    """The values of a cluster file."""

    name: Name = required("name of the cluster", "dgx-h100")
    device: Device = required(
        "all devices are alike", {"name": "H100 SXM", "flops": _FLOPS, "memory": 80_000_000_000, "bandwidth": 3.35e12}
    )
    links: Annotated[tuple[Link, ...], AfterValidator(_nested)] = required("from the inside outwards", [_LINK])
    overlap: Annotated[float, Field(strict=True, ge=0, le=1)] = key(
        1.0, "fraction of a collective's time that overlap with independent work hides"
    )
    uncertainty: Uncertainty = key(Uncertainty(), "how far real seconds may be from estimated ones, as fractions")

    @property
    def devices(self) -> int:
        return self.links[-1].devices

    def warnings(self) -> Iterator[SpecError]:
        """Yield a warning for each value that is possible, but probably a mistake."""
        for index, (inner, outer) in enumerate(pairwise(self.links), start=1):
            if outer.bandwidth > inner.bandwidth:
                what = (
                    f"{outer.name} carries {outer.bandwidth:g} bytes per second per device, more than {inner.name} "
                    f"inside of it ({inner.bandwidth:g})"
                )
                fix = "check that both bandwidths are per device, in bytes, in one direction"
                yield self.error(f"links.{index}.bandwidth", what, fix)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def read_cluster(path: str) -> Cluster:
    """Return the cluster of the YAML file at ``path``, or of the shipped file with this name.

    Raises SpecError with all errors of the file, each with a line number and a fix.
    """
    file = cluster_path(path)
    if file is None:
        raise no_cluster(path, ["."], "")
    return Cluster.checked(*cluster_values(file), "the cluster file")

"""A stream of weights over a process group of rank 0 and its readers: no pickle, no copy of a bucket.

    rank 0 of the group     header (JSON) → tensor → tensor … → header …     → an empty header
    the other ranks         receive_weights(group)

Full tensors are broadcast. Shards of a layout go to one reader each: reader i, rank i + 1 of the group, has the place
of rank i of the layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import BroadcastOptions, ProcessGroup

from passes.errors import PlanError, RunError
from runtime.checkpoint.safetensors_files import DTYPES
from runtime.checkpoint.stream import Bucket, Recut, Shards

Group = ProcessGroup | Backend
MOST_HEADER = 64 << 20  # bytes: of the names and shapes of one bucket
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class GroupTarget:
    """Sends each bucket to the other ranks of a group. Raises PlanError for a group that does not fit the layout."""

    def __init__(self, group: Group, recut: Recut | None) -> None:
        self._recut = recut
        self._group: Any = group
        if group.rank() != 0:
            what = f"the sender of the weights is rank {group.rank()} of the process group"
            raise PlanError(what, where="stream_weights", fix="make it rank 0 of that group")
        if recut is not None and group.size() != recut.plan.mesh.world_size + 1:
            raise PlanError(
                f"the process group has {group.size() - 1} readers, and the layout {recut.plan.mesh.world_size} ranks",
                where="layout",
                fix="make a group of the sender and one reader for each rank of the layout",
            )

    def begin(self, num_buckets: int) -> None:
        content = json.dumps({"by_rank": self._recut is not None}).encode()
        _broadcast_content(self._group, content)

    def take(self, bucket: Bucket | Shards) -> None:
        if self._recut is None:
            tensors = cast(Bucket, bucket)
            _broadcast_content(self._group, _header_of(tensors))
            for tensor in tensors.values():
                if tensor.numel():
                    _broadcast(self._group, _bytes_of(tensor, self._group))
            return
        for rank, own in cast(Shards, bucket).items():
            _send_content(self._group, _header_of(own), rank + 1)
            for tensor in own.values():
                if tensor.numel():
                    self._group.send([_bytes_of(tensor, self._group)], rank + 1, 0).wait()

    def end(self) -> None:
        if self._recut is None:
            _broadcast_content(self._group, b"")
        else:
            for rank in range(1, self._group.size()):
                _send_content(self._group, b"", rank)


def receive_weights(group: Group) -> Iterator[Bucket]:
    """The buckets that rank 0 of ``group`` streams with ``engine.stream_weights(group)``, by the names of the model.

    With a ``layout``: this reader's shards. The memory of a bucket is the reader's own. Raises RunError for content of
    another exchange.
    """
    by_rank = bool(_parsed(_received_content(group, by_rank=False)).get("by_rank"))
    while content := _received_content(group, by_rank=by_rank):
        bucket: Bucket = {}
        for name, (dtype, shape) in _tensors_of(_parsed(content)):
            tensor = torch.empty(shape, dtype=dtype, device=_device_of(group))
            if tensor.numel():
                flat = tensor.view(-1).view(torch.uint8)
                _receive(group, flat, by_rank=by_rank)
            bucket[name] = tensor
        yield bucket


def _header_of(bucket: Mapping[str, Tensor]) -> bytes:
    rows = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in bucket.items()]
    return json.dumps({"tensors": rows}, separators=(",", ":")).encode()


def _tensors_of(header: Mapping[str, Any]) -> Iterator[tuple[str, tuple[torch.dtype, list[int]]]]:
    try:
        for name, dtype, shape in header["tensors"]:
            yield str(name), (_NAMES[dtype], [int(n) for n in shape])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the process group sent a value of another exchange ({type(error).__name__})") from None


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RunError("the process group sent a value of another exchange")
    return found


def _broadcast_content(group: Any, content: bytes) -> None:
    device = _device_of(group)
    _broadcast(group, torch.tensor([len(content)], device=device))
    if content:
        _broadcast(group, torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device))


def _send_content(group: Any, content: bytes, rank: int) -> None:
    device = _device_of(group)
    group.send([torch.tensor([len(content)], device=device)], rank, 0).wait()
    if content:
        group.send([torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)], rank, 0).wait()


def _received_content(group: Any, *, by_rank: bool) -> bytes:
    size = torch.zeros(1, dtype=torch.int64, device=_device_of(group))
    _receive(group, size, by_rank=by_rank)
    if not 0 <= int(size) <= MOST_HEADER:
        raise RunError(f"the process group sent a header of {int(size)} bytes, which is none of a stream of weights")
    content = torch.empty(int(size), dtype=torch.uint8, device=_device_of(group))
    if int(size):
        _receive(group, content, by_rank=by_rank)
    return content.cpu().numpy().tobytes()


def _receive(group: Any, into: Tensor, *, by_rank: bool) -> None:
    if by_rank:
        group.recv([into], 0, 0).wait()
    else:
        _broadcast(group, into)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options: Any = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def _bytes_of(tensor: Tensor, group: Group) -> Tensor:
    return tensor.detach().to(_device_of(group)).contiguous().view(-1).view(torch.uint8)


def _device_of(group: Group) -> torch.device:
    """On which the group's messages lie."""
    is_of_gpus = "nccl" in group.name().lower()
    return torch.device("cuda", torch.cuda.current_device()) if is_of_gpus else torch.device("cpu")

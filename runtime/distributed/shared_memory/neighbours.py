"""The ranks of a group on one host: memory that each shows the others, and a socket to each.

Both are without a name in any directory, so nothing stays behind a process that is killed, and a rank that ends is
known at once: its sockets close. Memory is Linux's ``memfd``, which no small ``/dev/shm`` of a container limits.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import uuid
from datetime import timedelta

from torch.distributed import Store

from runtime.distributed.faults.processes import boot_of_host

OFF = "MESHWRIGHT_SHARED_MEMORY"
_RANK = struct.Struct("<i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def shared_host() -> str:
    """The same for processes that can share memory; empty where this one cannot, or ``OFF`` is 0."""
    if os.environ.get(OFF, "1") == "0" or not hasattr(os, "memfd_create"):
        return ""
    try:
        os.close(os.memfd_create("meshwright"))
        return f"{boot_of_host()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return ""


class Neighbours:
    """Owns: this rank's memory, the others' as they are mapped here, the sockets. By place in the group, itself too."""

    def __init__(self, store: Store, rank: int, size: int, num_bytes: int, timeout: timedelta) -> None:
        """The same call on every rank of the group. Raises RuntimeError where one does not come in time."""
        self.rank, self.size = rank, size
        descriptor = os.memfd_create("meshwright-group")
        os.ftruncate(descriptor, num_bytes)
        self.memories = [mmap.mmap(descriptor, num_bytes)] * size
        self.sockets: dict[int, socket.socket] = {}
        try:
            self._meet(store, descriptor, num_bytes, timeout)
        except TimeoutError as error:
            raise RuntimeError(
                f"timed out after {timeout.total_seconds():g} s: not all ranks of a group came"
            ) from error
        finally:
            os.close(descriptor)

    def _meet(self, store: Store, descriptor: int, num_bytes: int, timeout: timedelta) -> None:
        """Connect to those before, then answer those behind: a connection waits for nobody's answer."""
        with _listening(timeout) as listener:
            store.set(f"address/{self.rank}", listener.getsockname())
            for rank in range(self.rank):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peer.settimeout(timeout.total_seconds())
                peer.connect(store.get(f"address/{rank}"))
                if not _is_mine(peer):
                    raise RuntimeError(f"another user of this host answers in place of rank {rank} of a group")
                _show(peer, self.rank, descriptor)
                self.sockets[rank] = peer
            while len(self.sockets) < self.size - 1:
                peer, _ = listener.accept()
                peer.settimeout(timeout.total_seconds())
                if not _is_mine(peer):
                    peer.close()
                    continue
                rank, memory = _shown(peer, num_bytes)
                _show(peer, self.rank, descriptor)
                self.sockets[rank], self.memories[rank] = peer, memory
        for rank in range(self.rank):
            _, self.memories[rank] = _shown(self.sockets[rank], num_bytes)

    def close(self) -> None:
        for peer in self.sockets.values():
            peer.close()


def _listening(timeout: timedelta) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0meshwright-" + uuid.uuid4().hex.encode())  # a name without a file
    listener.listen(128)
    listener.settimeout(timeout.total_seconds())
    return listener


def _is_mine(peer: socket.socket) -> bool:
    """Names without a file are open to all users of the machine."""
    told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] == os.getuid()


def _show(peer: socket.socket, rank: int, descriptor: int) -> None:
    socket.send_fds(peer, [_RANK.pack(rank)], [descriptor])


def _shown(peer: socket.socket, num_bytes: int) -> tuple[int, mmap.mmap]:
    told, descriptors, _, _ = socket.recv_fds(peer, _RANK.size, 1)
    if not descriptors:
        raise RuntimeError("connection closed by peer: a rank ended while its group was made")
    try:
        return _RANK.unpack(told)[0], mmap.mmap(descriptors[0], num_bytes)
    finally:
        os.close(descriptors[0])  # the mapping stays

"""Forked children: one process imports and captures, and many short-lived forks of it run. For CPUs only.

Planning and importing take longer than the small runs themselves, so both happen once, in a parent that never opens a
process group and starts no threads of autograd (which do not survive a fork); ranks and references are its forks.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 600.0  # of a call; that of a process group is half as long
_FORK = multiprocessing.get_context("fork")
_LAST = "no further value"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_IMPORTED = ("planner.api", "runtime.engine.engine", "runtime.verify.run", "torch.export", "torch._dynamo")


class ForkError(RuntimeError):
    """A child failed; the message is its traceback."""


class Child:
    """A fork of this process that runs ``function(*args)`` and sends its result (a generator: each value) or error."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe, there = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_serve, args=(self._pipe, there, function, args))
        self._process.start()
        there.close()

    def message(self, deadline: float) -> tuple[Any, BaseException | None] | None:
        """Return the next value and error of the child, None after the last. Raises TimeoutError at ``deadline``."""
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            return self._pipe.recv()
        except EOFError:
            return None

    def end(self) -> int | None:
        """End the child, by force if it still runs, and return its exit code."""
        self._pipe.close()
        self._process.kill()
        self._process.join()
        return self._process.exitcode


def _serve(ours: Connection, there: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function in the child. An interrupt reaches all processes of a terminal; only the parent handles it."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(OSError, AttributeError):  # on Linux: otherwise a child of a killed process continues to run
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ours.close()
        gc.freeze()  # a collection would write to, and so copy, every page that parent and child share
        # torch replaces a forked copy of its thread pool at the first use, which two threads must not make at once. A
        # backward may start several at once: after an export, a torch built for CUDA does so even without a GPU.
        torch.set_num_threads(torch.get_num_threads())
        for message in _messages(function, args):
            there.send_bytes(message)
    finally:
        os._exit(0)  # in every case: the code of the parent behind the fork must not run here


def in_fork(function: Callable[..., Any], *args: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
    """Return the result of ``function(*args)``, computed in a fork. Raises its error."""
    return in_forks([(function, args)], timeout_seconds)[0]


def in_forks(
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """Run all calls at once, each in its own fork, and return the results. Raises the first error."""
    deadline = time.monotonic() + timeout_seconds
    children: list[Child] = []
    messages: list[tuple[Any, BaseException | None] | None] = []
    late = None
    try:
        for function, args in calls:
            children.append(Child(function, *args))
        for child in children:
            messages.append(child.message(deadline))
    except TimeoutError:
        late = ForkError(f"not finished in {timeout_seconds:g} s")
    finally:
        statuses = [child.end() for child in children]
    ended = [f or (None, _no_result(status)) for f, status in zip(messages, statuses, strict=False)]
    errors = [error for _, error in ended if error is not None]
    # the error of a rank comes before those of ranks that lose their connection to it
    errors.sort(key=lambda error: "Connection closed by peer" in str(error) or "ended without" in str(error))
    if errors or late:
        raise errors[0] if errors else late  # pyright: ignore[reportGeneralTypeIssues]
    return [result for result, _ in ended]


def values_of(function: Callable[..., Iterator[Any]], *args: Any, timeout_seconds: float) -> Iterator[Any]:
    """Yield the values of the generator ``function(*args)``, which runs in a fork. Raises its error.

    ``timeout_seconds``: of each value.
    """
    child, status = Child(function, *args), None
    try:
        while (message := child.message(time.monotonic() + timeout_seconds)) is not None:
            value, error = message
            if error is not None:
                raise error
            if value == _LAST:
                return
            yield value
    except TimeoutError:
        raise ForkError(f"not finished in {timeout_seconds:g} s") from None
    finally:
        status = child.end()
    raise _no_result(status)


def _no_result(status: int | None) -> ForkError:
    return ForkError(f"the child ended without a result (status {status})")


def _messages(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[bytes]:
    """Yield the pickled (value, error) of a call; for a generator one for each value, then ``_LAST``."""
    try:
        result = function(*args)
        if isinstance(result, Generator):
            for value in result:
                yield pickle.dumps((value, None))
            result = _LAST
        yield pickle.dumps((result, None))
    except BaseException as error:
        yield _pickled(error)


def _pickled(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        content = pickle.dumps((None, error))
        pickle.loads(content)
    except Exception:
        return pickle.dumps((None, ForkError(text)))
    is_ours = type(error).__module__.partition(".")[0] in ("planner", "passes")
    return content if is_ours else pickle.dumps((None, ForkError(text)))


class StoreHost:
    """A child that hosts one rendezvous store for all cases, and ends with this object, because it keeps the memory
    that its parent had.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        alive_read, alive = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.close(alive)
            store = TCPStore(HOST, 0, None, True, timedelta(seconds=TIMEOUT_SECONDS), wait_for_workers=False)
            os.write(write, str(store.port).encode())
            os.close(write)
            os.read(alive_read, 1)  # returns when the parent and all its forks are gone
            os._exit(0)
        os.close(write)
        os.close(alive_read)
        self.port = int(os.read(read, 16))
        os.close(read)
        self._num_cases = 0
        self._end = weakref.finalize(self, _end_host, os.getpid(), pid, alive)

    def begin(self, token: str) -> None:
        """Count cases from ``token`` (hexadecimal), which must differ between forks of one process."""
        self._num_cases = int(token, 16)

    def run_ranks(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(*args)`` on ``world_size`` gloo ranks; return the results in rank order."""
        self._num_cases += 1
        prefix = f"{os.getpid()}/{self._num_cases}"
        return in_forks([(_rank, (self.port, prefix, r, world_size, function, args)) for r in range(world_size)])


def _end_host(owner: int, pid: int, alive: int) -> None:
    """End the host, if this is the process that started it, and not one of its forks."""
    if os.getpid() == owner:
        os.close(alive)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _rank(
    port: int, prefix: str, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if world_size == 1:
        return function(*args)
    timeout = timedelta(seconds=TIMEOUT_SECONDS / 2)
    store = PrefixStore(prefix, TCPStore(HOST, port, None, False, timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def prepare() -> None:
    """Prepare this process for forks; must run before the first fork, and before any export."""
    torch.set_num_threads(1)
    # Autograd counts its devices once. Before any export there are none, so that it starts no threads.
    torch.ones(1, requires_grad=True).sum().backward()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()

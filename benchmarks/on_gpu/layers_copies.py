"""Copies between pinned host memory and the GPU, alone, both ways and beside products; AdamW on the host's cores."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.plain import timed
from benchmarks.on_gpu.profile import wait
from benchmarks.on_gpu.table import Table


def copies(device: torch.device, *, tiny: bool) -> Table:
    """GB/s of each way; ms of the products in the same time, and how much longer they take."""
    table = Table("layers: copies", ("copies", "GB/s each way", "products ms", "times alone"))
    on_gpu, size, width = device.type == "cuda", 1 << 16 if tiny else 1 << 30, 64 if tiny else 8192
    host = [torch.ones(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    there = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    x = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else [None, None]
    ways: dict[str, tuple[tuple[Tensor, Tensor], ...]] = {
        "to the GPU": ((there[0], host[0]),),
        "to the host": ((host[1], there[1]),),
        "both": ((there[0], host[0]), (host[1], there[1])),
    }

    def products() -> None:
        for _ in range(1 if tiny else 20):
            x @ x

    products()
    alone = timed(products, 1, device)
    table.add("none", None, alone * 1e3, 1.0)
    for name, pairs in ways.items():

        def copy(pairs: Any = pairs) -> None:
            for (to, source), stream in zip(pairs, streams, strict=False):
                with _on(stream):
                    to.copy_(source, non_blocking=True)

        copy()
        table.add(name, size / timed(copy, 1, device) / 1e9, None, None)
        seconds, of_products = _together(copy, products, device)
        table.add(f"{name}, beside products", size / seconds / 1e9, of_products * 1e3, of_products / alone)
    return table


def _together(copy: Callable[[], None], products: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Seconds until all is done, and until the products are."""
    wait(device)
    start = time.perf_counter()
    copy()
    products()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    of_products = time.perf_counter() - start
    wait(device)
    return time.perf_counter() - start, of_products


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def adamw_on_host(*, tiny: bool) -> Table:
    table = Table("layers: AdamW on the host", ("AdamW", "threads", "ms of 100 million elements", "GB/s"))
    num, threads = 10_000 if tiny else 100_000_000, torch.get_num_threads()
    counts = (threads,) if tiny else sorted({1, 4, len(os.sched_getaffinity(0))})
    for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}}.items():
        for count in counts:
            torch.set_num_threads(count)
            parameter = torch.nn.Parameter(torch.ones(num))
            parameter.grad = torch.ones(num)
            optimizer = torch.optim.AdamW([parameter], lr=1e-4, **options)
            optimizer.step()
            seconds = timed(optimizer.step, 1 if tiny else 3, torch.device("cpu"))
            moved = 7 * 4 * num  # reads of four tensors, writes of three
            table.add(name, count, seconds * 1e3 * 100_000_000 / num, moved / seconds / 1e9)
    torch.set_num_threads(threads)
    return table

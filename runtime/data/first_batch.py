"""The first batch, checked on all ranks at once: a rank that cannot begin must not leave the others waiting."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from passes.errors import PlanError
from runtime.data.batches import BatchLayout

NO_BATCH = "rank 0 has no valid batch"


def check_first_batch(
    layout: BatchLayout,
    batch: Mapping[str, Tensor],
    store: Store,
    world_size: int,
    rank: int,
    timeout: timedelta,
    *,
    local: bool,
) -> None:
    """``check`` on all ranks at once, for the first step: a rank with a bad batch must not leave the others waiting.

    Over the store, not a collective: a rank that finds its own batch wrong says so and raises without any wait, and the
    others raise its words. Global batches must hold the integers of rank 0 everywhere. Raises PlanError.
    """
    own, expected = "", NO_BATCH
    try:
        check_here(layout, batch, rank, world_size, local=local)
        expected = _fingerprint(batch, local)
        if rank and store.get("batch/expected").decode() not in (expected, NO_BATCH):
            own = "this batch differs from that of rank 0"
    except PlanError as error:
        own = error.what.removeprefix(f"rank {rank}: ")
        raise
    finally:
        _tell(store, world_size, rank, own, expected)
    store.wait(["batch/all_checked"], timeout)
    if store.check(["failed"]):
        raise PlanError(f"not every rank can start: {store.get('failed').decode()}", fix="see the output of that rank")
    num_bad = store.add("batch/num_bad", 0)
    if num_bad:
        told = sorted(store.get(f"batch/bad/{i + 1}").decode() for i in range(min(num_bad, 8)))
        raise PlanError(
            "the first batch does not fit on every rank: " + "; ".join(told),
            where="batch",
            fix="give every rank the same global batch, or its own rows with train_step(batch, local=True)",
        )


def check_here(layout: BatchLayout, batch: Mapping[str, Tensor], rank: int, world_size: int, *, local: bool) -> None:
    """This rank's batch; of several ranks an error names the one that was given it."""
    try:
        layout.check(batch, local=local)
    except PlanError as error:
        if world_size == 1:
            raise
        raise PlanError(f"rank {rank}: {error.what}", where=error.where, fix=error.fix) from None


def tell_failure(store: Store, world_size: int, rank: int, error: BaseException) -> None:
    """Instead of ``check_first_batch``: this rank has no engine, and the others must not wait for it."""
    store.set("failed", f"rank {rank}: {type(error).__name__}: {error}")
    _tell(store, world_size, rank, "", NO_BATCH)


def _tell(store: Store, world_size: int, rank: int, own: str, expected: str) -> None:
    """Report that this rank has checked its batch; ``own``: the error found here."""
    if rank == 0:
        store.set("batch/expected", expected)
    if own:
        store.set(f"batch/bad/{store.add('batch/num_bad', 1)}", f"rank {rank}: {own}")
    if store.add("batch/num_checked", 1) == world_size:
        store.set("batch/all_checked", "1")


def _fingerprint(batch: Mapping[str, Tensor], local: bool) -> str:
    if local:
        return "local"
    digest = hashlib.sha256()
    for name in sorted(batch):
        if not batch[name].is_floating_point():
            digest.update(batch[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

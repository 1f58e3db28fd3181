"""Agreement on errors: an error on some ranks is raised on all ranks, so that no rank waits forever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from passes.errors import PlanError
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups
from runtime.distributed.patience import until_rank_0_is_done


@contextmanager
def agreed(groups: Groups, *, rank_0_is_long: bool = False) -> Iterator[None]:
    """All ranks enter and leave together; a PlanError or OSError of any rank inside is raised on all of them.

    The error is that of the lowest rank that has one. Inside there must be no exchange between ranks, unless each rank
    takes part in it whatever went wrong. ``rank_0_is_long``: the others may wait for it beyond the group's timeout.
    """
    found: PlanError | None = None
    try:
        yield
    except PlanError as error:
        found = error
    except OSError as error:
        found = PlanError(
            f"{error.strerror or error}",
            where=str(error.filename or ""),
            fix="use files that this user may read and write",
        )
        found.__cause__ = error
    if rank_0_is_long:
        until_rank_0_is_done(groups)
    agree(groups, found)


@contextmanager
def halfway(groups: Groups, state: str) -> Iterator[None]:
    """``agreed`` around what changes a state: a file may differ since it was checked, or a disk fail."""
    with agreed(groups):
        try:
            yield
        except (PlanError, OSError) as failed:
            what = failed.what if isinstance(failed, PlanError) else str(failed)
            what = f"loading failed halfway, and {state} incomplete: {what}"
            raise PlanError(what, fix="load it again") from failed


def agree(groups: Groups, error: PlanError | None) -> None:
    """Exchange errors and raise the first one on every rank."""
    words = error and (error.what, str(error.where or ""), error.fix)
    errors = all_gather_json(groups, words, _error_of)
    for rank, found in enumerate(errors):
        if found is None:
            continue
        if error is not None and str(error) == str(found):
            raise error
        others = "" if all(str(e) == str(found) for e in errors) else f"rank {rank}: "
        raise PlanError(f"{others}{found.what}", where=found.where, fix=found.fix)


def _error_of(words: Sequence[str] | None) -> PlanError | None:
    if words is None:
        return None
    what, where, fix = words
    return PlanError(what, where=where, fix=fix)

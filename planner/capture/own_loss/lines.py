"""Source lines of a loss function of the user's: export records those of functions named ``forward`` alone.

loss(outputs, batch) > log_probability(…)             recorded, down to the next forward
loss(policy, …) > policy.forward > a helper           of these, loss and forward
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx.proxy import TracerBase

from passes.program.source_lines import is_foreign_frame
from planner.capture.own_loss.combined import Combined
from planner.capture.own_loss.with_loss import parts_of

_FILTER = "_filter_traceback_frames"


@contextmanager
def loss_lines(model: nn.Module) -> Iterator[None]:
    """Around an export: calls that the loss of ``model`` makes are recorded with its lines."""
    place, original = _place_of(_loss_of(model)), getattr(TracerBase, _FILTER, None)
    if place is None or original is None:
        yield
        return

    def filtered(tracer: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        kept = {id(frame) for frame in original(tracer, frames)} | {id(frame) for frame in _of_loss(frames, place)}
        return traceback.StackSummary.from_list([frame for frame in frames if id(frame) in kept])

    setattr(TracerBase, _FILTER, filtered)
    try:
        yield
    finally:
        setattr(TracerBase, _FILTER, original)


def _loss_of(model: nn.Module) -> Callable[..., Any] | None:
    parts = parts_of(type(model))
    return model.loss_function if isinstance(model, Combined) else None if parts is None else parts[1]


def _place_of(loss: Callable[..., Any] | None) -> tuple[str, str] | None:
    """File and name of its code."""
    if loss is None:
        return None
    function = inspect.unwrap(getattr(loss, "func", loss))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return None if code is None else (code.co_filename, code.co_name)


def _of_loss(frames: traceback.StackSummary, place: tuple[str, str]) -> Iterator[traceback.FrameSummary]:
    """From the loss on, the frames of the user's; not those below a forward that it calls."""
    is_inside = False
    for frame in frames:
        is_inside = (is_inside and frame.name != "forward") or (frame.filename, frame.name) == place
        if is_inside and not is_foreign_frame(frame.filename):
            yield frame

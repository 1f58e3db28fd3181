"""What captures of one model at several sizes share."""

from __future__ import annotations

from dataclasses import dataclass

from planner.capture.again.first_export import FirstExport


@dataclass
class Earlier:
    """Given to each capture of one model, for one loss and dtype. ``first``: the first export, if it can be resized.

    ``was_repeated``: whether a forward at another size was called twice, as the first was, and computed the same. That
    shows state which no attribute shows; more sizes are called once.
    """

    first: FirstExport | None = None
    was_repeated: bool = False

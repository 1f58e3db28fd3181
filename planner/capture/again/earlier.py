"""What captures of one model at several sizes share."""

from __future__ import annotations

from dataclasses import dataclass

from planner.capture.again.first_export import FirstExport


@dataclass
class Earlier:
    """Given to each capture of one model, for one loss and dtype. ``first``: the first export, if it can be resized."""

    first: FirstExport | None = None

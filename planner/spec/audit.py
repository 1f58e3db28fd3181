"""The section ``audit``: how often a run is compared with the user's own module. A plan does not depend on it."""

from __future__ import annotations

from typing import Literal

from planner.spec.fields import Positive, Section, Size, key


class AuditSpec(Section):
    every: Size | None = key(
        None, "in each N-th step, one microbatch runs through the model itself and its loss is compared; null: never"
    )
    on_difference: Literal["stop", "warn"] = key("stop", "stop | warn")
    tolerance: Positive | None = key(None, "relative; null: by the lowest precision that the model computes in")

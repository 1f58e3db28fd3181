"""The section ``audit``: how often a run is compared with the user's own module. A plan does not depend on it."""

from __future__ import annotations

from typing import Literal

from planner.spec.fields import Positive, Section, Size, key


class AuditSpec(Section):
    every: Size | None = key(
        None, "every N-th step, the loss of one microbatch is compared with the model itself; null: never"
    )
    on_difference: Literal["stop", "warn"] = key("stop", "stop | warn")
    tolerance: Positive | None = key(
        None, "relative; null: depends on the lowest precision in the computation of the model"
    )

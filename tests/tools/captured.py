"""``capture`` as the recipe calls it: with the ops of the rule table."""

from __future__ import annotations

from functools import partial

from passes.partition.typings.table import has_rule
from planner.capture.export import capture as capture_with

capture = partial(capture_with, has_rule=has_rule)

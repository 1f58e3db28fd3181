"""``capture`` as the recipe calls it."""

from planner.capture.export import capture

__all__ = ["capture"]

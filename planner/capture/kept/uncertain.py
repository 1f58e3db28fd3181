"""Why a capture is not kept."""

from __future__ import annotations


class Uncertain(Exception):
    """Something that a capture depends on, or a part of it, has no certain form: the model is captured each time."""

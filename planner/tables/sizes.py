"""Sizes for eyes."""

from __future__ import annotations


def format_bytes(num_bytes: int) -> str:
    """``1536`` is ``1.50 KiB``; under 1 KiB in bytes."""
    value: float = num_bytes
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"

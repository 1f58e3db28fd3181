"""Bytes and seconds in readable units."""


def format_bytes(num_bytes: int) -> str:
    """Return ``1.50 KiB`` for 1536; below 1 KiB in bytes."""
    value: float = num_bytes
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return ``1.234 s``, ``12.345 ms`` or ``3.2 us``."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"

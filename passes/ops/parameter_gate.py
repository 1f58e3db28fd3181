"""The handle through which a graph waits for parameters that other ranks have updated and are still sending."""

from __future__ import annotations

from collections.abc import Callable


class ParameterGate:
    """One rank's gathers as its graphs see them: the runtime binds ``wait``, which returns when a bucket is here."""

    def __init__(self) -> None:
        self.wait: Callable[[int, int], None] | None = None

    def __repr__(self) -> str:
        return "gate"


def await_bucket(gate: ParameterGate, buffer: int, bucket: int) -> None:
    """The parameters of a bucket may be read from here on. Unbound, they never were away."""
    if gate.wait is not None:
        gate.wait(buffer, bucket)

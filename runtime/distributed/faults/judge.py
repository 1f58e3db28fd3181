"""Decide which watched ranks are dead: by the kernel for ranks of this host, by missing heartbeats for others.

    on this host     its process is gone                                          dead
                     its process is stopped, and beats no more for a while        dead
                     its process runs, however silent                             alive: it may hold its interpreter
    elsewhere        silent for long                                              dead
                     silent, and connections of peers were closed                 dead sooner

A judge that was itself held up restarts its counts: a machine that slept is not dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.distributed.faults.board import Pulse
from runtime.distributed.faults.processes import State

BEAT_SECONDS = 1.0
STOPPED_SECONDS = 6.0
REMOTE_SECONDS = 30.0
LOST_SECONDS = 6.0
HELD_UP_SECONDS = 4.0
STOPPED = "its process is stopped (SIGSTOP)"


class Judge:
    """Owns when each rank was last heard, by this rank's clock."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._heard: dict[int, tuple[int, float]] = {}
        self._gone: set[int] = set()
        self._looked = 0.0

    def dead(
        self, pulses: Iterable[Pulse], states: Mapping[int, State], now: float, *, peers_were_lost: bool
    ) -> dict[int, str]:
        """Rank → why. ``states``: of the processes of this host, by rank."""
        was_held_up = now - self._looked > HELD_UP_SECONDS
        self._looked = now
        found = {}
        gone = set()
        for pulse in pulses:
            beat, heard = self._heard.get(pulse.rank, (-1, now))
            if pulse.beat != beat or was_held_up:
                heard = now
            self._heard[pulse.rank] = (pulse.beat, heard)
            state = states.get(pulse.rank, "unknown") if pulse.host == self.host else "unknown"
            if state == "gone" and not pulse.has_left:
                gone.add(pulse.rank)
            reason = _reason(state, now - heard, peers_were_lost, pulse.rank in self._gone)
            if reason and not pulse.has_left:
                found[pulse.rank] = reason
        self._gone = gone  # a second look: a rank that ends well reports it before it ends
        return found


def _reason(state: State, silent: float, peers_were_lost: bool, was_gone: bool) -> str:
    if state == "gone":
        return "its process has died" if was_gone else ""
    if state == "stopped":
        return f"{STOPPED}, no heartbeat for {silent:.0f} s" if silent > STOPPED_SECONDS else ""
    if state == "unknown" and silent > (LOST_SECONDS if peers_were_lost else REMOTE_SECONDS):
        return f"no heartbeat for {silent:.0f} s: its process or its host is down"
    return ""

"""Imported by the fork server of ``launch`` alone, before any rank starts: SIGTERM to all processes of a job, as
``timeout``, Slurm and systemd send it, is for the launcher and the ranks. The server ends with the launcher.

Were it to end first, every rank would seem to have failed, while each finishes its step.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ranks inherit it, and heed the signal again when they begin

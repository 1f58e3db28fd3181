"""Imported by the fork server of ``launch`` alone, before any rank starts. A signal to all processes of a job, as
``timeout``, Slurm and systemd send it, is for the launcher and the ranks. The server ends with the launcher.

Were it to end first, every rank would seem to have failed, while each finishes its step.
"""

import signal

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)  # ranks inherit it, and heed the signal again when they begin

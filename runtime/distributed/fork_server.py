"""Makes the fork server of ``launch`` ignore signals: it alone imports this module, before any rank starts.

``timeout``, Slurm and systemd signal all processes of a job. If the server ended before the launcher, every rank would
seem to have failed, while each finishes its step.
"""

import signal

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)  # inherited by ranks, which restore the default when they begin

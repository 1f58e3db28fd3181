"""The limit of everything that a test waits for and that can hang: a rank, a process, a thread, a group.

A limit ends what hangs. It never decides whether a test passes: a busy machine is no fault of what is tested, and
imports alone may take a minute there. pytest's own limit of a test (``timeout`` in pyproject.toml) is longer, so that
what hung is named. A test whose subject is a short limit gives that number a name.
"""

HANG_SECONDS = 300.0

"""A Python process of its own, and all that it has written."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT


def python(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python arguments`` with the packages of this repository, one thread, and more in its environment."""
    command = [sys.executable, *map(str, arguments)]
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=cwd, env=known, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )

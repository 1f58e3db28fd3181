"""Run the worker over models and give a row for each, whatever becomes of the worker."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.other_models.catalogue import Listed

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_SECONDS = 600


def rows_of(wanted: list[Listed]) -> Iterator[tuple[Listed, dict[str, Any]]]:
    """Each model with its row; one that crashes the worker or does not end costs only itself."""
    for listed in wanted:
        if listed.version is None:
            yield listed, {"result": "not installed"}
    waiting = [listed for listed in wanted if listed.version is not None]
    while waiting:
        for row in _worker([listed.build for listed in waiting]):
            yield waiting.pop(0), row


def _worker(builds: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of one worker process; the last is that of the model that ended it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.other_models.worker", *builds]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdout is not None
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            for _ in builds:
                text = lines.get(timeout=TIMEOUT_SECONDS)
                if not text:
                    errors.seek(0)
                    yield {"result": "crashed", "detail": errors.read().decode(errors="replace").strip()[-3000:]}
                    return
                yield json.loads(text)
        except queue.Empty:
            yield {"result": "no end", "detail": f"ended after {TIMEOUT_SECONDS} s"}
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # it and its ranks: no other process is in this group
            process.wait()


def _read(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Each line, then an empty one at the end."""
    for text in stream:
        lines.put(text)
    lines.put(b"")

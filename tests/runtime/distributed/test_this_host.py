"""A launch on a host that lacks something is one error, before any rank starts."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from passes.errors import PlanError
from runtime.distributed import this_host
from runtime.distributed.launch import launch
from runtime.profiling.memory import compare_memory
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

LIMITED = """
import resource
from runtime.distributed.this_host import check_host
for soft, hard in ((20, 80), (20, 32)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        check_host()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))
    except Exception as error:
        print(error)
"""


def test_a_directory_whose_sockets_would_have_too_long_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_host.util, "get_temp_dir", lambda: f"/{'d' * this_host.MOST_BYTES}")
    with pytest.raises(PlanError, match="has a path of 81 bytes, and a socket in it takes at most 80") as caught:
        launch(print, 1)
    assert caught.value.where == "TMPDIR"


@pytest.mark.thorough
def test_the_limit_of_open_files_is_raised_or_refused() -> None:
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    raised, what, at, fix = done.stdout.splitlines()
    assert raised == "(80, 80)"
    assert what == "a process may have 32 files open, and ranks need 64 or more"
    assert at == "  at:  the limit of open files"
    assert "`ulimit -n 1024`" in fix
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


def test_a_host_without_its_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_host, "HOST", "192.0.2.1")  # kept for documentation: no host has it
    with pytest.raises(PlanError, match="ranks of one host reach each other over") as caught:
        launch(print, 1)
    assert "ip link set lo up" in caught.value.fix
    with pytest.raises(PlanError, match="ranks of one host reach each other over"):  # before the model is built
        compare_memory("nowhere.py:build", "examples/gpt.yaml")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match="to which nothing can connect"):
        this_host.stay_on_one_host()

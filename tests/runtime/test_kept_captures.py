"""Commands on one model, of one rank or several, capture it once; training from a kept capture is the same training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

SPEC = """
mesh: {tp: TP}
batch: {global: 4, micro: 2}
inputs: {input_ids: {shape: [16], dtype: int64, high: 256}, targets: {like: input_ids}}
cluster: cpu-local
devices: 2
"""
TOLD = """
import logging
logger = logging.getLogger("meshwright.captures")
logger.addHandler(logging.FileHandler("told.txt"))
logger.setLevel(logging.DEBUG)
"""


def run(directory: Path, *arguments: str) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{directory / 'site-packages'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "MESHWRIGHT_CACHE": str(directory / "cache"),
    }
    command = [sys.executable, "-m", "runtime", *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def told(directory: Path) -> list[str]:
    return [line.partition(":")[0] for line in (directory / "told.txt").read_text().splitlines()]


def losses(log: Path) -> list[float]:
    rows = map(json.loads, log.read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.thorough
@pytest.mark.slow
def test_plan_search_and_ranks_capture_once_and_training_is_the_same(tmp_path: Path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "sitecustomize.py").write_text(TOLD)
    (tmp_path / "two.yaml").write_text(SPEC.replace("TP", "2"))
    (tmp_path / "auto.yaml").write_text(SPEC.replace("TP", "auto"))
    model = str(ROOT / "examples" / "gpt.py") + ":build"
    run(tmp_path, "plan", model, "two.yaml")
    run(tmp_path, "search", model, "auto.yaml")
    training = ["train", model, "two.yaml", "--data", "stdlib", "--steps", "2"]
    run(tmp_path, *training, "--log", "kept.jsonl")
    assert told(tmp_path) == ["captured", "kept", *["read"] * 4]  # search; before the ranks; two ranks
    run(tmp_path, *training, "--log", "fresh.jsonl", "--no-cache")
    assert told(tmp_path)[6:] == ["captured"] * 3
    assert len(losses(tmp_path / "kept.jsonl")) == 2
    assert losses(tmp_path / "kept.jsonl") == losses(tmp_path / "fresh.jsonl")

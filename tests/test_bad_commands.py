"""A command with bad input ends with one message on stderr, exit code 2, no traceback, and no rank left over."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.cli import app
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

INPUTS = "inputs: {input_ids: {shape: [8], dtype: int64, high: 256}, labels: {like: input_ids}}"
SPEC = f"""mesh: {{tp: 2, pp: 2}}
batch: {{global: 8, micro: 2}}
{INPUTS}
optimizer: {{lr: 1.0e-3, betas: [0.9, 0.95]}}
"""


def run_command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a session of its own; fails where it hangs or leaves a process behind."""
    command = [sys.executable, "-m", "runtime.cli", *arguments]
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = started.communicate(timeout=HANG_SECONDS)
    finally:
        left = is_anyone_left(started.pid)
        if left:
            os.killpg(started.pid, 9)
    assert not left, "a process is left"
    return subprocess.CompletedProcess(command, started.returncode, out, err)


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: of one that begins no other it shows as much, and imports nothing anew."""
    ended = CliRunner().invoke(app, arguments)
    return subprocess.CompletedProcess(arguments, ended.exit_code, ended.stdout, ended.stderr)


def is_anyone_left(group: int) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


BAD = "tests/models/refused.py"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "old", "new", "words"),
    [
        (["plan", f"{BAD}:Branch"], "", "", ["data-dependent", "refused.py:", "if input.sum() > 0:"]),
        (["verify", f"{BAD}:Branch"], "", "", ["data-dependent", "refused.py:", "if input.sum() > 0:"]),
        (["plan", f"{BAD}:TensorHook"], "", "", ["a hook on a gradient would be lost", "layers.1", "refused.py:"]),
        (["train", f"{BAD}:NoLoss", "--data", "stdlib"], "", "", ["no output of the model is a loss", "at:"]),
        (["train", f"{BAD}:Base", "--data", "stdlib", "--nproc", "3"], "", "", ["--nproc 3", "needs 4 processes"]),
        (["verify", f"{BAD}:Base"], "pp: 2", "pp: 3", ["only 2 blocks", "spec.yaml:1"]),
        (["verify", f"{BAD}:Base"], "batch:", "bach:", ["unknown key 'bach'", "spec.yaml:2", "did you mean 'batch'"]),
        (["verify", f"{BAD}:Missing"], "", "", ["no 'Missing' in refused", "Branch"]),
    ],
)
def test_a_command_ends_with_one_message_and_exit_code_2(
    tmp_path: Path, arguments: list[str], old: str, new: str, words: list[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.replace(old, new) if old else SPEC)
    command, model, *rest = arguments
    run = run_command if command == "train" else run_here
    assert_one_message(run(command, model, str(spec), *rest), words)


EXPERTS = "tests/models/experts.py"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "more", "words"),
    [
        (
            f"{EXPERTS}:small",
            "{dp: 3, ep: 3}",
            "",
            ["4 experts are not divisible by ep = 3", "choose ep from {1, 2, 4}"],
        ),
        (
            f"{EXPERTS}:small",
            "{dp: 8, etp: 8}",
            "",
            ["width 12 is not divisible by etp = 8", "choose etp from {1, 2, 3"],
        ),
        (
            f"{EXPERTS}:small",
            "{tp: 2, ep: 4, etp: 1}",
            "",
            ["world size 2 is not divisible by etp·ep·pp", "spec.yaml:1"],
        ),
        (f"{EXPERTS}:not_understood", "{dp: 2, ep: 2}", "", ["not recognized", "experts.py:", "set ep: 1"]),
        (f"{BAD}:Base", "{tp: 2, dp: 2, ep: 2}", "", ["has no experts with a router", "spec.yaml:1"]),
        (
            f"{EXPERTS}:small",
            "{dp: 2, ep: 2}",
            "cuda_graphs: {impl: emulate, scope: [moe]}\n",
            ["no block of the model has a part moe that a graph could capture", "spec.yaml:5"],
        ),
    ],
)
def test_experts_that_do_not_fit_the_mesh_are_one_message(
    tmp_path: Path, model: str, mesh: str, more: str, words: list[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    given = SPEC.replace("{tp: 2, pp: 2}", mesh).replace("{global: 8, micro: 2}", "{global: 24, micro: 1}")
    high = "high: 24" if EXPERTS in model else "high: 256"
    spec.write_text(
        given.replace("shape: [8]", "shape: [6]" if EXPERTS in model else "shape: [8]").replace("high: 256", high)
        + more
    )
    assert_one_message(run_here("plan", model, str(spec)), words)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_world_that_is_not_the_plans_ends_every_rank_at_once(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    launched = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = run_command("train", f"{BAD}:Base", str(spec), "--data", "stdlib", environment=launched)
    assert_one_message(ended, ["the plan is for 4 ranks", "2 were launched"])


def assert_one_message(ended: subprocess.CompletedProcess[str], words: list[str]) -> None:
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("Error:") == 1
    assert ended.stderr.count("fix:") == 1
    assert all(word in ended.stderr for word in words), ended.stderr

"""The launch files of the examples: what bash, Kubernetes, torchrun and meshwright read in them; sizes agree."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from planner.spec.spec import Spec
from runtime.cli import app
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

LAUNCH = ROOT / "examples" / "launch"
SLURM, OWN_MODEL, KUBERNETES = (LAUNCH / n for n in ("slurm.sbatch", "own_model.sbatch", "kubernetes.yaml"))


@dataclass(frozen=True)
class Launch:
    """A command as torchrun reads it, and its train command as meshwright does."""

    torchrun: Any
    train: dict[str, Any]

    @classmethod
    def of(cls, words: list[str]) -> Launch:
        run = get_args_parser().parse_args(words)
        assert (run.module, run.training_script) == (True, "runtime.cli")
        name, *options = run.training_script_args
        command = typer.main.get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        assert name == "train"
        return cls(run, command.make_context(name, options).params)  # unknown or missing options raise

    @property
    def num_ranks(self) -> int:
        return int(self.torchrun.nnodes) * int(self.torchrun.nproc_per_node)


def sbatch_options(file: Path = SLURM) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", file.read_text(), re.MULTILINE))


def of_slurm(file: Path = SLURM) -> Launch:
    text = file.read_text().replace("\\\n", " ")
    (line,) = (line.removesuffix("&") for line in text.splitlines() if line.startswith("srun "))
    given = {"SLURM_NNODES": sbatch_options(file)["nodes"], "SLURM_JOB_ID": "7"}
    words = [re.sub(r"\$(\w+)", lambda name: given.get(name[1], name[1]), word) for word in shlex.split(line)]
    return Launch.of(words[words.index("torchrun") + 1 :])


def documents() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(KUBERNETES.read_text())}


def of_kubernetes() -> Launch:
    (container,) = documents()["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    return Launch.of(container["args"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("launch", [of_slurm, of_kubernetes])
def test_ranks_are_those_of_the_mesh_and_a_broken_run_goes_on(launch):
    found = launch()
    assert found.num_ranks == Spec.load(ROOT / found.train["spec"]).mesh.to_mesh().world_size
    assert (ROOT / found.train["model"].removeprefix("hf:")).is_file()
    assert Path(found.train["model"]).stem == found.train["spec"].stem
    assert found.train["resume"] == "auto"
    assert found.train["save"]
    assert found.torchrun.max_restarts == 3
    assert found.train["steps"] == Spec.load(ROOT / found.train["spec"]).optimizer.schedule.steps


def test_an_option_that_meshwright_lacks_is_found():
    with pytest.raises(Exception, match="No such option"):
        Launch.of(["-m", "runtime.cli", "train", "m", "s", "--data", "d", "--sav-every", "3"])


def test_the_slurm_file_is_a_shell_script_of_one_torchrun_a_server():
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    options = sbatch_options()
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == of_slurm().torchrun.nproc_per_node


def test_the_slurm_file_runs_torchrun_with_words_that_need_no_shell_of_ours(tmp_path):
    """Run by bash, with stand-ins for Slurm's commands that print what they were given."""
    for name, body in {"scontrol": "printf 'a1\\na2\\n'", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_NNODES": "32",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a[1-2]",
    }
    ran = subprocess.run(
        ["bash", str(SLURM), "my text", "saves"], env=given, capture_output=True, text=True, check=True
    )
    words = ran.stdout.splitlines()
    found = Launch.of(words[words.index("torchrun") + 1 :])
    assert found.torchrun.rdzv_endpoint == "a1:29500"
    assert (found.train["data"], found.train["save"], found.num_ranks) == (["my text"], "saves", 512)


def test_the_kubernetes_job_has_a_pod_a_node_under_names_that_its_service_gives():
    service, job = documents()["Service"], documents()["Job"]
    name, pods, found = job["metadata"]["name"], job["spec"], of_kubernetes()
    pod = pods["template"]["spec"]
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == ("None", {"job-name": name})
    assert pod["subdomain"] == service["metadata"]["name"]
    assert found.torchrun.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:{service['spec']['ports'][0]['port']}"
    assert (pods["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert pods["completions"] == pods["parallelism"] == int(found.torchrun.nnodes)
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(found.torchrun.nproc_per_node)
    mounts, volumes = ({entry["name"] for entry in entries} for entries in (container["volumeMounts"], pod["volumes"]))
    assert mounts == volumes
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(
        any(Path(named).is_relative_to(p) for p in places) for named in (*found.train["data"], found.train["save"])
    )


def test_the_job_of_an_own_model_names_options_that_torchrun_and_meshwright_have():
    found = of_slurm(OWN_MODEL)
    assert found.num_ranks == 32
    assert set(found.torchrun.signals_to_handle.split(",")) == {"SIGTERM", "SIGINT", "SIGUSR1"}
    assert (found.train["resume"], found.train["save_every"]) == ("auto", 500)


SRUN = """#!/bin/bash
echo "$@" > started
[[ $MESHWRIGHT_SECRET == "of this test" && $NCCL_SOCKET_IFNAME == lo && $GLOO_SOCKET_IFNAME == lo ]] || exit 3
%s
"""
WAITS = "trap 'echo saved > saved; exit 1' USR1; while true; do sleep 0.05; done"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "code", "is_signalled"), [(WAITS, 0, True), ("exit 0", 0, False), ("exit 7", 7, False)]
)
def test_the_job_of_an_own_model_is_requeued_after_a_signal_alone(tmp_path, body: str, code: int, is_signalled: bool):
    commands = {
        "srun": SRUN % body,
        "scontrol": '#!/bin/bash\n[[ $1 == show ]] && echo localhost || echo "$@" > requeued\n',
    }
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    (tmp_path / "secret").write_text("of this test")
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    of_slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "INTERFACE": "lo"}
    environment = {**os.environ, **of_slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", OWN_MODEL, "m.py:build", "s.yaml", "d", "saves"], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + HANG_SECONDS
    while is_signalled and not (tmp_path / "saved").exists():  # again: the trap may not be set yet
        assert time.monotonic() < deadline
        if (tmp_path / "started").exists():
            job.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
    assert job.wait(HANG_SECONDS) == code
    assert (tmp_path / "requeued").exists() == is_signalled

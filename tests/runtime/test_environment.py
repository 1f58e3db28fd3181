"""`meshwright env`: what a bug report needs, and nothing that names a machine or a person."""

import json
import socket
from importlib.metadata import version
from pathlib import Path

import torch
from typer.testing import CliRunner

from runtime.cli import app


def report(*options: str, **variables: str) -> str:
    done = CliRunner().invoke(app, ["env", *options], env=variables)
    assert done.exit_code == 0, done.output
    return done.output


def test_versions_and_devices_are_those_of_this_process():
    told = json.loads(report("--format", "json"))
    assert told["versions"]["torch"] == torch.__version__
    assert {"meshwright", "numpy", "pydantic", "transformers", "transformer-engine"} <= told["versions"].keys()
    assert told["versions"]["jinja2"] == version("jinja2")
    assert told["machine"]["threads of torch"] == str(torch.get_num_threads())
    assert bool(told["devices"].get("cuda:0")) == torch.cuda.is_available()


def test_the_table_says_what_the_json_says():
    told, table = json.loads(report("--format", "json")), report()
    lines = [line.split(maxsplit=1) for line in table.splitlines()]
    for title, rows in told.items():
        assert title.split() in [line for line in lines if line] or title in table
        for how in rows.values():
            assert how in table


def test_settings_that_change_a_run_are_told_but_no_name_of_a_network_or_file():
    given = {"NCCL_ALGO": "Ring", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    told = json.loads(report("--format", "json", **given, NCCL_SOCKET_IFNAME="secret0", HOME="/home/me"))
    assert told["settings"].items() >= given.items()
    assert told["settings"]["NCCL_SOCKET_IFNAME"] == "(set)"
    text = json.dumps(told)
    assert not any(word in text for word in ("secret0", "/home/me", socket.gethostname(), str(Path.cwd())))

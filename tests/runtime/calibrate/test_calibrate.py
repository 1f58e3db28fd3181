"""The command `calibrate`: bad input before anything is measured, and one real file."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from passes.errors import PlanError
from planner.cluster.cluster import GPU_SLACK, read_cluster
from planner.commands.cli import write_text
from planner.files.text import check_file
from runtime.calibrate import run
from runtime.calibrate.measuring import reserved_share, train
from runtime.cli import app
from runtime.distributed.launch import RankError


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(run, "launch", refuse)


@pytest.mark.usefixtures("never_started")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "0"], "0 ranks cannot be measured"),
        (["--nproc", "100000"], "100000 ranks cannot be measured"),
        (["--seconds", "0"], "0 s are too short to measure anything"),
        (["--seconds", "nan"], "nan s are too long"),
        (["--seconds", "1e9"], "1e+09 s are too long"),
        (["-o", "no/such/folder/c.yaml"], "cannot write no/such/folder/c.yaml"),
        (["-o", "."], "it is a directory"),
    ],
)
def test_bad_input_is_one_error_before_a_rank_starts(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_rank_that_fails_is_one_error_and_no_file(tmp_path, monkeypatch):
    def fail(*args: object, **more: object) -> None:
        raise RankError("rank 1 ended by SIGKILL")

    monkeypatch.setattr(run, "launch", fail)
    result = CliRunner().invoke(app, ["calibrate", "-o", str(tmp_path / "c.yaml")])
    assert result.exit_code == 1
    assert "rank 1 ended by SIGKILL" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_is_exchanged_whole(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("old")
    write_text("new", path)
    assert path.read_text() == "new\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.yaml"]
    with pytest.raises(PlanError, match="cannot write"):
        check_file(tmp_path, "--output")


@pytest.mark.thorough
@pytest.mark.slow
def test_this_machine_is_measured_and_its_file_is_read_again(tmp_path):
    path = tmp_path / "here.yaml"
    result = CliRunner().invoke(app, ["calibrate", "-o", str(path), "--nproc", "2", "--seconds", "1"])
    assert result.exit_code == 0, result.stderr
    cluster = read_cluster(str(path))
    assert (cluster.name, cluster.devices) == ("here", 2)
    assert {"float32", "bfloat16", "float64"} <= set(cluster.device.flops)
    assert cluster.device.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    assert cluster.device.flops["float32"] > cluster.device.flops["float64"] / 2
    text = path.read_text()
    assert all(kind in text for kind in ("all_reduce of", "all_gather of", "reduce_scatter of", "p2p of"))


def test_recomputed_layers_have_the_gradients_of_kept_ones() -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        found.append(train(torch.device("cpu"), again=again, width=16, length=4))
    assert all(torch.equal(kept, recomputed) for kept, recomputed in zip(*found, strict=True))
    assert len(found[0]) == 4 * 6 + 1


@pytest.mark.gpu
def test_a_gpu_reserves_a_plausible_share() -> None:
    share = reserved_share(torch.device("cuda"))
    assert share is None or GPU_SLACK <= share < 0.5

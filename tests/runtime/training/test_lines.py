"""A run that goes on from an earlier save begins a line of its own: nothing later in the directory leads it astray."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from planner import PlanError, plan
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.checkpoint.lines import Line
from runtime.checkpoint.manifest import MANIFEST, read_manifest
from runtime.checkpoint.saves import by_newest, latest_in, prune, saves_in, write_latest
from runtime.engine.engine import Engine
from runtime.training.job import Job, check_saves
from runtime.training.options import AUTO
from runtime.training.saving import RunSaves
from tests.tools.checkpoints import Own
from tests.tools.small_saves import save

SPEC = {"mesh": {"tp": 1}, "batch": {"global": 2, "micro": 2}, "inputs": {"ids": {"shape": [3], "dtype": "int64"}}}
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(scope="module")
def model() -> Own:
    """Kept: each engine takes its weights."""
    torch.manual_seed(0)
    return Own()


@pytest.fixture(scope="module")
def decided(model: Own) -> Plan:
    return plan(model, Spec.load(SPEC))


class Runs:
    """Runs of one plan that save to one directory, as a launcher would start them."""

    def __init__(self, decided: Plan, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.decided, self.patch = decided, patch
        self.job = Job("", "", "", 100, save=str(directory), save_every=2)

    def start(self, run: str, until: int, restart: int = 0, resume: str | None = None, keep: int | None = None) -> int:
        """Train to step ``until``, and end as by a kill; the step that it went on from."""
        self.patch.setenv("TORCHELASTIC_RUN_ID", run)
        self.patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        job = replace(self.job, resume=resume, keep=keep)
        with Engine(self.decided) as engine, RunSaves(engine, job, {}) as saves:
            saves.resumed()
            first = engine.step_index
            while engine.step_index < until:
                engine.train_step({"ids": IDS})
                saves.after_step()
        return first


@pytest.fixture
def runs(decided: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(decided, tmp_path, monkeypatch)


def names(directory: Path) -> list[str]:
    return [save.name for save in saves_in(directory)]


def test_a_restart_goes_on_from_the_named_save_and_not_from_a_later_one_of_another_run(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert runs.start("first", 6) == 0
    named = str(tmp_path / "step-00000002")
    assert runs.start("second", 3, resume=named) == 2
    assert runs.start("second", 5, restart=1, resume=named) == 2  # not 6, which is of the first run
    told = capfd.readouterr().err
    assert "warning: step-00000004, step-00000006" in told
    assert "belong to another line of saves" in told
    own = names(tmp_path)[2]
    assert own.startswith("step-00000004-")
    assert latest_in(tmp_path) == tmp_path / own
    assert runs.start("second", 5, restart=2, resume=named) == 4
    assert f"resuming from {tmp_path / own}" in capfd.readouterr().err
    assert runs.start("third", 5, resume=AUTO) == 4  # of the line that was written last


def test_each_save_has_its_line_and_its_parent(runs: Runs, tmp_path: Path) -> None:
    runs.start("first", 4)
    runs.start("second", 4, resume=str(tmp_path / "step-00000002"))
    (first, two), (second, four), (branch, _) = (read_manifest(save) for save in saves_in(tmp_path))
    assert first.line.parent is None
    assert second.line.id == first.line.id != branch.line.id
    assert second.line.parent == branch.line.parent == two
    assert branch.line.before == ((first.line.id, 2),)
    assert four != two


def test_only_saves_of_its_own_line_count_for_keep(runs: Runs, tmp_path: Path) -> None:
    """Later ones of a training that was given up stay, and take no place."""
    runs.start("first", 8)
    kept = ["step-00000004", "step-00000006", "step-00000008"]
    runs.start("second", 8, resume=str(tmp_path / "step-00000002"), keep=2)
    found = names(tmp_path)
    assert [name for name in found if "-" not in name[5:]] == kept
    assert [name[:13] for name in found if "-" in name[5:]] == ["step-00000004", "step-00000006", "step-00000008"]
    runs.start("second", 9, restart=1, resume=AUTO, keep=2)
    runs.start("second", 10, restart=2, resume=AUTO, keep=2)
    assert [name[:13] for name in names(tmp_path) if name not in kept] == [f"step-{n:08d}" for n in (6, 8, 10)]


def test_a_restart_before_the_first_save_takes_nothing_of_an_earlier_run(runs: Runs, tmp_path: Path) -> None:
    runs.start("first", 2)
    with pytest.raises(PlanError, match="has saves of an earlier run"):
        runs.start("second", 3, restart=1)
    check_saves(runs.job, goes_on=True)


def test_a_save_of_the_version_before_is_gone_on_from(runs: Runs, tmp_path: Path) -> None:
    """It has no line; what goes on from it has."""
    runs.start("first", 2)
    path = tmp_path / "step-00000002" / MANIFEST
    content = json.loads(path.read_bytes())["manifest"]
    del content["line"]
    inner = json.dumps(content | {"version": 1}).encode()
    path.write_bytes(b'{"checksum": "%s", "manifest": %s}\n' % (xxhash.xxh3_128_hexdigest(inner).encode(), inner))
    assert runs.start("second", 4, resume=AUTO) == 2
    old, new = (read_manifest(save)[0] for save in saves_in(tmp_path))
    assert old.line.id == ""
    assert ("", 2) in new.line.before


def test_saves_go_on_where_old_ones_cannot_be_removed(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "step-00000002":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    runs.start("first", 8, keep=1)
    assert "step-00000008" in names(tmp_path)
    assert "warning: cannot remove old saves: Permission denied" in capfd.readouterr().err


def test_a_save_that_lost_its_manifest_is_named(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs.start("first", 4)
    (tmp_path / "step-00000004" / MANIFEST).unlink()
    assert runs.start("second", 3, resume=AUTO) == 2
    assert f"warning: step-00000004 in {tmp_path} have no manifest and are not saves" in capfd.readouterr().err


def damaged(directory: Path) -> str:
    (directory / "latest").write_text("damaged")
    return "latest is damaged"


def absent(directory: Path) -> str:
    (directory / "latest").unlink()
    return "there is no latest"


def gone(directory: Path) -> str:
    write_latest(directory, "step-00000008")
    return "latest names step-00000008, which is gone"


def of_a_damaged_save(directory: Path) -> str:
    write_latest(directory, "step-00000002")
    (directory / "step-00000002" / MANIFEST).write_text("damaged")
    return "latest names step-00000002, which is damaged"


LOSSES = [damaged, absent, gone, of_a_damaged_save]
ABANDONED, BEGUN = Line(id="a" * 32), Line(id="b" * 32, before=(("a" * 32, 4),))


@pytest.mark.parametrize("lose", LOSSES)
def test_without_latest_the_youngest_line_counts_and_not_the_largest_step(tmp_path: Path, lose) -> None:
    for step in (2, 4, 30):
        save(tmp_path, step, 1.0, ABANDONED)
    save(tmp_path, 5, 2.0, BEGUN)
    save(tmp_path, 6, 2.0, BEGUN)
    lost = lose(tmp_path)
    found, told = by_newest(tmp_path)
    assert [each.name for each in found] == [f"step-{step:08d}" for step in (6, 5, 4, 2)]
    assert [error.what for error in told] == (
        [] if lose is of_a_damaged_save else [lost]
    )  # the save is tried, and told
    if lose is absent:
        assert latest_in(tmp_path) == tmp_path / "step-00000006"


@pytest.mark.parametrize("lose", LOSSES)
def test_without_latest_two_lines_that_are_no_chain_are_one_error_with_the_last_save_of_each(
    tmp_path: Path, lose
) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, 1.0, ABANDONED)
    for line in (BEGUN, BEGUN.model_copy(update={"id": "c" * 32})):
        save(tmp_path, 5, 2.0, line)
    lost = lose(tmp_path)
    with pytest.raises(PlanError) as caught:
        by_newest(tmp_path)
    assert caught.value.what.startswith(f"{lost}, and 3 lines of saves are there of which none continues all others; ")
    for name in ("step-00000006", "step-00000005", "step-00000005-cccccccc"):
        written = read_manifest(tmp_path / name)[0].written
        assert f"{name} (step {int(name[5:13])}, written {written})" in caught.value.what
        assert f"--resume {tmp_path / name}" in caught.value.fix
    with pytest.raises(PlanError):
        prune(tmp_path, 1)
    assert prune(tmp_path, 1, BEGUN)[-1] == tmp_path / "step-00000004"  # a run knows its own line


def test_a_run_that_goes_on_by_itself_says_what_was_lost_and_where_it_cannot_know(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs.start("first", 6)
    runs.start("second", 4, resume=str(tmp_path / "step-00000002"))
    damaged(tmp_path)
    assert runs.start("third", 4, resume=AUTO) == 4
    told = capfd.readouterr().err
    assert "skipped: latest is damaged" in told
    assert f"resuming from {tmp_path / names(tmp_path)[2]}" in told
    runs.start("fourth", 8, resume=str(tmp_path / "step-00000006"))
    absent(tmp_path)
    with pytest.raises(PlanError, match="there is no latest, and 3 lines of saves are there"):
        runs.start("fifth", 8, resume=AUTO)

"""Saves that are damaged, mixed or foreign: refused with the name of the file, and the engine is as it was."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner import PlanError, plan
from planner.spec.spec import Spec
from runtime.checkpoint.saves import resolve, saves_in, verify
from runtime.cli import app
from runtime.engine.engine import Engine
from tests.models import families
from tests.tools.laboratory import Case, Lab, spec_of
from tests.tools.resumed import same_state, save_twice, state_of, steps
from tests.tools.small_saves import newest_intact

pytestmark = pytest.mark.slow
ONE = Case("gpt", {"dp": 1})
OLD, NEW = "step-00000003", "step-00000004"


@pytest.fixture(scope="module")
def pristine(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saves of four ranks."""
    directory = tmp_path_factory.mktemp("saves") / "run"
    lab.run(Case("gpt", {"tp": 2, "dp": 2}, job=save_twice, job_arguments=(directory,)))
    return directory


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One process, two steps further than it began."""
    entry = families.build("gpt")
    with Engine(plan(entry.model, Spec.load(spec_of(entry, ONE)))) as made:
        steps(made, [entry.batch(ONE.num_sequences, 0)], 2)
        yield made


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def assert_refused(engine: Engine, directory: Path, *words: str) -> None:
    before = state_of(engine)
    with pytest.raises(PlanError) as caught:
        engine.load(directory)
    assert same_state(state_of(engine), before)
    for word in words:
        assert word in str(caught.value)


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in (run / NEW).iterdir())


@pytest.mark.thorough
def test_a_flipped_bit_in_any_file_at_any_of_fifty_places(engine: Engine, run: Path) -> None:
    draw = random.Random(7)
    files = [*files_of(run), run / "latest"]
    assert [path.name for path in files] == [
        "manifest.json",
        *(f"rank-{r:05d}.safetensors" for r in range(4)),
        "latest",
    ]
    for path in files:
        whole = path.read_bytes()
        places = {0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(48))}
        for place in places:
            content = bytearray(whole)
            content[place] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            assert_refused(engine, run, path.name)
        path.write_bytes(whole)
    engine.load(run)


def test_the_command_tells_the_layout(pristine: Path) -> None:
    listed = CliRunner().invoke(app, ["checkpoint", str(pristine), "--verify"])
    assert listed.exit_code == 0
    assert "tp 2 · dp 2, ZeRO-1" in listed.stdout
    assert "etp" not in listed.stdout


def test_every_bit_of_latest_counts(run: Path) -> None:
    whole = (run / "latest").read_bytes()
    for place in range(8 * len(whole)):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        (run / "latest").write_bytes(content)
        with pytest.raises(PlanError, match="latest is damaged"):
            resolve(run)
    save, (skipped,) = newest_intact(run)
    assert (save, skipped.what) == (run / NEW, "latest is damaged")


def truncated(run: Path) -> str:
    path = files_of(run)[2]
    path.write_bytes(path.read_bytes()[:-1])
    return path.name


def missing(run: Path) -> str:
    files_of(run)[3].unlink()
    return "rank-00002.safetensors"


def swapped(run: Path) -> str:
    first, second = files_of(run)[1:3]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return first.name


def of_another_step(run: Path) -> str:
    name = "rank-00003.safetensors"
    shutil.copy(run / OLD / name, run / NEW / name)
    return name


def manifest_of_another_step(run: Path) -> str:
    shutil.copy(run / OLD / "manifest.json", run / NEW / "manifest.json")
    return "manifest.json"


def manifest_cut_short(run: Path) -> str:
    path = run / NEW / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    return path.name


def manifest_empty(run: Path) -> str:
    (run / NEW / "manifest.json").write_bytes(b"")
    return "manifest.json"


def a_fifo(run: Path) -> str:
    name = missing(run)
    os.mkfifo(run / NEW / name)
    return f"{name}: a pipe, not a regular file"


def a_fifo_as_manifest(run: Path) -> str:
    (run / NEW / "manifest.json").unlink()
    os.mkfifo(run / NEW / "manifest.json")
    return "manifest.json: a pipe, not a regular file"


def a_device(run: Path) -> str:
    (run / NEW / "manifest.json").unlink()
    (run / NEW / "manifest.json").symlink_to("/dev/zero")
    return "manifest.json"


def a_link_to_elsewhere(run: Path) -> str:
    name = missing(run)
    (run / NEW / name).symlink_to(run / OLD / name)
    return name


def a_directory(run: Path) -> str:
    name = missing(run)
    (run / NEW / name).mkdir()
    return name


WAYS: list[Callable[[Path], str]] = [
    truncated, missing, swapped, of_another_step, manifest_of_another_step, manifest_cut_short, manifest_empty, a_fifo,
    a_fifo_as_manifest, a_device, a_link_to_elsewhere, a_directory,
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", WAYS, ids=lambda way: way.__name__)
def test_the_file_is_named_and_the_newest_intact_save_is_the_other(
    engine: Engine, run: Path, damage: Callable[[Path], str]
) -> None:
    name = damage(run)
    assert_refused(engine, run, name)
    save, skipped = newest_intact(run)
    assert save == run / OLD
    assert len(skipped) == 1
    assert name in str(skipped[0])
    engine.load(run / OLD)
    assert engine.step_index == 3


def test_a_save_whose_manifest_is_not_there_is_none(engine: Engine, run: Path) -> None:
    (run / NEW / "manifest.json").unlink()
    assert saves_in(run) == [run / OLD]
    assert_refused(engine, run, "manifest.json")


def test_a_save_under_another_name_loads(engine: Engine, run: Path) -> None:
    (run / NEW).rename(run / "best")
    assert verify(run / "best").step == 4
    engine.load(run / "best")
    assert engine.step_index == 4


@pytest.mark.parametrize("place", ["nowhere", "", "latest"])
def test_nothing_to_load_is_one_error(engine: Engine, run: Path, place: str) -> None:
    (run / "empty").mkdir()
    assert_refused(engine, run / (place or "empty"), "nothing to load")

"""The second command on one model captures nothing; whatever may change the graph is captured anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from passes.partition.options.table import has_rule
from planner.api import plan
from planner.capture import export
from planner.captured import Captured
from planner.frozen_plan import Plan
from planner.lower import passes_text
from tests.models.families import Entry, build
from tests.tools.kept_captures import Processes

MODEL = """
import json, os
import helper
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    factor = 1

    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, ids, labels):
        x = helper.act(self.embed(ids)) * helper.SCALE + self.shift
        if os.environ.get("HALVED"):
            x = x / 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build():
    with open("width.json") as file:
        return Model(json.load(file))
"""
HELPER = "from torch.nn.functional import relu as act\nSCALE = 2\n"
FILES = {"model.py": MODEL, "helper.py": HELPER, "width.json": "8"}
INPUTS = {"ids": {"shape": [8], "dtype": "int64", "high": 16}, "labels": {"like": "ids"}}
SPEC: dict[str, Any] = {"mesh": {"tp": 2}, "batch": {"global": 4, "micro": 2}, "inputs": INPUTS}
CHANGES: dict[str, dict[str, Any]] = {
    "the model's file": {"files": FILES | {"model.py": MODEL.replace("* helper.SCALE", "* 3")}},
    "a file that it imports": {"files": FILES | {"helper.py": HELPER.replace("2", "3")}},
    "a file that it reads": {"files": FILES | {"width.json": "12"}},
    "the environment": {"environment": {"HALVED": "1"}},
    "the dtype": {"spec": {"precision": {"parameters": "bfloat16"}}},
    "the microbatch": {"spec": {"batch": {"global": 4, "micro": 1}}},
    "the inputs": {"spec": {"inputs": INPUTS | {"ids": {"shape": [4], "dtype": "int64", "high": 16}}}},
    "the seed": {"load": {"seed": 7}},
    "an attribute": {"before": "model.more = 1"},
    "a buffer": {"before": "model.shift.add_(1)"},
    "the mode": {"before": "model.eval()"},
    "a frozen parameter": {"before": "model.head.bias.requires_grad_(False)"},
    "a package": {"before": "import pathlib; pathlib.Path('site-packages/other-1.0.dist-info').mkdir(); "
                            "sys.path.append(os.path.abspath('site-packages'))"},
    "our own code": {"before": "from planner.capture.kept import sources; sources.our_sources = lambda: 'edited'"},
}  # fmt: skip
UNCERTAIN = {
    "time": MODEL.replace("import json, os", "import json, os, time"),
    "the network": MODEL.replace("import json, os", "import json, os, urllib.request"),
    "a file's being there": MODEL.replace("factor = 1", "factor = 2 if os.path.exists('x') else 1"),
    "which rank it is": MODEL.replace("factor = 1", "factor = int(os.environ.get('RANK', 1))"),
    "a closure": MODEL.replace("return Model(json.load(file))", "model = Model(json.load(file))\n        "
                               "model.twice = lambda x: 2 * x\n        return model"),
    "a forward that reads a file": MODEL.replace("if os.environ", "open('more').close()\n        if os.environ"),
}  # fmt: skip


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    directory = tmp_path_factory.mktemp("kept")
    (directory / "more").touch()
    found = Processes(directory, SPEC)
    yield found
    found.end()


@pytest.fixture(scope="module")
def first(processes: Processes) -> tuple[str, str]:
    answer = processes.plan(files=FILES)
    assert answer.is_captured
    assert answer.is_kept
    return answer.plan


@pytest.mark.thorough
def test_the_second_process_exports_nothing_and_makes_the_same_plan(processes: Processes, first: tuple[str, str]):
    again = processes.plan(files=FILES)
    assert again.is_read
    assert again.plan == first


def test_keys_that_no_capture_reads_do_not_count(processes: Processes, first: tuple[str, str]):
    spec = {"mesh": {"tp": 1, "dp": 2}, "optimizer": {"name": "adamw", "lr": 1e-3}}
    assert processes.plan(files=FILES, spec=spec).is_read


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_captured_anew(processes: Processes, first: tuple[str, str], name: str):
    answer = processes.plan(**{"files": FILES, **CHANGES[name]})
    assert answer.is_captured, answer.told
    assert answer.is_kept, answer.told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", UNCERTAIN)
def test_a_model_whose_capture_may_depend_on_more_is_captured_each_time(
    processes: Processes, first: tuple[str, str], name: str
):
    for _ in range(2):
        answer = processes.plan(files=FILES | {"model.py": UNCERTAIN[name]})
        assert answer.is_captured, answer.told
        assert not answer.is_kept, answer.told


@pytest.mark.thorough
def test_an_installed_package_that_is_edited_in_place_is_captured_anew(processes: Processes):
    """Also in a file that defines none of the model's classes."""
    package = processes.directory / "site-packages" / "blocks"
    package.mkdir()
    (package / "__init__.py").write_text(MODEL.replace("import helper", "from blocks import helper"))
    (package / "helper.py").write_text(HELPER)
    assert processes.plan(model="blocks:build", files={"width.json": "8"}).is_kept
    assert processes.plan(model="blocks:build").is_read
    (package / "helper.py").write_text(HELPER.replace("SCALE = 2", "SCALE = 31"))
    assert processes.plan(model="blocks:build").is_captured


@pytest.mark.thorough
def test_metadata_of_a_checkout_on_the_path_is_part_of_the_key(processes: Processes):
    """torch reads the entry points of all that is installed; a name such as ``checkout.egg-info`` says no version."""
    (of_checkout := processes.directory / "checkout" / "checkout.egg-info").mkdir(parents=True)
    (entry_points := of_checkout / "entry_points.txt").write_text("[some]\nname = json:loads\n")
    before = "sys.path.append(os.path.abspath('checkout')); import importlib.metadata as m; m.entry_points()"
    answer = processes.plan(files=FILES, before=before)
    assert answer.is_kept, answer.told
    assert processes.plan(files=FILES, before=before).is_read
    entry_points.write_text("[other]\nname = json:loads\n")
    assert processes.plan(files=FILES, before=before).is_captured


@pytest.mark.thorough
def test_what_depends_on_weights_is_checked_though_the_capture_is_read(processes: Processes):
    asks = MODEL.replace('get("HALVED")', 'get("HALVED") or x.__class__.__name__ == "FakeTensor"')
    files = FILES | {"model.py": asks.replace(" + self.shift", "").replace("self.register_buffer", "# ")}
    without_values = processes.plan(files=files, before="model.to('meta')")
    assert without_values.is_kept, (without_values.told, without_values.error)
    answer = processes.plan(files=files)
    assert "in eager mode its loss is" in answer.error
    assert any(line.startswith("read") for line in answer.told)


@pytest.mark.thorough
def test_a_damaged_capture_is_told_and_made_again(tmp_path: Path):
    processes = Processes(tmp_path, SPEC)
    first = processes.plan(files=FILES)
    (kept,) = (tmp_path / "cache" / "captures").glob("*.capture")
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    again = processes.plan(files=FILES)
    assert again.is_captured
    assert again.is_kept
    assert again.plan == first.plan
    assert processes.plan(files=FILES).is_read
    assert f"the cached capture {kept} is damaged" in processes.end()


@pytest.mark.thorough
def test_a_directory_that_others_may_write_to_is_told_and_planning_goes_on(tmp_path: Path):
    processes = Processes(tmp_path, SPEC)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    answer = processes.plan(files=FILES)
    assert answer.is_captured
    assert not answer.is_kept
    assert "others can write to it" in processes.end()


@pytest.mark.thorough
def test_a_disk_that_takes_nothing_is_told_and_planning_goes_on(tmp_path: Path):
    processes = Processes(tmp_path, SPEC)
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    answer = processes.plan(files=FILES, before=limit)
    assert answer.is_captured
    assert not answer.is_kept
    assert not list((tmp_path / "cache").glob("captures/*.capture"))
    assert not [path for path in (tmp_path / "cache" / "captures").iterdir() if path.suffix == ".partial"]
    assert "captures are not cached" in processes.end()


@pytest.mark.thorough
def test_two_processes_at_once_capture_once(tmp_path: Path):
    both = Processes(tmp_path, SPEC), Processes(tmp_path, SPEC)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for processes in both:
        processes.ask()
    answers = [processes.answer() for processes in both]
    assert sorted(answer.is_read for answer in answers) == [False, True]
    assert answers[0].plan == answers[1].plan


@pytest.mark.thorough
def test_a_hugging_face_config_is_kept_for_plans_and_for_real_weights(tmp_path: Path):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 2, "n_head": 2}
    sizes = {"vocab_size": 32, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    inputs = {"input_ids": {"shape": [8], "dtype": "int64", "high": 32}, "labels": {"like": "input_ids"}}
    processes = Processes(tmp_path, SPEC | {"inputs": inputs}, "transformers")
    asked = {"model": "hf:config.json", "files": {"config.json": json.dumps(config | sizes)}}
    assert processes.plan(**asked).is_kept
    again = processes.plan(**asked, load={"materialize": True})
    assert again.is_read, again.told
    less = {**asked, "files": {"config.json": json.dumps(config | sizes | {"n_layer": 1})}}
    assert processes.plan(**less).is_captured
    processes.end()


def spec_of(entry: Entry) -> dict[str, Any]:
    inputs = {
        name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")} | ({"high": high} if high else {})
        for name, (shape, dtype, high) in entry.inputs.items()
    }
    return {"mesh": {"tp": 2, "pp": 2}, "batch": {"global": 4, "micro": 1}, "inputs": inputs}


def texts_of(made: Plan) -> tuple[str, str, str, str]:
    return made.hash(), json.dumps(made.to_dict()), made.describe(full=True), passes_text(made, 1, full=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["gpt2-dropout", "llama", "bert", "t5", "gemma2", "falcon-alibi", "vit", "mixtral", "experts", "own-round"]
)
def test_a_plan_from_the_kept_form_is_that_of_the_capture_itself(name: str):
    entry = build(name)
    kept = texts_of(plan(entry.model, spec_of(entry)))
    example = entry.batch(1, 0)
    program = export.capture(entry.model, example, has_rule=has_rule)
    itself = Captured(entry.model, "auto", None, 0.0, example, {1: program})
    assert texts_of(plan(itself, spec_of(entry))) == kept


@pytest.mark.thorough
def test_auto_captures_the_model_once(monkeypatch: pytest.MonkeyPatch):
    from examples.gpt import build as build_gpt

    calls = []
    real = export.capture
    monkeypatch.setattr(export, "capture", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    inputs = {"input_ids": {"shape": [16], "dtype": "int64", "high": 256}, "targets": {"like": "input_ids"}}
    spec = {"mesh": "auto", "batch": {"global": 8, "micro": 2}, "inputs": inputs, "cluster": "dgx-h100", "devices": 2}
    made = plan(build_gpt(), spec)
    assert len(calls) == 1
    pinned = {key: made.spec[key] for key in ("mesh", "recompute", "pipeline", "tensor_parallel")}
    alone = plan(build_gpt(), {**spec, **pinned, "devices": None})
    assert (alone.parameters, alone.collectives, alone.memory) == (made.parameters, made.collectives, made.memory)

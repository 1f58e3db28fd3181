"""Ranks read the plan that one process of their host made: the training is the one of ranks that plan by themselves."""

import json
import os
import stat
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.errors import PlanError
from planner import Plan, plan
from planner.capture.model.reference import load_model, pretrained_directory
from planner.spec.spec import Spec
from runtime.audit.audit import check_audit
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from runtime.engine.next_tokens import Choice
from runtime.evaluation.run import Evaluation, Generation, Weights, evaluate, generate
from runtime.profiling.memory import compare_memory
from runtime.shared_plan import NONE, read_shared, shared
from runtime.training.job import Job
from runtime.training.loop import run_rank
from runtime.training.run import train
from runtime.verify.run import verify
from tests.tools import pretrained_ranks as ranks

SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [6], "dtype": "int64", "high": 256}, "labels": {"like": "input_ids"}},
}
OWN = """
import os

import torch
from torch import nn
from planner import meta_parameters, rule

OPS

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.scale = torch.rand(8)  # no buffer: a constant of the captured graph

    def forward(self, input_ids, labels):
        x = self.embed(input_ids) * self.scale
        x = x + self.down(ACT(self.up(x)))
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())

def build():
    with meta_parameters():
        return Model()

def seeded():
    return Model()
"""
LOGITS = (
    OWN.replace("OPS", "")
    .replace("input_ids, labels)", "input_ids)")
    .replace("ACT", "torch.tanh")
    .replace(
        "return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())",
        "return x @ self.embed.weight.T",
    )
)
LOSS = """
from torch.nn.functional import cross_entropy

def of_logits(logits, batch):
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
"""
OUTSIDE = """
if "RANK" in os.environ:
    torch.export.export = None
"""
OP = """
@torch.library.custom_op("shared_plan::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: g * 2)
rule("shared_plan::twice", "... h -> ... h")
"""
BACKWARD = """
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)
"""
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "down_proj"]}


def own(directory: Path, name: str, ops: str = "", act: str = "torch.tanh") -> Path:
    file = directory / f"{name}.py"
    file.write_text(OWN.replace("OPS", ops).replace("ACT", act))
    return file


def reference(kind: str, directory: Path) -> str:
    """MODEL of a command line."""
    if kind in ("hf", "lora"):
        ranks.save_random("llama", directory / "base", vocab_size=256)
        (directory / "lora.json").write_text(json.dumps(LORA))
        return f"hf:{directory / 'base'}" + (f" --peft {directory / 'lora.json'}" if kind == "lora" else "")
    if kind == "config":
        ranks.save_random("llama", directory / "base", vocab_size=256)
        return f"hf:{directory / 'base' / 'config.json'}"
    if kind == "own op":
        return f"{own(directory, 'with_an_op', OP, 'torch.ops.shared_plan.twice')}:build"
    if kind == "exported outside":
        return f"{own(directory, 'outside', OUTSIDE)}:seeded"
    return f"{own(directory, 'plain')}:{'build' if kind == 'on meta' else 'seeded'}"


def first_step(made: Plan, model: str) -> tuple[float, float, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    batch = {key: torch.randint(256, (4, 6), generator=generator) for key in ("input_ids", "labels")}
    with Engine(made) as engine:
        if (weights := pretrained_directory(model)) is not None:
            engine.load_pretrained(weights)
        report = engine.train_step(batch)
        return report.loss, report.grad_norm, engine.gather_parameters()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["on meta", "seeded", "own op", "hf", "config", "lora"])
def test_the_first_step_is_that_of_a_rank_that_plans_by_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    asked, spec = reference(kind, tmp_path), Spec.load(SPEC | {"experts": {"imbalance": 1.5}})

    def built() -> Any:
        return load_model(asked, materialize=pretrained_directory(asked) is None, seed=spec.seed, values_later=True)

    made = plan(built(), spec)
    with shared(made) as file, monkeypatch.context() as patched:
        patched.setattr(torch.export, "export", None)
        found = read_shared(file, built(), spec)
    assert found.hash() == made.hash()
    assert found.to_run()[0].imbalance == made.to_run()[0].imbalance == 1.5
    check_audit(found)
    loss, norm, weights = first_step(made, asked)
    again = first_step(found, asked)
    assert again[:2] == (loss, norm)
    assert again[2].keys() == weights.keys()
    assert all(torch.equal(again[2][name], weights[name]) for name in weights)


def test_a_loss_in_a_file_is_that_of_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "logits.py").write_text(LOGITS)
    asked, spec = f"{tmp_path / 'logits.py'}:seeded", Spec.load(SPEC | {"loss": f"{tmp_path / 'loss.py'}:of_logits"})
    made = plan(load_model(asked), spec)
    with shared(made) as file:
        found = read_shared(file, load_model(asked), spec)
    assert first_step(found, asked)[:2] == first_step(made, asked)[:2]


def test_the_file_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    made = plan(load_model(reference("on meta", tmp_path)), Spec.load(SPEC))
    with shared(made) as file:
        assert stat.S_IMODE(os.stat(Path(file).parent).st_mode) == 0o700
    assert not Path(file).parent.exists()


def test_a_plan_without_a_form_on_disk_is_made_by_each_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(f"{own(tmp_path, 'with_a_backward', BACKWARD, 'Round.apply')}:build")
    with shared(plan(model, Spec.load(SPEC))) as file:
        assert file == NONE
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "captures the model by itself" in line]
    assert "a function of your own" in line


def test_another_model_than_the_planned_one_is_refused(tmp_path: Path) -> None:
    model = load_model(reference("on meta", tmp_path))
    with shared(plan(model, Spec.load(SPEC))) as file:
        model.up.bias.requires_grad_(False)  # pyright: ignore
        with pytest.raises(PlanError) as caught:
            read_shared(file, model, Spec.load(SPEC))
    assert caught.value.what.endswith("up.bias is [16] torch.float32 frozen, planned [16] torch.float32 trained")


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_of_each_launcher_train_alike(tmp_path: Path) -> None:
    """``train`` plans in the launcher; ranks that another launcher starts, on the first of each host."""
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC | {"mesh": {"tp": 2}}))
    (tmp_path / "text.txt").write_text("To train a model, a text is needed. " * 40)
    asked = reference("seeded", tmp_path)
    job = Job(asked, str(tmp_path / "spec.yaml"), str(tmp_path / "text.txt"), 2, quiet=True, compare=True)
    rows = train(job).rows
    of_torchrun = launch(run_rank, 2, job)[0].rows
    alone = launch(run_rank, 2, Job(**{**vars_of(job), "planned": NONE}))[0].rows
    losses = [
        [(row.loss, row.grad_norm, row.one_process_loss) for row in found] for found in (rows, of_torchrun, alone)
    ]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 2


def vars_of(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__dataclass_fields__}


COMMANDS: dict[str, Callable[[str, str, str], Any]] = {
    "evaluate": lambda model, spec, text: evaluate(Evaluation(Weights(model), spec, text)).to_dict()["log_probability"],
    "generate": lambda model, spec, text: [*chain(*(each.tokens for each in generate(prompted(model, spec))))],
    "memory": lambda model, spec, text: compare_memory(model, spec).passed,
    "verify": lambda model, spec, text: verify(model, spec).passed,
    "train": lambda model, spec, text: [row.loss for row in train(Job(model, spec, text, 2, quiet=True, audit=1)).rows],
}


def prompted(model: str, spec: str) -> Generation:
    return Generation(Weights(model), spec, ("To",), Choice(), max_new_tokens=2)


def found_by(command: str, directory: Path, mesh: dict[str, int]) -> Any:
    """The result of a command. Ranks that a launcher starts cannot export."""
    spec, text = directory / "spec.yaml", directory / "text.txt"
    spec.write_text(json.dumps(SPEC | {"data": {"inputs": {"labels": "next_tokens"}}, "mesh": mesh}))
    text.write_text("To train a model, a text is needed. " * 4)
    return COMMANDS[command](reference("exported outside", directory), str(spec), str(text))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_one_rank_captures_once(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, export = [], torch.export.export

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(given)
        return export(*given, **more)

    monkeypatch.setattr(torch.export, "export", counted)
    found_by(command, tmp_path, {})
    of_command = len(calls)
    plan(load_model(reference("seeded", tmp_path)), Spec.load(str(tmp_path / "spec.yaml")))
    assert of_command == len(calls) - of_command


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_of_a_command_export_nothing(command: str, tmp_path: Path) -> None:
    assert found_by(command, tmp_path, {"tp": 2}) == pytest.approx(found_by(command, tmp_path, {}))

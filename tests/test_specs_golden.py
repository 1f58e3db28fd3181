"""Each example spec with a model of its sizes: the whole plan as text. Accept a change that is meant by
EXPECTTEST_ACCEPT=1, and read the difference."""

import json
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from planner import PlanError, plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime.data.token_batches import length_of, roles_of
from tests.models.plain import plain
from tests.tools.paths import GOLDEN, ROOT

SPECS = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
LARGE = {"llama_405b_tp8_pp16_dp128": lambda: plain(128256, 4096, 16384, 128, 126)}
ENCODERS = {"bert_tp2_pp2"}


def model_of(name: str) -> Callable[[], nn.Module]:
    """A model of the vocabulary and the length that the spec names."""
    tokens = yaml.safe_load((ROOT / "specs" / f"{name}.yaml").read_text())["inputs"]["input_ids"]
    return LARGE.get(name, lambda: plain(tokens["high"], *tokens["shape"], causal=name not in ENCODERS))


def text_of(name: str) -> str:
    try:
        return plan(model_of(name)(), Path("specs") / f"{name}.yaml").describe()
    except PlanError as error:
        return f"{error}\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=(pytest.mark.slow, pytest.mark.thorough) if n in LARGE else ()) for n in SPECS]
)
def test_the_plan_of_an_example_spec_is_the_golden_text(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    text, golden = text_of(name), GOLDEN / "specs" / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_every_golden_plan_has_its_spec():
    assert sorted(path.stem for path in (GOLDEN / "specs").iterdir()) == SPECS


PAPER = ROOT / "specs" / "paper"
V100_BYTES = 32e9


@dataclass(frozen=True)
class Row:
    """A row of the paper's table 1, 2 or 4, and the model parallel size of table 1."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    gpus: int
    tp: int

    @property
    def dp(self) -> int:
        return self.gpus // self.tp


GPT2 = {
    "gpt2_355m": Row(355e6, 24, 1024, 16, 64, 1),
    "gpt2_1.2b": Row(1.2e9, 40, 1536, 16, 64, 1),
    "gpt2_2.5b": Row(2.5e9, 54, 1920, 20, 128, 2),
    "gpt2_4.2b": Row(4.2e9, 64, 2304, 24, 256, 4),
    "gpt2_8.3b": Row(8.3e9, 72, 3072, 24, 512, 8),
}
BERT = {  # the paper does not say how these GPUs are divided: tp is ours
    "bert_336m": Row(336e6, 24, 1024, 16, 128, 1),
    "bert_1.3b": Row(1.3e9, 24, 2048, 32, 256, 2),
    "bert_3.9b": Row(3.9e9, 48, 2560, 40, 512, 4),
}
ROWS = GPT2 | BERT
SCALING = "gpt2_8.3b_32_heads"  # of table 1; the model that was trained has 24


def spec_of(name: str) -> Spec:
    return Spec.load(PAPER / f"{name}.yaml")


def config_of(name: str) -> dict[str, Any]:
    return json.loads((PAPER / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[str, str]]:
    """Of each run, its parameters in docs/recipes.md, and by how much they are off the paper's."""
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in (ROOT / "docs" / "recipes.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    return {row[0]: (row[4], row[5].replace("−", "-").replace(" ", "")) for row in rows if row[0] in ROWS}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROWS)
def test_a_run_has_as_many_parameters_as_the_paper_tells(name, told):
    row, model = ROWS[name], load_model(f"hf:{PAPER / name}.json")
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters == pytest.approx(row.parameters, rel=0.03)
    assert told[name] == (f"{num_parameters:,}", f"{num_parameters / row.parameters - 1:+.1%}")


# The smallest and the largest of GPT-2, and the largest BERT: what is between them differs in numbers alone.
@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_355m", "gpt2_8.3b", "bert_3.9b"])
def test_a_run_of_the_paper_is_planned(name):
    row, made = ROWS[name], plan(load_model(f"hf:{PAPER / name}.json"), spec_of(name))
    assert sum(prod(p.shape) for p in made.parameters) == pytest.approx(row.parameters, rel=0.03)
    assert made.mesh.world_size == row.gpus
    assert max(rank.total for rank in made.memory) < V100_BYTES
    all_reduces = Counter((c.block, c.phase) for c in made.collectives if c.axis == "tp" and c.block and not c.again)
    blocks = {block for block, _ in all_reduces}
    assert len(blocks) == (row.layers if row.tp > 1 else 0)
    assert set(all_reduces.values()) <= {2}  # two forward, two backward: four a layer
    assert len(all_reduces) == 2 * len(blocks)
    if name in GPT2 and row.tp > 1:
        (tokens,) = (p for p in made.parameters if p.shape == (50257, row.hidden))
        assert tokens.local_shape == (51200 // row.tp, row.hidden)


@pytest.mark.parametrize("name", [*GPT2, SCALING])
def test_a_gpt2_has_the_sizes_of_the_table(name):
    row, config = ROWS.get(name, GPT2["gpt2_8.3b"]), config_of(name)
    heads = 32 if name == SCALING else row.heads
    sizes = {"n_layer": row.layers, "n_embd": row.hidden, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}
    assert sizes.items() <= config.items()
    assert {config[key] for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop")} == {0.1}


@pytest.mark.parametrize("name", BERT)
def test_a_bert_has_the_sizes_of_the_table_and_64_a_head(name):
    row, config = BERT[name], config_of(name)
    sizes = {"num_hidden_layers": row.layers, "hidden_size": row.hidden, "intermediate_size": 4 * row.hidden}
    assert (sizes | {"num_attention_heads": row.heads, "vocab_size": 30522}).items() <= config.items()
    assert row.hidden // row.heads == 64
    assert {config[key] for key in ("hidden_dropout_prob", "attention_probs_dropout_prob")} == {0.1}


@pytest.mark.parametrize("name", ROWS)
def test_a_run_has_the_paper_s_batch_rate_and_precision(name):
    row, spec = ROWS[name], spec_of(name)
    kind = "gpt2" if name in GPT2 else "bert"
    batch, lr, schedule = {
        "gpt2": (512, 1.5e-4, ("cosine", 3_000, 300_000, 1e-5)),
        "bert": (1024, 1e-4, ("linear", 10_000, 2_000_000, 0.0)),
    }[kind]
    mesh, optimizer, rate = spec.mesh.to_mesh(), spec.optimizer, spec.optimizer.schedule
    assert (mesh.tp, mesh.dp, mesh.world_size) == (row.tp, row.dp, row.gpus)
    assert (spec.batch.global_size, spec.batch.micro) == (batch, batch // row.dp)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip_grad_norm) == (lr, 0.01, 1.0)
    assert (rate.kind, rate.warmup, rate.steps, rate.min_lr) == schedule
    assert (spec.precision.parameters, spec.precision.loss_scale) == ("float16", "dynamic")
    assert (spec.recompute, spec.initialization.std, spec.initialization.residual_scale) == ("full", 0.02, True)


@pytest.mark.parametrize("name", ROWS)
def test_a_text_feeds_a_run(name):
    spec = spec_of(name)
    roles = roles_of(spec.require_inputs(), spec.data.inputs)
    assert length_of(spec.require_inputs(), roles) == (1024 if name in GPT2 else 512)
    assert ("sentence_order" in roles.values()) == (spec.data.objective == "masked") == (name in BERT)


def test_every_file_is_of_a_run_and_is_shipped():
    assert {path.name for path in PAPER.iterdir()} == {f"{n}.{end}" for n in ROWS for end in ("json", "yaml")} | {
        f"{SCALING}.json"
    }
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["specs"]
    found = {path for pattern in shipped for path in (ROOT / "specs").glob(pattern)}
    assert set(PAPER.iterdir()) <= found

"""Rows of experts beyond the mean: in the forecast of the fullest rank, in the plan's cost, and in a warning."""

from pathlib import Path
from typing import Any

import pytest
import torch

from planner import PlanError, plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime.profiling.memory import compare_memory
from runtime.report.step_report import Contents, StepReport

MODEL = """
import torch
import transformers


def build():
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 64, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        for layer in model.model.layers:  # every token takes the experts of the first rank of ep
            layer.mlp.gate.weight[:2, 0] = 5.0
            layer.mlp.gate.weight[2:, 0] = -5.0
    return model
"""
SPEC = """
mesh: {{dp: 2, ep: 2}}
batch: {{global: 8, micro: 2}}
inputs: {{input_ids: {{shape: [64], dtype: int64, high: 64}}, labels: {{like: input_ids}}}}
experts: {{imbalance: {imbalance}}}
"""


def written(directory: Path, imbalance: Any) -> tuple[str, str]:
    (directory / "skewed.py").write_text(MODEL)
    (directory / "spec.yaml").write_text(SPEC.format(imbalance=imbalance))
    return f"{directory / 'skewed.py'}:build", str(directory / "spec.yaml")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_fullest_rank_holds_what_the_plan_predicts(tmp_path: Path) -> None:
    report = compare_memory(*written(tmp_path, 2.0))
    rows = {row.category: row for row in report.rows if row.rank == 0}  # its experts get every token
    assert abs(rows["activations"].difference) < 0.03, str(report)
    assert abs(rows["at the peak"].difference) < 0.03, str(report)


@pytest.mark.thorough
def test_more_rows_are_more_memory_and_more_time(tmp_path: Path) -> None:
    reference, spec_path = written(tmp_path, 2.0)
    model, skewed = load_model(reference), Spec.load(spec_path)
    even = Spec.load({**skewed.to_dict(), "experts": {"imbalance": None}})
    most = Spec.load({**skewed.to_dict(), "experts": {"imbalance": 100.0}})
    of_even, of_skewed, of_most = (plan(model, spec).memory[0].activations for spec in (even, skewed, most))
    assert of_even < of_skewed == of_most  # two ranks of ep: one can have no more than twice the mean


@pytest.mark.parametrize("imbalance", [0.5, "much", -1, ".nan"])
def test_no_imbalance_is_below_one(tmp_path: Path, imbalance: Any) -> None:
    with pytest.raises(PlanError) as error:
        Spec.load(written(tmp_path, imbalance)[1])
    assert "experts.imbalance" in str(error.value)


def test_a_report_says_how_full_the_fullest_rank_is() -> None:
    figures = torch.tensor([1.0, 0.0, 2.0, 6.0, 2.0, 3.0, 1.0], dtype=torch.float64)
    report = StepReport(figures, 0.1, contents=Contents([("layers.0", 4)]))
    assert report.imbalance_of_ranks(2) == pytest.approx(8 * 2 / 12)
    assert report.imbalance_of_ranks(1) == 1.0
    assert report.imbalance == pytest.approx(6 * 4 / 12)

"""Scores on processes: log P and arg max of every label are those of the unmodified model's own logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engine.log_probs import Scores
from tests.models.families import IGNORED, build
from tests.tools.laboratory import Case, Lab
from tests.tools.score_jobs import Alone, exchanged_for_scores, measured, scores_of, text

SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
FOLDED = {"pipeline": {"schedule": "zero_bubble_v"}}
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tp 2, pp 2, along the sequence": ("gpt2", {"tp": 2, "pp": 2}, SEQUENCE),
    "two chunks a rank": ("gpt2", {"pp": 2, "vpp": 2}, INTERLEAVED),
    "two chunks a rank in a v": ("gpt2", {"tp": 2, "pp": 2, "vpp": 2}, FOLDED),
    "cp 2, dp 2": ("gpt2", {"cp": 2, "dp": 2}, {}),
    "experts of their own ranks": ("mixtral", {"dp": 2, "ep": 2}, {}),
    "dropout, and regions as graphs": ("gpt2-dropout", {"tp": 2}, {"train": True, **GRAPHS}),
}


def assert_those_of_the_model(found: Scores, model: str) -> None:
    """The model shifts labels inside: what its logits say at a token is of the next one."""
    entry = build(model)
    whole: Any = entry.model
    if hasattr(whole, "set_experts_implementation"):
        whole.set_experts_implementation("eager")  # the other takes no float64
    batch = entry.batch(8, 0)
    with torch.no_grad():
        logits = whole(**batch).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    is_scored = labels != IGNORED
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    assert found.is_scored[:, 1:].equal(is_scored)
    assert not found.is_scored[:, 0].any()
    torch.testing.assert_close(found.log_probabilities[:, 1:], (-each).masked_fill(~is_scored, 0).double())
    assert found.is_top[:, 1:].equal((logits.argmax(-1) == labels) & is_scored)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_scores_of_every_rank_are_those_of_one_process(lab: Lab, case: str) -> None:
    model, mesh, rest = CASES[case]
    for before, after in lab.run(Case(model, mesh, rest, job=scores_of)):
        assert_those_of_the_model(before[0], model)
        for scores, loss in (before, after):
            mean = -scores.log_probabilities.sum() / scores.is_scored.sum()
            assert mean.item() == pytest.approx(loss, rel=1e-6)  # the model takes its loss in float32
        assert after[1] < before[1]


@pytest.mark.thorough
@pytest.mark.slow
def test_one_sum_over_all_ranks_joins_the_scores(lab: Lab) -> None:
    for seen, planned in lab.run(Case("gpt2", {"tp": 2, "dp": 2}, job=exchanged_for_scores)):
        assert seen == planned == 3 * 8 * 8 * 12


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "rest"),
    [
        ("gpt2", {"tp": 2, "pp": 2}, SEQUENCE),
        ("gpt2", {"cp": 2}, {}),
        ("gpt", {"dp": 2}, {}),
        ("gpt", {"pp": 2}, {}),
    ],
)
def test_perplexity_and_cloze_accuracy_are_those_of_the_model_alone(
    lab: Lab, model: str, mesh: dict[str, int], rest: dict[str, Any]
) -> None:
    entry = build(model)
    length, _, vocabulary = entry.inputs["input_ids"]

    def logits(ids: Tensor) -> Tensor:
        output = entry.model(input_ids=ids)
        return output.logits if hasattr(output, "logits") else output[0]

    assert vocabulary is not None
    alone = Alone(logits, text(vocabulary), length[0] + ("targets" in entry.inputs))
    alone.tell_some()
    found = lab.run(Case(model, mesh, rest, job=measured, job_arguments=(alone.tokens, 5)))
    expected, right = alone.perplexity(5), alone.right()
    for perplexity, cloze in found:
        assert perplexity.perplexity == pytest.approx(expected, rel=1e-6)
        assert (cloze.num_right, cloze.num_passages) == (sum(right), len(right))
        assert 0 < cloze.num_right < cloze.num_passages

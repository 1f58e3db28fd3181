"""Tokens on every layout are those of one process: greedy ones of the unmodified model, sampled ones bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.families import build
from tests.tools.generation_jobs import (
    PROMPTS,
    SAMPLED,
    by_hugging_face,
    continued,
    exchanged,
    greedy,
    refused,
)
from tests.tools.laboratory import Case, Lab, name_of

COUNT = 5
SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
SHARDS = {"optimizer": {"zero": 3}}
FAMILIES = (
    "gpt2", "llama", "qwen3", "mistral", "gemma2", "phi3", "diffllama", "gpt_neox", "falcon-7b", "falcon-alibi",
    "mixtral", "opt", "bloom", "gptj",
)  # fmt: skip
MESHES: tuple[dict[str, int], ...] = ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2})
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp 2, pp 2, along the sequence": ({"tp": 2, "pp": 2}, SEQUENCE),
    "two chunks a rank": ({"pp": 2, "vpp": 2}, INTERLEAVED),
    "cp 2": ({"cp": 2}, {}),
    "cp 2, tp 2": ({"cp": 2, "tp": 2}, {}),
    "weights in shards": ({"dp": 2}, SHARDS),
}


def expected(model: str) -> list[list[int]]:
    whole: Any = build(model).model
    if hasattr(whole, "set_experts_implementation"):
        whole.set_experts_implementation("eager")  # the other takes no float64
    own = greedy(whole, PROMPTS, COUNT)
    if hasattr(whole, "generate"):
        assert by_hugging_face(whole, PROMPTS, COUNT) == own
    return own


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("model", FAMILIES)
def test_greedy_tokens_are_those_of_hugging_face(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    for found in lab.run(Case(model, mesh, job=continued, job_arguments=(COUNT,))):
        assert found["greedy"] == expected(model)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "mesh"), [("mixtral", {"dp": 2, "ep": 2}), ("gpt", {"tp": 2, "pp": 2}), ("gpt", {"dp": 2})]
)
def test_greedy_tokens_of_experts_and_of_an_own_model(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    for found in lab.run(Case(model, mesh, job=continued, job_arguments=(COUNT,))):
        assert found["greedy"] == expected(model)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_tokens_are_the_same_on_every_layout(lab: Lab, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
    given = (COUNT, tuple(SAMPLED))
    (alone,) = lab.run(Case("gpt2", {}, num_sequences=4, job=continued, job_arguments=given))
    for found in lab.run(Case("gpt2", mesh, rest, job=continued, job_arguments=given)):
        assert found == alone
    assert len({str(tokens) for tokens in alone.values()}) == len(SAMPLED)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2, "dp": 2}, {"tp": 2, "pp": 2}], ids=name_of)
def test_one_row_of_logits_and_one_token_are_exchanged_for_each(lab: Lab, mesh: dict[str, int]) -> None:
    found = lab.run(Case("gpt2", mesh, job=exchanged))
    for of_rank in found:
        for seen, planned in of_rank.values():
            assert seen == planned
    assert any(of_rank["tp"][0] for of_rank in found)
    assert all(of_rank["world"][0] == 3 * 8 * 8 for of_rank in found)


BAD: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "prompt 1 has 9 tokens, and with 4 new ones more than the 12 of a planned sequence": ([[1], [2] * 9], 4, {}),
    "prompt 0 has 12 tokens, and a planned sequence has 12": ([[2] * 12], 4, {}),
    "prompt 1 holds the token 97; the embedding": ([[1], [97]], 1, {}),
    "prompt 0 holds the token -1; the embedding": ([[-1]], 1, {}),
    "prompt 1 is empty": ([[1], []], 1, {}),
    "there are no prompts": ([], 1, {}),
    "max_new_tokens is 0": ([[1]], 0, {}),
    "the temperature is -1.0": ([[1]], 1, {"temperature": -1.0}),
    "top_p is 0.0": ([[1]], 1, {"temperature": 1.0, "top_p": 0.0}),
    "top_p is 1.5": ([[1]], 1, {"temperature": 1.0, "top_p": 1.5}),
    "top_k is 0": ([[1]], 1, {"temperature": 1.0, "top_k": 0}),
    "top_k limits sampling, and the temperature is 0": ([[1]], 1, {"top_k": 3}),
    "the batch of prompts has 'labels'": ({"input_ids": 0, "labels": 0}, 1, {}),
    "the batch of prompts lacks 'input_ids'": ({"ids": 0}, 1, {}),
    "a prompt is torch.int64 [1, 1], not integers [length]": ([[[1]]], 1, {}),
}


@pytest.mark.slow
def test_bad_calls_are_one_error_each(lab: Lab) -> None:
    (told,) = lab.run(Case("gpt2", {}, job=refused, job_arguments=(list(BAD.values()),)))
    for words, found in zip(BAD, told, strict=True):
        assert words.replace("the batch of prompts lacks 'input_ids'", "the batch of prompts has 'ids'") in found, found
        assert "fix:" in found


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("bert", "the prediction changes with the tokens behind it: the model is not causal"),
        ("bert-classes", "the shape []"),
        ("t5", "the model is not causal"),
    ],
)
def test_models_that_do_not_continue_a_text_are_refused(lab: Lab, model: str, words: str) -> None:
    (told,) = lab.run(Case(model, {}, job=refused, job_arguments=([([[1, 2]], 2, {})],)))
    (found,) = told
    assert words in found

"""Tokens on every layout are those of one process, greedy ones and sampled ones, by whole forwards and by kept keys."""

from typing import Any

import pytest

from tests.models.families import build
from tests.tools.generation_jobs import (
    PROMPTS,
    SAMPLED,
    both_ways,
    by_hugging_face,
    continued,
    exchanged,
    greedy,
    of_one_position,
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


@pytest.mark.thorough
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


# ---- tokens by kept keys and values are those of the whole forward, on every layout: greedy ones and sampled ones


NEXT: dict[str, Any] = {"data": {"inputs": {"labels": "next_tokens"}}}
WAYS = ("greedy", "hot", "both")
KEPT_ON: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp 2": ({"tp": 2}, {}),
    "pp 2": ({"pp": 2}, {}),
    "tp 2, pp 2": ({"tp": 2, "pp": 2}, {}),
    "dp 2, tp 2": ({"tp": 2, "dp": 2}, {}),
    "two chunks a rank": ({"pp": 2, "vpp": 2}, INTERLEAVED),
    "weights in shards": ({"dp": 2}, SHARDS),
    "tp 2, along the sequence": ({"tp": 2}, SEQUENCE),
    "tp 2, pp 2, along the sequence": ({"tp": 2, "pp": 2}, SEQUENCE),
}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", KEPT_ON)
def test_kept_rows_give_the_tokens_of_one_process_on_every_layout(lab: Lab, layout: str) -> None:
    mesh, rest = KEPT_ON[layout]
    (alone,) = lab.run(Case("gpt2", {}, num_sequences=4, job=both_ways, job_arguments=(COUNT, WAYS)))
    for found in lab.run(Case("gpt2", mesh, rest, job=both_ways, job_arguments=(COUNT, WAYS))):
        assert found["is cached"] == {True}, found["because"]
        assert found["kept"] == found["whole"] == alone["whole"]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("rest", [{}, SEQUENCE], ids=["tp", "along the sequence"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=name_of)
def test_one_position_exchanges_and_keeps_what_is_listed(lab: Lab, mesh: dict[str, int], rest: dict[str, Any]) -> None:
    layers, length, width, size = 4, 12, 32, 8  # of gpt2 in the zoo, in float64
    for found in lab.run(Case("gpt2", mesh, rest, job=of_one_position)):
        assert found["seen"] == found["planned"]
        assert found["seen"]["all_reduce", "forward"]
        own = layers // mesh.get("pp", 1) * width // mesh["tp"]
        assert found["kept"] == 2 * own * 8 * length * size
        assert found["measured and planned"] == [found["kept"]] * 2


FAMILIES_ON: tuple[tuple[str, dict[str, int], dict[str, Any]], ...] = (
    ("llama", {"tp": 2, "pp": 2}, SEQUENCE),
    ("qwen3", {"tp": 2, "pp": 2}, {}),
    ("gemma2", {"tp": 2}, SEQUENCE),
    ("opt", {"pp": 2}, {}),
    ("bloom", {"tp": 2}, {}),
    ("gpt_neox", {"tp": 2, "dp": 2}, {}),
    ("falcon-7b", {"tp": 2}, {}),
    ("falcon-alibi", {}, {}),
    ("phi3", {"tp": 2}, {}),
    ("mistral", {"tp": 2}, {}),
    ("diffllama", {}, {}),
    ("gptj", {}, {}),
    ("gpt", {}, {}),
    ("matmul", {"tp": 2, "pp": 2}, NEXT),
    ("relative-bias", {"tp": 2}, NEXT),
)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "rest"), FAMILIES_ON, ids=[model for model, *_ in FAMILIES_ON])
def test_kept_rows_give_the_tokens_of_whole_forwards(
    lab: Lab, model: str, mesh: dict[str, int], rest: dict[str, Any]
) -> None:
    for found in lab.run(Case(model, mesh, rest, job=both_ways, job_arguments=(COUNT, ("greedy",)))):
        assert found["is cached"] == {True}, found["because"]
        assert found["kept"] == found["whole"]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}], ids=name_of)
def test_dropout_of_training_is_not_drawn(lab: Lab, mesh: dict[str, int]) -> None:
    (alone,) = lab.run(Case("gpt2-dropout", {}, {"train": True}, job=both_ways, job_arguments=(COUNT, ("greedy",))))
    for found in lab.run(
        Case("gpt2-dropout", mesh, {"train": True}, job=both_ways, job_arguments=(COUNT, ("greedy",)))
    ):
        assert found["is cached"] == {True}, found["because"]
        assert found["kept"] == found["whole"] == alone["whole"]


FALLBACKS: dict[str, tuple[str, dict[str, int], dict[str, Any], str]] = {
    "a convolution": ("state-space", {}, NEXT, "conv"),
    "cp": ("gpt2", {"cp": 2}, {}, "the sequence is sharded over cp"),
    "sorted rows of experts": ("mixtral", {}, {}, "reads the whole sequence"),
    "experts of other ranks": ("mixtral", {"dp": 2, "ep": 2}, {}, "rows of experts go to other ranks"),
}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", FALLBACKS)
def test_whole_forwards_run_where_nothing_can_be_kept(lab: Lab, case: str) -> None:
    model, mesh, rest, words = FALLBACKS[case]
    for found in lab.run(Case(model, mesh, rest, job=both_ways, job_arguments=(COUNT, ("greedy",)))):
        assert found["is cached"] == {False}
        assert found["because"]
        assert words in found["because"]
        assert found["kept"] == found["whole"]

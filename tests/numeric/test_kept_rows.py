"""Tokens by kept keys and values are those of the whole forward, on every layout: greedy ones and sampled ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numeric.test_generation import COUNT, INTERLEAVED, SEQUENCE, SHARDS
from tests.tools.generation_jobs import both_ways, of_one_position
from tests.tools.laboratory import Case, Lab, name_of

NEXT: dict[str, Any] = {"data": {"inputs": {"labels": "next_tokens"}}}
WAYS = ("greedy", "hot", "both")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_rows_give_the_tokens_of_one_process_on_every_layout(lab: Lab, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
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

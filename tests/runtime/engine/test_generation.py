"""The token chosen from a row of logits: the greatest, or a sample with the probabilities of the softmax."""

from typing import Any

import pytest
import torch

from passes.errors import PlanError
from planner import plan
from planner.frozen_plan import Plan
from runtime import Engine
from runtime.engine.next_tokens import Choice
from runtime.engine.prompts import sequences_of
from tests.models.sequence_readers import LENGTH, VOCABULARY, Spelling, build

DRAWS = 20_000
LOGITS = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0, 0.5])


def drawn(choice: Choice, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """How often each token is chosen at ``DRAWS`` positions."""
    found = choice.tokens(logits.expand(DRAWS, -1), [3] * DRAWS, range(DRAWS))
    return found.bincount(minlength=len(logits)) / DRAWS


def test_the_greedy_token_is_the_first_of_the_greatest() -> None:
    assert Choice().tokens(LOGITS[None], [0], [0]).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_have_the_probabilities_of_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0)
    torch.testing.assert_close(drawn(Choice(temperature, seed=1)), expected, atol=0.015, rtol=0)


def test_top_k_keeps_the_greatest_and_those_equal_to_them() -> None:
    found = drawn(Choice(1.0, top_k=1, seed=1))
    assert found.nonzero().flatten().tolist() == [1, 3]
    assert drawn(Choice(1.0, top_k=3, seed=1)).nonzero().flatten().tolist() == [1, 2, 3]


def test_top_p_keeps_tokens_until_they_have_the_share() -> None:
    shares = LOGITS.softmax(0)
    two, three = float(shares[[1, 3]].sum()), float(shares[[1, 2, 3]].sum())
    for p, kept in ((0.01, [1]), (two - 0.01, [1, 3]), (two + 0.01, [1, 2, 3]), (three - 0.01, [1, 2, 3])):
        found = drawn(Choice(1.0, top_p=p, seed=2))
        assert found.nonzero().flatten().tolist() == kept
        masked = LOGITS.masked_fill(torch.tensor([i not in kept for i in range(6)]), -torch.inf)
        torch.testing.assert_close(found, masked.softmax(0), atol=0.015, rtol=0)


def test_a_sample_depends_on_seed_prompt_and_position_alone() -> None:
    random, choice = torch.Generator().manual_seed(0), Choice(1.0, seed=5)
    logits, numbers, positions = torch.randn(8, 40, generator=random), list(range(8)), [5, 9, 1, 1, 1, 7, 7, 2]
    together = choice.tokens(logits, numbers, positions).tolist()
    alone = [int(choice.tokens(logits[i : i + 1], [i], [positions[i]])) for i in reversed(range(8))]
    assert together == alone[::-1]
    assert choice.tokens(logits, numbers, [p + 1 for p in positions]).tolist() != together
    assert choice.tokens(logits, [n + 1 for n in numbers], positions).tolist() != together
    assert Choice(1.0, seed=6).tokens(logits, numbers, positions).tolist() != together


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": float("nan")}, "the temperature is nan"),
        ({"temperature": float("inf")}, "the temperature is inf"),
        ({"temperature": 1.0, "top_k": -2}, "top_k is -2"),
        ({"top_p": 0.5}, "top_p limits sampling, and the temperature is 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Choice(**options)  # pyright: ignore


def test_a_mask_hides_tokens_on_either_side() -> None:
    ids, mask = torch.tensor([[9, 9, 4], [5, 6, 9]]), torch.tensor([[0, 0, 1], [1, 1, 0]])
    assert sequences_of({"ids": ids, "attention_mask": mask}, "ids", ()) == [[4], [5, 6]]
    assert sequences_of([torch.tensor([4]), (5, 6)], "ids", ()) == [[4], [5, 6]]
    assert sequences_of(ids, "ids", ()) == ids.tolist()


PROMPTS = [[3, 4, 5], [7], [1, 2, 9, 8, 7, 6], [4, 4], [2]]
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 4}
KEPT = (
    Spelling(attention="tril"),
    Spelling(attention="triu"),
    Spelling(attention="alibi"),
    Spelling(attention="window"),
    Spelling(positions="parameter"),
    Spelling(positions="buffer"),
    Spelling(positions="count of tokens"),
    Spelling(positions="segments"),
    Spelling(positions="weights"),
    Spelling(loss="shifted"),
    Spelling(loss="ignored"),
    Spelling(loss="log-probabilities"),
    Spelling(loss="deviation"),
)
REFUSED = {
    "aten.pad reads the whole sequence": Spelling(mixing="shift by pad"),
    "aten.cumsum reads the whole sequence": Spelling(attention="linear"),
    "a sum over the positions of a sequence reaches the logits": Spelling(mixing="first token"),
}


def planned(spelling: Spelling) -> Plan:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    labels = "labels" if spelling.loss == "shifted" else "next_tokens"
    return plan(
        build(spelling),
        {
            "mesh": {},
            "batch": {"global": 4, "micro": 2},
            "optimizer": {"name": "adamw"},
            "inputs": {"ids": ids, "labels": ids},
            "data": {"inputs": {"ids": "tokens", "labels": labels}},
        },
    )


def tokens(engine: Engine, **options: Any) -> list[list[int]]:
    return [new.tolist() for new in engine.generate(PROMPTS, 7, **SAMPLED, **options).tokens]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spelling", KEPT, ids=str)
def test_kept_rows_give_the_tokens_of_whole_forwards(spelling: Spelling) -> None:
    with Engine(planned(spelling), mode="evaluate") as engine:
        assert tokens(engine, cache=True) == tokens(engine, cache=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", REFUSED)
def test_other_mixing_of_positions_runs_whole_forwards_and_reports_the_line(words: str) -> None:
    with Engine(planned(REFUSED[words]), mode="evaluate") as engine:
        found = engine.generate(PROMPTS, 7, **SAMPLED)
        assert not found.is_cached
        assert words in found.uncached_because
        assert "sequence_readers.py:" in found.uncached_because
        assert [new.tolist() for new in found.tokens] == tokens(engine, cache=False)
        with pytest.raises(PlanError, match=words) as caught:
            tokens(engine, cache=True)
        assert "leave cache out" in caught.value.fix


def test_the_whole_forward_finds_wrong_kept_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: buffers lose the values of the first position."""
    with Engine(planned(Spelling()), mode="evaluate") as engine:
        expected = tokens(engine, cache=False)
        kept = engine._variants.longest.kept()
        computed = kept.at

        def forgetful(*args: Any) -> Any:
            for buffer in kept.kept.buffers.values():
                buffer[:, :, 0] = torch.zeros_like(buffer[:, :, 0])
            return computed(*args)

        monkeypatch.setattr(kept, "at", forgetful)
        found = engine.generate(PROMPTS, 7, **SAMPLED)
        assert [new.tolist() for new in found.tokens] == expected
        assert not found.is_cached
        assert "are not those of the whole forward" in found.uncached_because
        with pytest.raises(PlanError, match="are not those of the whole forward"):
            tokens(engine, cache=True)

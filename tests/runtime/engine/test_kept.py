"""Kept rows by spelling of a model: the tokens are those of whole forwards, and a refusal has the op and its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.errors import PlanError
from planner import plan
from planner.frozen_plan import Plan
from runtime import Engine
from tests.models.sequence_readers import LENGTH, VOCABULARY, Spelling, build

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

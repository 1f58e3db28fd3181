"""A graph holds the rerun of what its forward let go: the same bits, whatever it captures of a block."""

from __future__ import annotations

import pytest

from tests.tools.graphed_runs import SCOPES, differences, engine_of, figures, planned, train

CASES = {
    "gpt2-dropout, full": [None, *SCOPES],
    "gpt2-dropout, selective": [["attn", "mlp"], []],
    "t5, full": [["attn"]],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_regions_whose_blocks_are_computed_again_give_what_they_give_eagerly_without(case: str):
    name, kind = case.split(", ")
    with (made := engine_of(name, None))[0] as engine:
        eager = train(engine, made[1])
    for scope in CASES[case]:
        with (made := engine_of(name, scope, recompute=kind))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope
            if scope is not None:
                assert figures(engine) == planned(engine, steps=3)


def test_several_microbatches_in_flight_draw_again_what_each_drew():
    sections = {"mesh": {}, "batch": {"global": 8, "micro": 2}, "pipeline": {"schedule": "gpipe"}}
    with (made := engine_of("gpt2-dropout", None, **sections))[0] as engine:
        eager = train(engine, made[1])
    with (made := engine_of("gpt2-dropout", ["attn"], recompute="full", **sections))[0] as engine:
        assert differences(eager, train(engine, made[1])) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_replays_name_the_same_numbers_again_in_their_backward(kind: str, schedule: str):
    sections = {"dropout": "layout_invariant", "pipeline": {"schedule": schedule}}
    with (made := engine_of("gpt2-dropout", None, **sections))[0] as engine:
        eager = train(engine, made[1])
    for scope in (["attn"], ["full_iteration"]):
        with (made := engine_of("gpt2-dropout", scope, recompute=kind, **sections))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope

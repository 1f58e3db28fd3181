"""Streams of weights on processes: bits equal for every reader and layout, two buckets of memory, gone readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.laboratory import Case, Lab
from tests.tools.stream_ranks import BUCKET_BYTES, parts_of, streamed

CASES = {
    "tp 2, pp 2 to tp 4": ("gpt", {"tp": 2, "pp": 2}, {}, {"tp": 4}),
    "weights in shards over dp, to tp 2 and pp 2": (
        "gpt",
        {"dp": 2},
        {"optimizer": {"zero": 3}},
        {"tp": 2, "pp": 2},
    ),
    "experts, to their own ranks": ("experts", {"tp": 2}, {}, {"dp": 2, "ep": 2}),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_reader_gets_the_weights_to_the_bit(lab: Lab, tmp_path: Path, case: str) -> None:
    model, mesh, rest, other = CASES[case]
    directory = str(tmp_path / "weights")
    layout = lab.plan(Case(model, other))
    first, *others = lab.run(Case(model, mesh, rest, job=streamed, job_arguments=(directory, layout)))
    assert all(not names for found in (first, *others) for names in found.wrong.values()), first.wrong
    assert first.num_tensors > 20
    assert 0 < first.most <= 2 * BUCKET_BYTES
    assert first.taken == [True, True, False]
    assert len(first.warned) == 1
    assert "training continues: ConnectionError: the server is gone" in first.warned[0]
    for found in others:
        assert (found.num_tensors, found.taken, found.warned, found.shards) == (0, [True, True, False], [], {})
        assert found.losses == first.losses
    ranks = lab.run(Case(model, other, job=parts_of, job_arguments=(directory,)))
    assert first.shards.keys() == set(range(len(ranks)))
    for rank, parts in enumerate(ranks):
        assert parts.keys() == first.shards[rank].keys()
        assert all(first.shards[rank][name].equal(value) for name, value in parts.items())

"""Streams of weights on processes: bits equal for every reader, two buckets of memory, gone readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.laboratory import Case, Lab
from tests.tools.stream_ranks import BUCKET_BYTES, streamed

CASES = {
    "tp 2, pp 2": ("gpt", {"tp": 2, "pp": 2}, {}),
    "weights in shards over dp": ("gpt", {"dp": 2}, {"optimizer": {"zero": 3}}),
    "experts": ("experts", {"tp": 2}, {}),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_reader_gets_the_weights_to_the_bit(lab: Lab, tmp_path: Path, case: str) -> None:
    model, mesh, rest = CASES[case]
    job = Case(model, mesh, rest, job=streamed, job_arguments=(str(tmp_path / "weights"),))
    first, *others = lab.run(job)
    assert all(not names for found in (first, *others) for names in found.wrong.values()), first.wrong
    assert first.num_tensors > 20
    assert 0 < first.most <= 2 * BUCKET_BYTES
    assert first.taken == [True, True, False]
    assert len(first.warned) == 1
    assert "training continues: ConnectionError: the server is gone" in first.warned[0]
    for found in others:
        assert (found.num_tensors, found.taken, found.warned) == (0, [True, True, False], [])
        assert found.losses == first.losses

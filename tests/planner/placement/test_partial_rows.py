"""Rows that came back from experts stay partial sums over tp until the k rows of each token are added up."""

from __future__ import annotations

import pytest

from planner import plan
from tests.models.families import build
from tests.tools.laboratory import Case, spec_of

MESH = {"tp": 2, "dp": 2, "ep": 2, "etp": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("along_the_sequence", [True, False])
def test_one_row_of_each_token_is_summed_over_ranks_and_not_k(along_the_sequence: bool) -> None:
    entry = build("mixtral")
    more = {"tensor_parallel": {"sequence_parallel": along_the_sequence}}
    made = plan(entry.model, spec_of(entry, Case("mixtral", MESH, more)))
    rows = [c for c in made.collectives if c.axis == "tp" and c.per == "microbatch" and "mlp.experts" in str(c.where)]
    sums = {(c.kind, c.bytes) for c in rows if c.phase == "forward" and c.kind in ("all_reduce", "reduce_scatter")}
    (gathered,) = {c.bytes for c in made.collectives if c.kind == "all_gather" and "q_proj" in str(c.where)} or {0}
    assert len(sums) == 1
    assert not along_the_sequence or sums == {("reduce_scatter", gathered)}
    assert all(kind == ("reduce_scatter" if along_the_sequence else "all_reduce") for kind, _ in sums)

"""Products of gathered keys and values keep this rank's part, and gather again in the backward, as the plan lists."""

from __future__ import annotations

import pytest

from passes.ops.gathered_attention import of_gathered
from planner.lower import lower
from tests.models.families import Entry, build
from tests.tools.saved_memory import measured
from tests.tools.simulated_mesh import equals_one_process, exchanges_of, run_mesh


def entry_of(name: str) -> Entry:
    entry = build(name)
    entry.inputs = {n: ((16, *s[1:]), *rest) for n, (s, *rest) in entry.inputs.items()}  # pyright: ignore
    return entry


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=["cp2", "cp2-tp2"])
@pytest.mark.parametrize("name", ["bloom", "t5", "gemma2"])
def test_it_equals_one_process_and_exchanges_what_the_rows_say(name: str, mesh: dict[str, int]) -> None:
    batch = entry_of(name).batch(2, 3)
    ran = equals_one_process(lambda: build(name).model, batch, mesh, loss=1e-6, gradient=1e-6)
    for fqn, gradient in ran.truth.gradients.items():
        assert (ran.gradients[fqn] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), fqn
    listed = exchanges_of(ran.plan)
    assert listed["cp", "all_gather", "backward"] == listed["cp", "all_gather", "forward"]


@pytest.mark.thorough
def test_what_a_stage_keeps_falls_as_the_tokens_of_a_rank() -> None:
    def activations(cp: int) -> int:
        made = run_mesh(lambda: build("bloom").model, entry_of("bloom").batch(2, 3), {"cp": cp}).plan
        assert all(n.target is not of_gathered for n in made.to_run()[0].program.graph.graph.nodes)
        return made.memory[0].activations

    one, two, four = (activations(cp) for cp in (1, 2, 4))
    assert 2 * two <= 1.05 * one
    assert 4 * four <= 1.05 * one


@pytest.mark.thorough
def test_recomputed_blocks_keep_their_gathers() -> None:
    batch = entry_of("bloom").batch(2, 3)
    ran = run_mesh(lambda: build("bloom").model, batch, {"cp": 2}, recompute="full")
    targets = {n.target for n in lower(ran.plan, 0).stages[0].module.graph.nodes}
    assert of_gathered not in targets


@pytest.mark.thorough
def test_the_plan_knows_to_the_byte_what_is_kept() -> None:
    for name in ("bloom", "t5"):
        made, kept = measured(lambda name=name: build(name).model, entry_of(name).batch(2, 3), {"cp": 2})
        assert [rank.total for rank in kept] == [made.memory[0].of_microbatch[0]] * 2

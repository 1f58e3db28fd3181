"""Weights that get no gradient stay as they are, to the last bit; those that get one train as in one process."""

from pathlib import Path

import pytest
import torch

from tests.models.families import build
from tests.models.untrained import MODELS, UNTRAINED
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import spec_of
from tests.tools.laboratory import Case, Lab

LAYOUTS = {"one-rank": {"dp": 1}, "tp2-pp2": {"tp": 2, "pp": 2}}
EXACT = 1e-9  # weight decay alone moves a weight by some 1e-5


def _weights_of(*blocks: int) -> set[str]:
    return {name for name, _ in build("untrained:unread").model.named_parameters() if name.startswith(_paths(*blocks))}


def _paths(*blocks: int) -> tuple[str, ...]:
    return tuple(f"blocks.{number}." for number in blocks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_updates_are_those_of_one_process(lab: Lab, model: str, layout: str) -> None:
    report = lab.check(Case(model, LAYOUTS[layout]))
    assert report.wrong == []
    assert report.parameter < EXACT


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", UNTRAINED)
def test_they_have_no_buffer_and_no_backward_and_the_plan_says_so(model: str) -> None:
    entry = build(model)
    made = plan_again(entry.model, spec_of(entry, None, mesh={"tp": 2}))
    bottom = _weights_of(0, 1) | ({"tokens.weight"} if model == "untrained:detached" else set())
    held = {name for b in made.optimizer.buffers for bucket in b.buckets for name in bucket.parameters}
    assert held == {p.name for p in made.parameters} - bottom
    (said,) = (row.what for row in made.diagnostics if "get no gradient" in row.what)
    assert said.startswith(f"{len(bottom)} parameters get no gradient and are not updated: ")
    backward = [row.where for row in made.collectives if row.phase == "backward"]
    assert backward
    assert not [where for where in backward if where.startswith(_paths(0, 1))]


def test_a_save_holds_their_values(tmp_path: Path) -> None:
    from runtime import Engine

    entry = build("untrained:detached")
    truth = {name: p.detach().clone() for name, p in entry.model.named_parameters()}
    spec = spec_of(entry, None)
    with Engine(plan_again(entry.model, spec)) as engine:
        engine.train_step(entry.batch(8, 0))
        engine.save(tmp_path)
    other = build("untrained:detached")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    with Engine(plan_again(other.model, spec)) as engine:
        engine.load(tmp_path)
        found = engine.gather_parameters()
    assert all(torch.equal(found[name], truth[name]) for name in _weights_of(0, 1))
    assert not torch.equal(found["head.weight"], truth["head.weight"])

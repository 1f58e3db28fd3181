"""A folded model decides and costs what the whole one does, block by block."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.blocks.blocks import find_blocks
from passes.errors import PlanError
from passes.program.program import copied
from planner.capture.export import capture
from planner.search import cuts
from planner.search.cuts import Cuts, Folded, fold
from planner.search.space import Cut
from tests.models.deep import captured, spec_of

KINDS = ("none", "selective", "full")
CUTS = [Cut(), Cut(2, etp=2), Cut(4, True, etp=4), Cut(2, cp=2, etp=2), Cut(2, ep=2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "times"), [("gpt2", (1, 4, 1)), ("gemma2", ())])
def test_a_row_of_equal_blocks_is_shortened_to_three_unless_every_other_has_a_mask_of_its_own(name: str, times):
    program = captured(name).program
    folded = fold(program, find_blocks(program))
    assert folded.blocks.times == times
    assert folded.is_folded is bool(times)
    assert len(folded.source) == 6


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
def test_the_work_of_a_folded_model_is_that_of_the_whole_one(name: str, monkeypatch: pytest.MonkeyPatch):
    spec = spec_of(name)
    folded = Cuts(captured(name), spec, KINDS)
    monkeypatch.setattr(cuts, "fold", lambda program, blocks: Folded(copied(program), blocks, _all(blocks)))
    whole = Cuts(captured(name), spec, KINDS)
    compared = 0
    for cut in CUTS:
        found, expected = _works(folded, cut), _works(whole, cut)
        assert found.keys() == expected.keys()
        if not found:
            continue
        for kind in KINDS:
            assert found[kind].units == expected[kind].units, (cut, kind)
            assert _bare(found[kind]) == _bare(expected[kind]), (cut, kind)
            assert _memory(found[kind], kind) == _memory(expected[kind], kind), (cut, kind)
        assert folded.stages(cut, 3, 1) == whole.stages(cut, 3, 1)
        compared += 1
    assert compared >= 3


def _works(of: Cuts, cut: Cut):
    """By kind of recompute; none where the model does not admit the cut."""
    try:
        return of.works(cut)
    except PlanError:
        return {}


def _memory(work, kind):
    """Of many stages, with 2 and 6 sequences, with and without W."""
    count = len(work.units)
    stages = [(0, count), (0, 1), (0, 4), (1, 2), (1, 5), (2, 4), (2, count), (count - 1, count)]
    ways = [(work.source[first:end], micro, waits) for first, end in stages for micro in (2, 6) for waits in (0, 1)]
    return [tuple(map(round, work.memory(kind, *way))) for way in ways]


def _all(blocks):
    return tuple(range(len(blocks.instances)))


def _bare(work):
    parts = replace(work, units=(), cache={})
    return (
        sorted(map(repr, parts.shared)),
        parts.num_noted,
    )


class Skipping(nn.Module):
    """The head reads what each layer made."""

    def __init__(self, every: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(6))
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.layers:
            x = x + layer(x)
            made.append(x)
        total = torch.stack(made).sum(0) if self.every else x
        return (total * total).mean()


@pytest.mark.parametrize("every", [False, True])
def test_a_model_whose_blocks_are_read_by_others_than_the_next_is_not_folded(every: bool):
    program = capture(Skipping(every), {"x": torch.randn(4, 8)})
    folded = fold(program, find_blocks(program))
    assert folded.is_folded is not every
    folded.program.graph.graph.lint()


def test_a_copy_is_rewritten_alone():
    program = captured("gpt2").program
    before = str(program.graph.graph)
    other = copied(program)
    assert [n.name for n in other.graph.graph.nodes] == [n.name for n in program.graph.graph.nodes]
    other.graph.graph.erase_node(other.graph.graph.output_node())
    assert str(program.graph.graph) == before

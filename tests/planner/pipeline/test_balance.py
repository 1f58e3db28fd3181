"""What stages cost: contiguous ranges with the least largest sum, and a last one without a block where it is less."""

import random
from itertools import combinations, pairwise

import pytest

from passes.program.program import Program, StageAssignment
from planner.pipeline.stages import WORTH_IT, balance
from tests.models.small import captured, layers
from tests.tools.stages_in_turn import check_equals_whole, sizes, stages_of


def exhaustive(costs: list[int], num_stages: int) -> list[int]:
    def key(cuts: tuple[int, ...]) -> tuple[int, int, list[int]]:
        ends = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return max(sums), sum(s * s for s in sums), [b - a for a, b in pairwise(ends)]

    return min(key(cuts) for cuts in combinations(range(1, len(costs)), num_stages - 1))[2]


def test_balance_is_that_of_an_exhaustive_search() -> None:
    source = random.Random(0)
    for _ in range(200):
        costs = [source.randint(0, 9) for _ in range(source.randint(1, 9))]
        num_stages = source.randint(1, len(costs))
        assert balance(costs, num_stages) == exhaustive(costs, num_stages)


def test_of_equal_splits_the_one_with_fewer_early_blocks_is_taken() -> None:
    assert balance([1] * 7, 2) == [3, 4]


# ---- what follows the last block


def with_vocabulary(vocabulary: int, num_layers: int = 4) -> Program:
    return captured(layers(num_layers), vocabulary)


def slowest(stages: StageAssignment) -> int:
    return max(stages.cost_of_stage)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vocabulary", [8, 64, 128, 256, 512, 1024, 4096])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_auto_is_as_fast_as_the_fastest_cut_with_or_without_a_block_beside_the_head(vocabulary: int, pp: int) -> None:
    program = with_vocabulary(vocabulary)
    with_a_block = [_cut(4, ends) for ends in combinations(range(1, 4), pp - 1)]
    without = [[*_cut(4, ends), 0] for ends in combinations(range(1, 4), pp - 2)]
    fastest = {
        alone: min(slowest(stages_of(program, pp, split=_text(cut))) for cut in cuts)
        for alone, cuts in ((False, with_a_block), (True, without))
    }
    stages = stages_of(program, pp)
    stands_alone = fastest[True] < WORTH_IT * fastest[False]
    assert slowest(stages) == fastest[stands_alone]
    assert (sizes(stages)[-1] == 0) is stands_alone


@pytest.mark.thorough
def test_both_kinds_of_cut_are_met() -> None:
    """So that the test above is about both."""
    assert sizes(stages_of(with_vocabulary(8), 4)) == [1, 1, 1, 1]
    assert sizes(stages_of(with_vocabulary(4096), 4)) == [1, 1, 2, 0]


def test_a_head_alone_computes_the_loss_of_the_whole_graph() -> None:
    program = with_vocabulary(512)
    stages = stages_of(program, 4)
    assert sizes(stages)[-1] == 0
    check_equals_whole(program, stages)


def test_every_chunk_of_virtual_stages_has_a_block() -> None:
    program = with_vocabulary(4096)
    assert sizes(stages_of(program, 2, 2)) == [1, 1, 1, 1]


def _cut(num_blocks: int, ends: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in pairwise([0, *ends, num_blocks])]


def _text(cut: list[int]) -> str:
    return "E" + "|".join("t" * size for size in cut) + "L"

import random

import numpy as np

from passes.blocks.periods import BlockRun, Flow, find_runs, live_bytes


def word(text: str, live: list[int] | None = None) -> Flow:
    """One letter for each operation, each reading the one before; capitals do the work."""
    n = len(text)
    edges = np.array([(i, i + 1) for i in range(n - 1)]).reshape(-1, 2)
    crossing = np.array(live if live is not None else [1] * (n + 1))
    return Flow(np.array([ord(c) for c in text]), np.array([int(c.isupper()) for c in text]), edges, crossing)


def test_a_repeated_stretch_is_one_run() -> None:
    assert find_runs(word("xabCabCabCz")) == [[BlockRun(1, 3, 3)]]


def test_the_shortest_period_counts() -> None:
    assert find_runs(word("aBaBaBaB")) == [[BlockRun(0, 2, 4)]]


def test_a_word_without_repetition_or_without_work_has_no_runs() -> None:
    assert find_runs(word("aBcDeF")) == []
    assert find_runs(word("abababab")) == []
    assert find_runs(word("")) == []


def test_two_stretches_of_one_period_are_found_together() -> None:
    assert find_runs(word("aBaBaBxyzwaBaBaB")) == [[BlockRun(0, 2, 3), BlockRun(10, 2, 3)]]


def test_stretches_of_different_periods_come_heaviest_first() -> None:
    assert find_runs(word("aBaBaBzpQRSpQRSpQRS")) == [[BlockRun(7, 4, 3)], [BlockRun(0, 2, 3)]]


def test_blocks_start_where_the_least_crosses() -> None:
    text = "xcabcabcabcay"
    live = [3 if c != "b" else 1 for c in text.lower()] + [3]
    assert find_runs(word(text.replace("c", "C"), live)) == [[BlockRun(3, 3, 3)]]


def test_of_equally_clean_starts_the_one_with_most_blocks_is_taken() -> None:
    assert find_runs(word("AbcAbcAbcA")) == [[BlockRun(0, 3, 3)]]


def test_one_letter_that_differs_does_not_end_a_run() -> None:
    assert find_runs(word("abcDefghabcDxfghabcDefgh")) == [[BlockRun(0, 8, 3)]]


def test_things_side_by_side_are_no_run() -> None:
    flow = word("abCabCabC")
    apart = flow.edges[(flow.edges[:, 1] % 3) != 0]
    assert find_runs(Flow(flow.tokens, flow.work, apart, flow.live)) == []


def test_runs_of_random_words_repeat_and_do_not_overlap() -> None:
    source = random.Random(0)
    for _ in range(300):
        text = "".join(source.choice("aBC") * source.randint(1, 3) for _ in range(source.randint(1, 40)))
        taken: set[int] = set()
        for runs in find_runs(word(text)):
            for run in runs:
                assert run.count >= 2
                assert run.end <= len(text)
                assert any(c.isupper() for c in text[run.start : run.end])
                own = set(range(run.start, run.end))
                assert not own & taken
                taken |= own


def test_live_bytes_are_those_of_values_read_later() -> None:
    edges = np.array([(0, 1), (0, 3), (1, 2), (2, 3)])
    assert live_bytes(edges, np.array([5, 7, 11, 13])).tolist() == [0, 5, 12, 16, 0]

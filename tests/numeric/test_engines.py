"""One engine's ways to step, and engines one after another, give what one process gives."""

import pytest

from tests.tools import jobs
from tests.tools.comparison import compare
from tests.tools.laboratory import Case, Lab

LAYOUTS = [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_two_engines_one_after_another_equal_one_process(lab: Lab, mesh: dict[str, int]) -> None:
    assert [report.wrong for report in lab.check_each(Case("gpt", mesh, job=jobs.two_engines))] == [[], []]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_train_step_gives_the_same_bits_as_its_two_halves(lab: Lab, mesh: dict[str, int]) -> None:
    whole = lab.run(Case("gpt", mesh, job=jobs.train_steps, job_arguments=(False,)))[0]
    halves = lab.run(Case("gpt", mesh))[0]
    assert whole.losses == halves.losses
    assert whole.norms == halves.norms
    assert whole.evaluated == halves.evaluated
    assert all(whole.parameters[name].equal(value) for name, value in halves.parameters.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"dp": 2}, *LAYOUTS], ids=str)
def test_local_shares_of_the_batch_equal_one_process(lab: Lab, mesh: dict[str, int]) -> None:
    report = lab.check(Case("gpt", mesh, job=jobs.train_steps, job_arguments=(True,)))
    assert [words for words in report.wrong if not words.startswith("gradient ")] == []


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_the_same_run_twice_gives_the_same_bits(lab: Lab, mesh: dict[str, int]) -> None:
    first, second = (lab.run(Case("gpt", mesh))[0] for _ in range(2))
    assert first.losses == second.losses
    assert all(first.parameters[name].equal(value) for name, value in second.parameters.items())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "precision",
    [
        {"parameters": "float32"},
        {"parameters": "bfloat16", "gradients": "float32"},
        {"parameters": "bfloat16", "gradients": "bfloat16"},
    ],
    ids=lambda p: "-".join(p.values()),
)
@pytest.mark.parametrize("mesh", LAYOUTS[:2], ids=str)
def test_other_precisions_equal_one_process_to_their_rounding(
    lab: Lab, mesh: dict[str, int], precision: dict[str, str]
) -> None:
    report = lab.check(Case("gpt", mesh, {"precision": precision}))
    assert report.of("loss", "gradient") == []


@pytest.mark.thorough
def test_bits_of_a_run_do_not_depend_on_dp_where_the_microbatches_are_the_same(lab: Lab) -> None:
    one, two = (lab.run(Case("gpt", {"dp": dp}))[0] for dp in (1, 2))
    assert compare(two, one).wrong == []

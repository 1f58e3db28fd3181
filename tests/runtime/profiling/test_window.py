"""Which steps are profiled, by what was asked for."""

from __future__ import annotations

import pytest

from passes.errors import PlanError
from runtime.profiling.profile import Window


@pytest.mark.parametrize(
    ("text", "made", "steps"),
    [
        ("3", 0, [2, 3, 4]),
        ("1", 10, [12]),
        ("10:13", 0, [10, 11, 12, 13]),
        ("1:1", 0, [1]),
        ("10:13", 11, [12, 13]),
        ("10:13", 13, []),
    ],
)
def test_a_number_of_steps_after_the_first_of_the_run_or_steps_by_their_numbers(text, made, steps):
    assert list(Window.parse(text, 20).steps(made)) == steps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no steps"),
        ("three", "names no steps"),
        ("1:2:3", "names no steps"),
        ("-3", "names no steps"),
        ("²", "names no steps"),
        ("9" * 30, "names no steps"),
        ("0", "not a range of steps"),
        ("0:3", "not a range of steps"),
        ("4:3", "not a range of steps"),
        ("18:21", "ends at step 21, but the run has 20 steps"),
        ("20", "ends at step 21, but the run has 20 steps"),
    ],
)
def test_what_names_no_step_of_the_training_is_one_error(text, words):
    with pytest.raises(PlanError, match=words) as caught:
        Window.parse(text, 20)
    assert "10:13" in str(caught.value)

"""What a forward draws, asks the clock or names in Python: frozen by a capture, so refused by line, or told."""

import datetime
import logging
import os
import random
import time
import uuid
from random import random as drawn
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from planner import PlanError, plan
from tests.models.one_body import SPEC
from tests.models.with_state import Middle, Model, assert_planned_and_left_alone

RNG = random.Random(0)


def shuffled(m: Any, x: Tensor) -> Tensor:
    order = [0, 1, 2, 3, 4]
    random.shuffle(order)
    return x[:, order]


REFUSED: dict[str, Middle] = {
    "shuffled": shuffled,
    "own_random": lambda m, x: x * 2 if m.draws.random() < 1e-9 else x,
    "rare_draw": lambda m, x: x * 2 if m.generator.integers(1 << 40) == 7 else x,
    "system_bytes": lambda m, x: x * 2 if os.urandom(2) == b"ab" else x,
    "unique": lambda m, x: x * 2 if uuid.uuid4().int % 1000 == 7 else x,
    "calendar": lambda m, x: x * datetime.datetime.now().microsecond,
    "computed_of_a_name": lambda m, x: x * (int(uuid.uuid4().hex[:8], 16) + 1),
    "random_object": lambda m, x: x * RNG.random(),
    "python_random": lambda m, x: x * random.random(),
    "imported_random": lambda m, x: x if drawn() < 0.5 else x * 2,
    "numpy_random": lambda m, x: x * float(np.random.normal()),
    "own_generator": lambda m, x: x * float(m.generator.normal()),
    "clock": lambda m, x: x * (time.time() % 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("middle", REFUSED.values(), ids=REFUSED)
def test_what_is_drawn_anew_in_each_call_is_refused_with_a_line(middle: Middle) -> None:
    with pytest.raises(PlanError) as error:
        plan(Model(middle), SPEC)
    assert "test_draws.py" in str(error.value)
    assert error.value.fix


def timed(m: Any, x: Tensor) -> Tensor:
    m.state.seen = time.perf_counter()
    return x


def named(m: Any, x: Tensor) -> Tensor:
    names = {f"axis {uuid.uuid4().int}", str(uuid.uuid4())}
    return x * len(names)


KEPT: dict[str, Middle] = {
    "timed": timed,
    "named": named,
    "certain_draw": lambda m, x: x if random.random() < 0.0 or np.random.uniform(0, 1) >= 1.0 else x * 2,
}


@pytest.mark.thorough
@pytest.mark.parametrize("middle", KEPT.values(), ids=KEPT)
def test_what_decides_nothing_is_planned_and_leaves_the_model_alone(middle: Middle) -> None:
    assert_planned_and_left_alone(Model(middle))


@pytest.mark.parametrize(
    ("middle", "what"), [(timed, "the time"), (named, "an identifier (uuid4)")], ids=["clock", "id"]
)
def test_a_value_that_decides_nothing_is_told_with_its_line_and_is_no_warning(middle: Middle, what: str) -> None:
    (told,) = [row for row in plan(Model(middle), SPEC).diagnostics if f"reads {what}" in row.what]
    assert "test_draws.py" in told.where
    assert told.level == "info"


def test_a_log_record_made_in_the_forward_is_no_question_for_the_time() -> None:
    def logged(m: Any, x: Tensor) -> Tensor:
        logging.getLogger("of a forward").warning("seen")
        return x

    assert not [row for row in plan(Model(logged), SPEC).diagnostics if "reads the time" in row.what]

"""Seeds and generators of PyTorch that a forward sets: one process repeats the noise, a plan would not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.random import fork_rng

from planner import PlanError, plan
from tests.models.one_body import SPEC, Body, OneBody


class Noisy(OneBody):
    def __init__(self, noise: Body) -> None:
        super().__init__(noise)
        self.generator = torch.Generator()


def seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)  # here
    return x + torch.randn_like(x)


def seeded_by_the_generator(m: Any, x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(3)
    return x + torch.randn_like(x)  # here


def seeded_on_the_device(m: Any, x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(3)  # here
    return F.dropout(x)


def forked(m: Any, x: Tensor) -> Tensor:
    with fork_rng():  # here
        return x + torch.randn_like(x)


def put_back(m: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = x + torch.randn_like(x)
    torch.set_rng_state(state)  # here
    return x + torch.randn_like(x)


def by_its_own_generator(m: Any, x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=m.generator)  # here


def in_place_by_its_own(m: Any, x: Tensor) -> Tensor:
    return x * torch.empty(8).uniform_(generator=m.generator)  # here


def by_a_new_one(m: Any, x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full((8,), 0.5), generator=torch.Generator().manual_seed(3))  # here


REFUSED = [seeded, seeded_by_the_generator, seeded_on_the_device, forked, put_back, by_its_own_generator,
           in_place_by_its_own, by_a_new_one]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("noise", REFUSED, ids=lambda f: f.__name__)
def test_noise_that_one_process_repeats_is_refused_at_its_line(noise: Callable[[Any, Tensor], Tensor]) -> None:
    model, before = Noisy(noise), torch.get_rng_state()
    with pytest.raises(PlanError) as error:
        plan(model, SPEC)
    start = noise.__code__.co_firstlineno  # pyright: ignore[reportFunctionMemberAccess]
    lines = Path(__file__).read_text().splitlines()
    marked = next(number for number, line in enumerate(lines, 1) if number > start and "# here" in line)
    assert (error.value.where.file, error.value.where.line) == (__file__, marked)  # pyright: ignore
    assert error.value.fix
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_without_a_seed_is_planned_and_leaves_the_generator_alone() -> None:
    model = OneBody(lambda m, x: F.dropout(x) + torch.randn_like(x))
    before, seed = torch.get_rng_state(), torch.initial_seed()
    assert plan(model, SPEC).parameters
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == seed

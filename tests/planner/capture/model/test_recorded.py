"""A construction that is written down gives each parameter the values of building the whole model, bit for bit."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.capture.model.exchange import seed_generators
from planner.capture.model.recorded import CannotRecord, build_recorded, recorded_values
from tests.models.hugging_face import ZOO


def check(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that was written down; its values are those of ``build``, as are its buffers."""
    seed_generators(5)
    whole = build()
    seed_generators(5)
    recorded = build_recorded(build)
    values = recorded_values(recorded)
    assert values is not None
    of_whole = dict(whole.named_parameters(remove_duplicate=False))
    found = dict(recorded.named_parameters(remove_duplicate=False))
    assert list(of_whole) == list(found)
    for name in reversed(of_whole):
        held, expected = found[name], of_whole[name]
        value = values.value(name)
        assert torch.equal(value, expected), name
        assert (value.dtype, value.stride(), held.stride()) == (expected.dtype, expected.stride(), expected.stride())
        assert held.is_meta
        assert type(held) is nn.Parameter
        assert (held.requires_grad, vars(held).keys()) == (expected.requires_grad, vars(expected).keys())
    tied = [[p is q for q in found.values()] for p in found.values()]
    assert tied == [[p is q for q in of_whole.values()] for p in of_whole.values()]
    for (name, buffer), (other, expected) in zip(recorded.named_buffers(), whole.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(buffer, expected), name
    return recorded


def of_family(name: str) -> nn.Module:
    """Without a seed of its own."""
    import transformers

    member = ZOO[name]
    return getattr(transformers, member.model)._from_config(getattr(transformers, member.config)(**member.sizes))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", ZOO)
def test_families_have_the_values_of_building_them_whole(family: str):
    check(partial(of_family, family))


def test_no_number_is_drawn_while_nobody_asks_for_a_value():
    seed_generators(5)
    before = torch.get_rng_state()
    model = build_recorded(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    assert torch.equal(before, torch.get_rng_state())
    assert recorded_values(model) is not None


class Between(nn.Module):
    """A buffer is drawn between parameters, from the same generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("noise", torch.randn(4))
        self.second = nn.Parameter(torch.randn(4, 4) / 2 + torch.from_numpy(np.eye(4, dtype=np.float32)))
        self.register_buffer("copy", self.first.weight.detach() * 2)


class Seeded(nn.Module):
    """It sets a seed of its own on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        torch.manual_seed(77)
        self.second = nn.Linear(4, 4)
        with torch.no_grad():
            self.second.weight[0].zero_()
            self.second.weight.data[:, 1] += self.first.weight[:, 0]


class Asking(nn.Module):
    """How often it draws depends on what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.square, self.last = (nn.Parameter(torch.empty(16, 16)) for _ in range(3))
        nn.init.trunc_normal_(self.cut, std=1.0, a=-0.5, b=0.5)
        nn.init.orthogonal_(self.square)
        nn.init.normal_(self.last, std=float(self.cut.std()))
        self.tied = self.cut


@pytest.mark.parametrize("build", [Between, Seeded, Asking])
def test_constructors_that_mix_draws_seeds_and_questions(build: Callable[[], nn.Module]):
    check(build)


def test_half_precision_is_drawn_in_half_precision():
    def build() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return nn.Sequential(nn.Embedding(9, 5), nn.LayerNorm(5))
        finally:
            torch.set_default_dtype(torch.float32)

    assert {p.dtype for p in check(build).parameters()} == {torch.bfloat16}


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(3))


class Held(nn.Module):
    """A plain tensor, computed of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.doubled: Tensor = self.weight.detach() * 2


@pytest.mark.parametrize("build", [OwnGenerator, Held])
def test_what_cannot_be_written_down_is_said(build: Callable[[], nn.Module]):
    with pytest.raises(CannotRecord):
        build_recorded(build)

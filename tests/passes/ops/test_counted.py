"""Numbers by name: the published ones, the right share of zeros, none twice, the same for any part of a value."""

import pytest
import torch

from passes.ops.dropout import (
    GOLDEN,
    SampleElements,
    counted_bernoulli,
    counted_dropout,
    counted_normal,
    counted_uniform,
    mix,
    numbers,
)
from passes.ops.random_state import RandomState

CPU = torch.device("cpu")
# The first outputs of SplitMix64 from the seed 1234567, as its authors' program prints them.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def whole(
    *shape: int, site: int = 0, batch: tuple[int, int, int] | None = None, by_sample: bool = True
) -> SampleElements:
    return SampleElements(site, shape, tuple(((0, n),) for n in shape), batch, by_sample)


def state(seed: int = 1, step: int = 0, microbatch: int = 0) -> RandomState:
    made = RandomState(seed, 0)
    made.begin(step, microbatch)
    return made


def test_mix_gives_the_published_numbers():
    found = mix(1234567 + torch.arange(1, 6) * GOLDEN)
    assert [z % (1 << 64) for z in found.tolist()] == PUBLISHED


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    x = torch.ones(64, 1024, dtype=torch.float64, requires_grad=True)
    y = counted_dropout(x, 0.3, state(), whole(64, 1024))
    assert (y == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert y.detach().unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.equal(y.detach())


def test_an_evaluation_drops_nothing():
    random = state()
    random.training = False
    x = torch.ones(4, 4)
    assert counted_dropout(x, 0.5, random, whole(4, 4)) is x


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 1}, {"microbatch": 1}])
def test_seed_step_and_microbatch_give_other_numbers(other):
    place = whole(8, 64, batch=(0, 1, 8))
    one, two = numbers(state(), place, CPU), numbers(state(**other), place, CPU)
    assert not set(one.flatten().tolist()) & set(two.flatten().tolist())
    assert len(set(one.flatten().tolist())) == 8 * 64


def test_two_sites_give_other_numbers():
    one, two = (numbers(state(), whole(8, 64, site=site), CPU) for site in (0, 1))
    assert not set(one.flatten().tolist()) & set(two.flatten().tolist())


def test_what_all_sequences_share_does_not_follow_the_microbatch():
    shared = whole(16, 8, by_sample=False)
    assert numbers(state(microbatch=3), shared, CPU).equal(numbers(state(), shared, CPU))


def test_microbatches_of_another_size_hold_the_same_sequences():
    four = numbers(state(), whole(4, 6, batch=(0, 1, 4)), CPU)
    two = [numbers(state(microbatch=m), whole(2, 6, batch=(0, 1, 2)), CPU) for m in range(2)]
    one = [numbers(state(microbatch=m), whole(1, 6), CPU) for m in range(4)]
    assert torch.cat(two).equal(four)
    assert torch.cat(one).equal(four)


@pytest.mark.parametrize(
    ("shape", "batch"), [((5, 4, 3), (1, 1, 4)), ((4 * 5, 3), (0, 5, 4)), ((2, 4 * 3), (1, 3, 4))], ids=str
)
def test_the_batch_may_stand_anywhere(shape, batch):
    """Each sequence alone has the numbers that it has among four."""
    dim, step, number = batch
    found = numbers(state(), whole(*shape, batch=batch), CPU)
    outer = shape[dim] // (step * number)
    apart = found.unflatten(dim, (outer, number, step))
    for sample in range(4):
        alone = tuple(n // 4 if d == dim else n for d, n in enumerate(shape))
        own = numbers(state(microbatch=sample), whole(*alone), CPU)
        assert apart.select(dim + 1, sample).flatten(dim, dim + 1).equal(own)


def test_a_part_has_the_numbers_of_its_elements():
    full = numbers(state(), whole(4, 12, 8, batch=(0, 1, 4)), CPU)
    part = SampleElements(0, (4, 12, 8), (((0, 4),), ((0, 3), (9, 12)), ((4, 8),)), (0, 1, 4), True)
    held = full[:, [0, 1, 2, 9, 10, 11], 4:]
    assert numbers(state(), part, CPU).equal(held)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_are_below_one_in_every_dtype(dtype):
    drawn = counted_uniform(state(), whole(256, 256), dtype, CPU)
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_normal_numbers_have_the_moments_of_their_distribution():
    drawn = counted_normal(state(), whole(256, 256), torch.float64, CPU)
    moments = [drawn.mean().item(), drawn.var().item(), (drawn**4).mean().item()]
    assert moments == pytest.approx([0, 1, 3], abs=0.06)


def test_bernoulli_takes_a_number_or_one_for_each():
    like = torch.ones(128, 128)
    assert counted_bernoulli(0.25, state(), whole(128, 128), like).mean().item() == pytest.approx(0.25, abs=0.02)
    shares = torch.linspace(0, 1, 128).expand(128, 128)
    drawn = counted_bernoulli(shares, state(), whole(128, 128), like)
    assert drawn[:, 0].sum() == 0
    assert drawn[:, -1].sum() == 128


def test_a_rerun_has_the_numbers_of_its_forward():
    random, place = state(step=3, microbatch=1), whole(4, 4)
    first = numbers(random, place, CPU)
    random.begin(3, 2)
    with random.again(3, 1):
        assert numbers(random, place, CPU).equal(first)
    assert not numbers(random, place, CPU).equal(first)

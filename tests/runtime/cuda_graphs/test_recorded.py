"""A recorded graph does what a CUDA graph does: the same ops at the same addresses, whatever became of them."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.experts import splits_of_both
from passes.ops.random_state import Draw, RandomState
from planner.capture.model.exchange import storage_of
from runtime.cuda_graphs.recorded import CaptureError, Pool, RecordedGraph
from tests.tools.examples import examples

CPU = torch.device("cpu")
Body = Callable[..., Any]


def recorded(body: Body, *given: Tensor, pool: Pool | None = None, **kwargs: Any) -> tuple[RecordedGraph, Any]:
    """The graph of ``body(*given)``, and what the capture gave."""
    graph = RecordedGraph(pool or Pool(CPU), kwargs.pop("random", RandomState(0, 0)), **kwargs)
    made: list[Any] = []
    graph.capture(lambda: made.append(body(*given)))
    return graph, made[0]


def assert_follows(body: Body, first: Tensor, second: Tensor) -> None:
    """A replay gives for new values, in the same memory, what ``body`` gives for them; twice."""
    static = first.clone()
    graph, out = recorded(body, static)
    assert torch.equal(out, body(first.clone()))
    for values in (second, first):
        static.copy_(values)
        graph.replay()
        assert torch.equal(out, body(values.clone()))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- replays


BODIES: dict[str, Body] = {
    "several ops": lambda x: torch.softmax(x @ x.t(), -1) @ x,
    "an op that lets blocks go": lambda x: ((x + 1) * 2 - 3).relu() / 4,
    "in place": lambda x: (x * 2).add_(x).mul_(3).clamp_(min=-1),
    "in place on the input": lambda x: x.mul_(2) + x,
    "in place through a view": lambda x: _written_through_a_view(x),
    "a view of a result": lambda x: (x * 3)[1:, ::2],
    "a view of a view, turned": lambda x: (x + 1).view(2, 2, 4).transpose(0, 2).contiguous(),
    "a result with strides": lambda x: (x.t() * 2).t(),
    "an expanded result": lambda x: x.sum(0).expand(3, 4),
    "an expanded result, read": lambda x: x.sum(0).expand(3, 4) * 2,
    "several results": lambda x: sum(torch.max(x, 1)),
    "parts": lambda x: torch.cat(x.split(1)[::-1]),
    "nothing in it": lambda x: torch.cat([x[:0] * 2, x * 2]),
    "an empty result": lambda x: x[:0] * 2,
    "a scalar": lambda x: x.sum() * 2,
    "a conjugate": lambda x: torch.fft.rfft(x).conj() * torch.fft.rfft(x + 1),
    "an imaginary part of a conjugate": lambda x: torch.fft.rfft(x).conj().imag * 2,
    "the gradient of a convolution by its spectrum": lambda x: _spectral_gradient(x),
    "zeros": lambda x: torch.zeros(4, 4, dtype=x.dtype).add_(x),
    "memory that is filled later": lambda x: torch.empty_like(x).copy_(x) * 2,
    "indices": lambda x: x[torch.tensor([2, 0, 0])],
    "indices that are computed": lambda x: x[x.argsort(0)[:, 0]],
    "numbers that are written": lambda x: torch.zeros_like(x).index_put_((torch.tensor([1]),), x[0]),
    "numbers as one-hot rows": lambda x: torch.ops.aten.one_hot.default(x.argmax(0), 5) * x.sum(),
    "a choice by a mask": lambda x: torch.where(x > 0, x, -2 * x),
    "a fill by a mask": lambda x: x.clone().index_put_((x > 0,), x.sum()),
    "a gradient": lambda x: _gradient(x),
}


def _written_through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y.t()[1].zero_()
    return y


def _spectral_gradient(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad((torch.fft.irfft(torch.fft.rfft(leaf) * torch.fft.rfft(leaf * 2)) ** 2).sum(), leaf)[0]


def _gradient(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf.exp() * leaf).sum(), leaf)[0]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_replay_reads_what_stands_in_its_inputs(body):
    assert_follows(body, numbers(4, 4), numbers(4, 4, seed=1))


@given(st.lists(st.sampled_from(["add", "mul", "t", "half", "relu_", "neg_", "cat", "drop"]), max_size=12))
@examples(60)
def test_any_chain_of_ops_is_replayed(names):
    ops: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": lambda y, x: y + x.sum(),
        "mul": lambda y, x: y * y,
        "t": lambda y, x: y.t(),
        "half": lambda y, x: y[: max(1, y.shape[0] // 2)],
        "relu_": lambda y, x: y.relu_(),
        "neg_": lambda y, x: y.neg_(),
        "cat": lambda y, x: torch.cat([y, y]),
        "drop": lambda y, x: y.tanh() + (y * 2).sum(),
    }

    def body(x: Tensor) -> Tensor:
        y = x.clone()
        for name in names:
            y = ops[name](y, x)
        return y.clone()

    assert_follows(body, numbers(4, 3), numbers(4, 3, seed=1))


def test_what_python_chose_at_the_capture_stays():
    scale, sign = [2.0], [True]
    x = numbers(3)
    graph, out = recorded(lambda: x * scale[0] if sign[0] else -x)
    scale[0], sign[0] = 5.0, False
    graph.replay()
    assert torch.equal(out, x * 2)


def test_a_tensor_that_took_another_ones_place_is_not_read():
    given = {"x": numbers(3)}
    graph, out = recorded(lambda: given["x"] * 2)
    old = given["x"]
    given["x"] = numbers(3, seed=1)
    graph.replay()
    assert torch.equal(out, old * 2)


def test_a_graph_reads_what_another_one_of_its_pool_left():
    pool, x = Pool(CPU), numbers(3)
    first, y = recorded(lambda: x + 1, pool=pool)
    second, z = recorded(lambda: y * 2, pool=pool)
    x.fill_(1.0)
    first.replay()
    second.replay()
    assert torch.equal(z, torch.full_like(x, 4.0))


# ---- what no graph captures


REFUSED: dict[str, Body] = {
    "item": lambda x: x.sum().item(),
    "a branch": lambda x: 1 if (x > 0).all() else 2,
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask that is written": lambda x: x.clone().index_put_((x[:, 0] > 0,), x[0]),
    "as many one-hot columns as needed": lambda x: torch.ops.aten.one_hot.default(x.argmax(0)),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "to the host": lambda x: x.cpu(),
    "rows of each expert": lambda x: splits_of_both((x > 0).sum(0), AxisHandle("ep", 1, 0), AxisHandle("etp", 1, 0)),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_reading_values_on_the_host_is_refused(body):
    with pytest.raises(CaptureError, match="on the host"):
        recorded(body, numbers(3, 4))


# ---- memory


def test_a_block_is_given_again_when_nobody_holds_it():
    pool = Pool(CPU)
    recorded(lambda x: ((x + 1) * 2 - 3) / 4, numbers(8), pool=pool)
    assert pool.num_bytes == 2 * 8 * 8  # what is read, and what is made of it


def test_a_block_is_not_given_again_while_a_view_holds_it():
    pool = Pool(CPU)

    def body(x: Tensor) -> Tensor:
        view = (x + 1)[2:3]
        for _ in range(3):
            x = x * 2
        return view + x[2:3]

    _, out = recorded(body, numbers(8), pool=pool)
    x = numbers(8)
    assert torch.equal(out, (x + 1)[2:3] + x[2:3] * 8)
    assert len(pool.blocks) == 3  # the held one, and two in turn


def test_the_smallest_block_that_is_large_enough_is_taken():
    pool = Pool(CPU)
    assert [pool.take(size) for size in (80, 16, 40)] == [0, 0, 0]  # nothing was kept in it
    big, small = pool.keep(numbers(10)), pool.keep(numbers(2))
    del big, small
    assert (pool.take(16), pool.take(24), pool.take(88)) == (1, 0, 2)
    assert pool.num_bytes == 80 + 16 + 88


def test_a_tensor_that_is_kept_over_the_free_of_its_block_reads_nan():
    """As by a weak reference: the address is known, and nobody holds the memory."""
    x, addresses = numbers(4), list[Any]()

    def body() -> Tensor:
        y = x + 1
        addresses.append(pool.place_of(y))
        z = y * 2
        del y
        return z.sum()  # takes the first place of the block

    pool = Pool(CPU)
    graph, out = recorded(body, pool=pool)
    graph.replay()
    assert addresses[0].tensor(pool)[1:].isnan().all()
    assert torch.equal(out, ((x + 1) * 2).sum())


def test_what_was_let_go_between_two_graphs_is_gone_with_the_later_one():
    pool, x = Pool(CPU), numbers(4)
    first, y = recorded(lambda: x + 1, pool=pool)
    place = pool.place_of(y)
    assert place is not None
    del y
    second, z = recorded(lambda: x[:1] * 2, pool=pool)
    first.replay()
    assert torch.equal(place.tensor(pool), x + 1)
    second.replay()
    assert place.tensor(pool)[1:].isnan().all()
    assert torch.equal(z, x[:1] * 2)


def test_a_replay_holds_its_blocks_and_writes_into_no_other():
    pool, x = Pool(CPU), numbers(4)
    graph, out = recorded(lambda: (x + 1) * 2, pool=pool)
    graph.replay()
    del out
    other, again = recorded(lambda: x * 3, pool=pool)
    graph.replay()
    assert torch.equal(again, x * 3)
    other.replay()
    assert torch.equal(again, x * 3)


def test_a_place_is_a_tensor_of_the_pool_and_of_no_other():
    pool = Pool(CPU)
    kept = pool.keep(numbers(4, 6))
    view = kept.t()[2:, 1::2]
    place = pool.place_of(view)
    assert place is not None
    found = place.tensor(pool)
    assert (storage_of(found), found.stride(), found.shape) == (storage_of(kept), view.stride(), view.shape)
    assert torch.equal(found, view)
    assert pool.place_of(numbers(4)) is None
    assert Pool(CPU).place_of(kept) is None


@pytest.mark.parametrize(
    "value",
    [
        numbers(3, 4).t(),
        numbers(4).expand(3, 4),
        numbers(3, 4)[:, ::2],
        numbers(0, 4),
        numbers(1)[0],
        torch.arange(5),
        torch.tensor([True, False]),
    ],
    ids=["turned", "expanded", "with gaps", "empty", "scalar", "int64", "bool"],
)
def test_what_is_kept_has_the_values_and_is_dense(value):
    kept = Pool(CPU).keep(value)
    assert torch.equal(kept, value)
    assert kept.dtype == value.dtype
    assert kept.untyped_storage().nbytes() == max(1, value.numel() * value.element_size())


# ---- random numbers


def drawn(seed: int, body: Callable[[torch.Generator], Tensor]) -> Tensor:
    return body(torch.Generator().manual_seed(seed))


NAMED: dict[str, Callable[[torch.Generator], Tensor]] = {
    "bernoulli_": lambda g: torch.empty(64).bernoulli_(0.5, generator=g),
    "randn": lambda g: torch.randn(64, generator=g),
    "rand twice": lambda g: torch.rand(8, generator=g) + torch.rand(8, generator=g),
}


@pytest.mark.parametrize("body", NAMED.values(), ids=NAMED)
def test_a_replay_draws_from_where_its_generator_was_put(body):
    generator = torch.Generator().manual_seed(1)
    graph, out = recorded(lambda: body(generator), generators=[generator])
    assert torch.equal(out, drawn(1, body))
    for seed in (2, 3, 2):
        generator.manual_seed(seed)
        graph.replay()
        assert torch.equal(out, drawn(seed, body))


def by_default(random: RandomState) -> Callable[[], Tensor]:
    def body() -> Tensor:
        with random.as_default(CPU, 7, False):
            return torch.nn.functional.dropout(torch.ones(64), 0.5)

    return body


def test_ops_without_a_generator_draw_from_the_default_one_as_eagerly():
    random, own = RandomState(5, 0), torch.Generator()
    random.registered = {Draw(0, 7, False): own}
    random.put_all(random.registered)
    graph, out = recorded(by_default(random), random=random, generators=[own])
    random.registered = None
    before = torch.get_rng_state()
    for microbatch in (0, 3, 1):
        random.begin(2, microbatch)
        random.put_all({Draw(0, 7, False): own})
        graph.replay()
        assert torch.equal(out, by_default(random)())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("others", [[], [torch.Generator()]])
def test_drawing_from_a_generator_that_is_not_registered_is_refused(others: Collection[torch.Generator]):
    random, own = RandomState(5, 0), torch.Generator()
    random.registered = {Draw(0, 7, False): own}
    with pytest.raises(CaptureError, match="not registered"):
        recorded(lambda: torch.rand(3, generator=own), generators=others)
    with pytest.raises(CaptureError, match="not registered"):
        recorded(by_default(random), random=random, generators=others)

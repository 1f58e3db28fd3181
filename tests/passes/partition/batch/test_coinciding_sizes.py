"""A table has as many rows as the batch, or the batch has one sequence: only what is shown keeps sequences apart.

Each model is compared with one process on the whole batch: it is exact, or the plan says that it mixes sequences.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.tools.loss_shares import CLASSES, LENGTH, WIDTH, Shared, Small, batch_of, built, rows, shared
from tests.tools.simulated_mesh import equals_one_process

NUM_MICROBATCHES = 4
Mix = Callable[[Tensor, Tensor], Tensor]


class Mixed(Small):
    """What ``mix`` makes of the features [batch, length, width] and the ids goes to the head."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(lambda logits, labels, _: rows(logits, labels).mean())
        self.mix = mix

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.mix(self.embed(ids), ids)), labels, self.head.weight)


def compared(mix: Mix, micro: int) -> Shared:
    return shared(lambda: Mixed(mix), micro, NUM_MICROBATCHES)


# ---- rows put into a table, and read from it


def added(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
    return table.index_add(0, index, x)


def scattered(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
    return table.scatter_add(0, index[:, None].expand_as(x), x)


def averaged(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
    return table.scatter_reduce(0, index[:, None].expand_as(x), x, "mean")


def put(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
    return table.index_put((index,), x, accumulate=True)


def overwritten(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
    return table.index_copy(0, index, x)


def written(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
    return table.scatter(0, index[:, None].expand_as(x), x)


WAYS = (added, scattered, averaged, put, overwritten, written)


def by_class(way: Callable[[Tensor, Tensor, Tensor], Tensor], size: int, *, of_sequences: bool, stops: bool) -> Mix:
    """Centres of ``size`` classes, made of tokens or of whole sequences."""

    def mix(x: Tensor, ids: Tensor) -> Tensor:
        each = x.mean(1) if of_sequences else x.flatten(0, 1)
        classes = (ids[:, 0] if of_sequences else ids.flatten()) * 3 % size
        centres = way(each.new_zeros(size, WIDTH), classes, each.detach() if stops else each)[classes]
        return x + (centres[:, None] if of_sequences else centres.view_as(x))

    return mix


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(36))
def test_rows_of_classes_are_exact_or_told_whatever_the_sizes(seed):
    drawn = random.Random(seed)
    micro, way = drawn.choice((1, 2)), WAYS[seed % len(WAYS)]
    sizes = (micro * LENGTH, micro, LENGTH, WIDTH, CLASSES, micro * LENGTH * NUM_MICROBATCHES)
    size, of_sequences, stops = sizes[seed // len(WAYS)], drawn.random() < 0.5, drawn.random() < 0.5
    found = compared(by_class(way, size, of_sequences=of_sequences, stops=stops), micro)
    assert found.terms.mixed or found.difference < 1e-12
    assert not of_sequences or micro == size == 1 or found.terms.mixed


def places_of(x: Tensor, ids: Tensor) -> Tensor:
    """[batch, 1]: the place of one token of each sequence."""
    return (ids[:, :1] % LENGTH).clamp(max=LENGTH - 1)


OWN: dict[str, Mix] = {
    "one token of each": lambda x, ids: x + x[torch.arange(len(x)), places_of(x, ids)[:, 0]][:, None],
    "some tokens of each": lambda x, ids: x + x[torch.arange(len(x))[:, None], places_of(x, ids) // 2 + 1],
    "a place among all tokens": lambda x, ids: (
        x + x.flatten(0, 1)[(places_of(x, ids) + torch.arange(len(x))[:, None] * LENGTH).flatten()][:, None]
    ),
    "rows added to themselves": lambda x, ids: (
        x + x.new_zeros(x.flatten(0, 1).shape).index_add(0, torch.arange(len(x) * LENGTH), x.flatten(0, 1)).view_as(x)
    ),
    "a token written into each": lambda x, ids: x.index_put((torch.arange(len(x)), places_of(x, ids)[:, 0]), x[:, 0]),
    "classes of each sequence": lambda x, ids: (
        x + x.new_zeros(len(x), CLASSES, WIDTH).scatter_add(1, ids[..., None].expand_as(x), x).sum(1, keepdim=True)
    ),
    "tokens gathered within": lambda x, ids: x + x.gather(1, (ids % LENGTH)[..., None].expand_as(x)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", OWN)
def test_rows_at_places_of_their_own_sequence_are_exact_and_not_told(name, micro):
    found = compared(OWN[name], micro)
    assert found.difference < 1e-12
    assert not found.is_told


# ---- sequences by their places in the batch


def length_first(mix: Callable[[Tensor], Tensor]) -> Mix:
    """Of [length, batch, width]."""
    return lambda x, ids: x + mix(x.transpose(0, 1)).transpose(0, 1)


def features_first(mix: Callable[[Tensor], Tensor]) -> Mix:
    """Of [width, batch · length]."""
    return lambda x, ids: x + mix(x.permute(2, 0, 1).flatten(1)).unflatten(1, x.shape[:2]).permute(1, 2, 0)


BY_PLACE: dict[str, Mix] = {
    "mean, length first": length_first(lambda y: y.mean(1, keepdim=True).expand_as(y)),
    "softmax, length first": length_first(lambda y: y.softmax(1)),
    "in another order, length first": length_first(lambda y: y[:, torch.arange(y.shape[1]).flip(0)]),
    "the last, length first": length_first(lambda y: y + y[:, -1:]),
    "sums, features first": features_first(lambda y: y.cumsum(1)),
    "norm, features first": features_first(lambda y: y / y.norm(dim=1, keepdim=True)),
    "the first": lambda x, ids: x + x[0],
    "the last": lambda x, ids: x + x[-1:],
    "the one before": lambda x, ids: x + torch.cat([x[-1:], x[:-1]]),
    "the other way round": lambda x, ids: x + torch.stack(list(x)[::-1]),
    "numbered": lambda x, ids: x * (1 + torch.arange(len(x)))[:, None, None],
    "the first alone": lambda x, ids: x * (torch.arange(len(x)) == 0)[:, None, None],
    "seen in another shape": lambda x, ids: x + x.transpose(0, 1).reshape(x.shape),
    "seen in a shape that splits features": lambda x, ids: x + x.permute(2, 0, 1).reshape(x.shape),
    "as one sequence": lambda x, ids: x + (x.flatten(0, 1) @ x.flatten(0, 1).T).softmax(-1).sum(0).view(*ids.shape, 1),
    "pairs": lambda x, ids: x * (x.mean((1, 2))[:, None] - x.mean((1, 2))).abs().sum(1)[:, None, None],
    "alike ids": lambda x, ids: x * (ids[:, :1] == ids[:, 0]).sum(1)[:, None, None],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", BY_PLACE)
def test_sequences_read_by_their_places_are_told(name, micro):
    found = compared(BY_PLACE[name], micro)
    assert found.difference > 1e-6
    assert found.terms.mixed


# ---- each sequence by itself, in Python


def joined(x: Tensor, ids: Tensor) -> Tensor:
    """As models of pictures join the rows of a caption and of its picture."""
    return torch.stack([torch.cat([a, 2 * b]) for a, b in zip(x[:, :2], x[:, 2:], strict=True)])


def joined_in_place(x: Tensor, ids: Tensor) -> Tensor:
    found = x.new_zeros(x.shape)
    for i in range(len(x)):
        found[i, :2] = x[i, :2]
        found[i, 2:] = x[i, 2:] * 2
    return found


def turned(x: Tensor, ids: Tensor) -> Tensor:
    """Two parts of one sequence, cut from it one by one."""
    return x + torch.stack([torch.cat([x[i, 3:], x[i, :3]]) for i in range(len(x))])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("mix", [joined, joined_in_place, turned])
def test_parts_joined_sequence_by_sequence_are_exact_and_not_told(mix, micro):
    found = compared(mix, micro)
    assert found.difference < 1e-12
    assert not found.is_told


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "mix",
    [
        lambda x, ids: x + (x @ x.transpose(1, 2)).softmax(-1) @ x,
        lambda x, ids: x + (x.flatten(0, 1) * 2).view_as(x).cumsum(1),
        length_first(lambda y: y - y.mean(0, keepdim=True)),
        lambda x, ids: x[:, : x.shape[1]] + torch.arange(LENGTH)[:, None],
    ],
)
def test_one_sequence_needs_no_second_capture_where_none_runs_along_the_batch(mix):
    found = compared(mix, 1)
    assert (found.captured, found.is_told) == ([1], False)
    assert found.difference < 1e-12


# ---- ops that run through a sequence in one call, and diagonals


class Recurrent(Mixed):
    """``of_states``: reads the last states instead of the steps."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool, of_states: bool = False) -> None:
        super().__init__(self.run)
        self.cells, self.batch_first, self.of_states = (
            kind(WIDTH, WIDTH, 2, batch_first=batch_first),
            batch_first,
            of_states,
        )

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        steps, states = self.cells(x if self.batch_first else x.transpose(0, 1))
        if self.of_states:
            last = states[0] if isinstance(states, tuple) else states
            return x + last[-1].unsqueeze(1)
        return x + (steps if self.batch_first else steps.transpose(0, 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("of_states", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrence_runs_through_each_sequence_alone(kind, batch_first, of_states, micro):
    found = shared(lambda: Recurrent(kind, batch_first=batch_first, of_states=of_states), micro, NUM_MICROBATCHES)
    assert found.difference < 1e-12
    assert not found.is_told


@pytest.mark.parametrize("micro", [1, 2])
def test_a_diagonal_of_a_matrix_scales_features_of_each_sequence(micro):
    found = compared(
        lambda x, ids: torch.einsum("btw,ww->btw", x, torch.arange(WIDTH**2.0).view(WIDTH, WIDTH).to(x)), micro
    )
    assert found.difference < 1e-12
    assert not found.is_told


# ---- on ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}, {"cp": 2}])
@pytest.mark.parametrize("mix", [OWN["one token of each"], OWN["classes of each sequence"], joined_in_place])
def test_ranks_with_rows_of_their_own_equal_one_process(mix, mesh):
    batch = {name: torch.cat([x, x[:, :2]], 1) for name, x in batch_of(4).items()}  # cp cuts 8 tokens
    equals_one_process(lambda: built(lambda: Mixed(mix)), batch, mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one token of each", "rows added to themselves"])
def test_ranks_with_rows_of_their_own_are_as_near_to_one_process_as_bfloat16_is(name):
    def make() -> nn.Module:
        return built(lambda: Mixed(OWN[name])).bfloat16()

    equals_one_process(make, batch_of(4), {"dp": 2, "tp": 2}, loss=2e-2, gradient=3e-2)

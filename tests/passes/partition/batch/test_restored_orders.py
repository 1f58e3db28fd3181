"""Rows that are sorted by expert and restored: every accepted way gives each sequence what it gets alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.partition.batch.mixing import batch_runs, follows_batch
from passes.partition.batch.restored_orders import restored_orders
from planner import capture as capture_once
from planner import plan
from planner.capture.export import capture
from tests.models import hashed_experts, sorted_experts
from tests.models.sorted_experts import Sorting, Way
from tests.numeric.test_expert_layouts import built, check

SIZES = {"shape": [6], "dtype": "int64", "high": 20}


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layers = nn.Embedding(20, 16), nn.ModuleList(Sorting(way, hidden=16) for _ in range(2))
        self.head = nn.Linear(16, 20)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), labels.flatten())


def written(
    *, to_keys: object = None, to_counts: object = None, to_rows: object = None, flips: bool = False, k: int = 0
) -> Way:
    """``by_places`` with one line of it changed."""

    def way(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        size, same = layer.num_experts, lambda value: value
        ids, order = torch.sort((to_keys or same)(chosen).reshape(-1), descending=flips)  # pyright: ignore
        counts = torch.histc(ids.float(), bins=size, min=0, max=size - 1)
        ends = (to_counts or same)(counts).cumsum(0).int()  # pyright: ignore
        made = layer.computed(x[order // (k or layer.top_k)], ends, ids.clamp(max=size - 1))
        made = (to_rows or (lambda rows, order: rows))(made, order)  # pyright: ignore
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=order.device)
        return (made[places].view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)

    return way


def known(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Two of by_places' spellings: an order of the order, and results that are added to the tokens'."""
    ids, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(ids.float(), bins=layer.num_experts, min=0, max=layer.num_experts - 1)
    made = layer.computed(x[order // layer.top_k], counts.cumsum(0).int(), ids) * probs.reshape(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, order // layer.top_k, made)


def shown(rows: Tensor, order: Tensor) -> Tensor:
    return rows * (torch.arange(len(rows)) < len(rows) // 2).unsqueeze(-1)


def counting(counts_of: Callable[[Tensor, int], Tensor], *, weighs: bool = False) -> Way:
    """Rows that are counted before they are sorted; ``weighs``: a row gets the number of its expert's rows too."""

    def way(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        order, counts = chosen.reshape(-1).argsort(stable=True), counts_of(chosen, layer.num_experts)
        ids = chosen.reshape(-1)[order]
        made = layer.computed(x[order // layer.top_k], counts.cumsum(0).int(), ids)
        made = made * counts[ids].unsqueeze(-1) if weighs else made
        return (made[order.argsort()].view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)

    return way


def one_hot(chosen: Tensor, size: int) -> Tensor:
    return F.one_hot(chosen, size).sum((0, 1))


def compared(chosen: Tensor, size: int, first: int = 0) -> Tensor:
    return torch.stack([(chosen == first + i).sum() for i in range(size)])


def gathered(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """An index for each feature of a row, and counts of the pairs as they are."""
    flat, size = chosen.reshape(-1), layer.num_experts
    order = flat.argsort(stable=True)
    token = (order // layer.top_k).unsqueeze(1).expand(len(order), x.shape[1])
    ends = torch.histc(flat.float(), bins=size, min=0, max=size).cumsum(0).int()
    made = layer.computed(x.gather(0, token), ends, flat[order]) * probs.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, token, made)


def putting(filled: Callable[[Tensor], Tensor], *, accumulates: bool = False, shift: int = 0) -> Way:
    def way(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.reshape(-1).argsort(stable=True)
        ends = one_hot(chosen, layer.num_experts).cumsum(0).int()
        made = layer.computed(x[order // layer.top_k], ends, chosen.reshape(-1)[order])
        made = filled(made).index_put((order,), made.roll(shift, 0) if shift else made, accumulates)
        return (made.view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)

    return way


def one_by_one(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Experts that are chosen one after the other."""
    scores = torch.zeros(len(x), layer.num_experts, dtype=x.dtype).scatter(1, chosen, probs)
    best, first = scores.max(-1, keepdim=True)
    other, second = scores.scatter(1, first, 0.0).max(-1, keepdim=True)
    return sorted_experts.by_places(layer, x, torch.cat([best, other], -1), torch.cat([first, second], -1))


RESTORED = {
    "one by one": one_by_one,
    "gathered": gathered,
    "put": putting(torch.empty_like),
    "put into zeros": putting(torch.zeros_like),
    "by places": sorted_experts.by_places,
    "added": known,
    "plain": written(),
    "bincount": sorted_experts.added,
    "one_hot": sorted_experts.of_named_tokens,
    "copies": sorted_experts.repeated,
    "one_hot of tokens": counting(one_hot),
    "compared": counting(compared),
}
MIXING = {
    "of the second half": written(to_rows=shown),
    "of the first pairs": written(to_rows=lambda rows, order: rows * (order < len(order) // 2).unsqueeze(-1)),
    "by the place": written(to_rows=lambda rows, order: rows * torch.ones(len(rows)).cumsum(0)[order].unsqueeze(-1)),
    "centered": written(to_rows=lambda rows, order: rows - rows.mean(0)),
    "accumulated": written(to_rows=lambda rows, order: rows.cumsum(0)),
    "of the row before": written(to_rows=lambda rows, order: rows.roll(1, 0)),
    "at most three": written(to_counts=lambda counts: counts.clamp(max=3)),
    "one more each": written(to_counts=lambda counts: counts + 1),
    "backwards": written(flips=True),
    "some below zero": written(to_keys=lambda chosen: chosen - 1),
    "choices first": written(to_keys=lambda chosen: chosen.t().contiguous()),
    "mixed": sorted_experts.mixed,
    "limited": sorted_experts.limited,
    "accumulated, bincount": sorted_experts.accumulated,
    "put onto rows": putting(torch.clone, accumulates=True),
    "put of others": putting(torch.zeros_like, shift=1),
    "counts weigh": counting(one_hot, weighs=True),
    "each count weighs": counting(compared, weighs=True),
    "counts of others": counting(partial(compared, first=1)),
    "counts of few": counting(lambda chosen, size: one_hot(chosen[:3], size)),
    "most counts": counting(lambda chosen, size: one_hot(chosen, size).clamp(max=3)),
}


@pytest.mark.parametrize("name", [*RESTORED, *MIXING])
@pytest.mark.parametrize("size", [1, 2])
def test_an_order_is_restored_only_if_each_sequence_gets_what_it_gets_alone(name: str, size: int) -> None:
    model = Model((RESTORED | MIXING)[name])
    ids = torch.randint(20, (6, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        apart = torch.cat([model.hidden(x) for x in ids.split(1)])
        keeps_apart = torch.allclose(model.hidden(ids), apart, rtol=1e-4, atol=1e-5)
    program = capture(model, {"ids": ids[:size], "labels": ids[:size]})
    found = restored_orders(program.graph.graph, follows_batch(program))
    assert (bool(found), keeps_apart) == (name in RESTORED, name in RESTORED)
    assert len(found) in (0, 2)


def captures_and_warnings(model: nn.Module, ids: str, micro: int) -> tuple[tuple[int, ...], list[str]]:
    spec = {"mesh": {"tp": 2}, "batch": {"global": 8, "micro": micro}, "inputs": {ids: SIZES, "labels": SIZES}}
    captured = capture_once(model, spec)
    told = [row.what for row in plan(captured, spec).diagnostics if "sequences of a batch" in row.what]
    return captured.batch_sizes, told


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", RESTORED)
def test_one_capture_is_enough_for_rows_that_are_restored(name: str, micro: int) -> None:
    assert captures_and_warnings(Model(RESTORED[name]), "ids", micro) == ((micro,), [])


def test_numbers_of_a_table_are_those_of_experts_if_scores_are_picked_by_them() -> None:
    model = hashed_experts.Hashing(hashed_experts.of_table, sorted_experts.by_places)
    program = capture(model, dict.fromkeys(("input_ids", "labels"), torch.zeros(1, 6, dtype=torch.int64)))
    assert len(restored_orders(program.graph.graph, follows_batch(program))) == 1


def test_the_batch_is_followed_through_an_order() -> None:
    """Else all that follows a layer of experts might mix sequences of two or more."""
    ids = torch.zeros(2, 6, dtype=torch.int64)
    program = capture(Model(sorted_experts.by_places), {"ids": ids, "labels": ids})
    on_batch = follows_batch(program)
    orders = restored_orders(program.graph.graph, on_batch)
    runs = batch_runs(program, on_batch, orders)
    assert [runs[node] for order in orders for node in order.back] == [frozenset({(0, 12, 2)})] * 2
    assert not [node for node, found in runs.items() if found is None]


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [{"tp": 2, "dp": 2}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", [name for name in RESTORED if name != "one by one"])  # that is refused over ep
def test_restored_rows_train_as_in_one_process(name: str, mesh: dict[str, int]) -> None:
    check(lambda: built(partial(Sorting, RESTORED[name])), mesh)

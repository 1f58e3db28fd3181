"""Products add their weights' gradients into the buffers, at once or in a W; a W that is wrong is caught."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr

from passes.ops.linear import linear
from passes.ops.weight_gradients import WeightGradients
from planner import Plan
from runtime import Engine
from runtime.optimizer import matrices
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.matrices import orthogonal
from tests.models import families
from tests.numeric.test_muon import RULE
from tests.numeric.test_update_rules import ruled
from tests.runtime.optimizer.test_zero1 import entries
from tests.tools import zero1_ranks as ranks
from tests.tools.captures import plan_again
from tests.tools.laboratory import session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

MICROBATCHES = 3


class Stage:
    """Two products and a norm behind each other, their buffers, and what one backward after another would give."""

    def __init__(self, dtype: torch.dtype = torch.float64, *precision: str) -> None:
        torch.manual_seed(0)
        self.parameters = {
            "first": nn.Parameter(torch.randn(5, 4, dtype=dtype)),
            "bias": nn.Parameter(torch.randn(5, dtype=dtype)),
            "scale": nn.Parameter(torch.randn(5, dtype=dtype)),
            "second": nn.Parameter(torch.randn(5, 3, dtype=dtype)),
        }
        self.inputs = [torch.randn(6, 4, dtype=dtype, requires_grad=True) for _ in range(MICROBATCHES)]
        self.expected = self._expected()
        optimizer = ranks.optimizer_of(entries(**self.parameters), ranks.settings(), *precision)
        self.buffers: GradientBuffers = optimizer.buffers
        self.handle = WeightGradients()
        self.handle.bind(self.buffers)

    def forward(self, x: Tensor, handle: WeightGradients | None) -> Tensor:
        p = self.parameters
        hidden = linear(x, p["first"], p["bias"], False, handle) * p["scale"]
        return linear(hidden.tanh(), p["second"], None, True, handle).sin().sum()

    def _expected(self) -> dict[str, Tensor]:
        for x in self.inputs:
            self.forward(x, None).backward()
        found = {name: p.grad.float() if p.dtype == torch.bfloat16 else p.grad for name, p in self.parameters.items()}
        for p in (*self.parameters.values(), *self.inputs):
            p.grad = None
        return found  # pyright: ignore

    def backward(self, microbatch: int, *, waits: bool, is_last: bool) -> None:
        self.buffers.last_microbatch = is_last
        with self.handle.put_aside((0, microbatch) if waits else None):
            self.forward(self.inputs[microbatch], self.handle).backward()

    def weights(self, microbatch: int, *, is_last: bool) -> None:
        self.buffers.last_microbatch = is_last
        self.handle.run((0, microbatch))

    def differs(self, limit: float = 1e-12) -> list[str]:
        self.buffers.finish_grad_sync()
        close = {
            name: torch.allclose(p.main_grad, self.expected[name], rtol=limit, atol=limit)  # pyright: ignore
            for name, p in self.parameters.items()
        }
        return [name for name, is_close in close.items() if not is_close]


def test_products_of_all_microbatches_add_up_without_a_gradient_in_between():
    stage = Stage()
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=False, is_last=microbatch == MICROBATCHES - 1)
        assert all(p.grad is None for p in stage.parameters.values())
    assert stage.buffers.launches == [(0, 0)]
    assert stage.differs() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_bucket_is_sent_when_the_last_w_has_its_last_gradient(order):
    stage = Stage()
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=True, is_last=microbatch == MICROBATCHES - 1)
    for microbatch in order:
        assert stage.buffers.launches == []
        stage.weights(microbatch, is_last=microbatch == order[-1])
    assert stage.buffers.launches == [(0, 0)]
    assert stage.handle.num_waiting == 0
    assert stage.differs() == []


def test_the_next_step_starts_afresh():
    stage = Stage()
    for _ in range(2):
        for microbatch in range(MICROBATCHES):
            stage.backward(microbatch, waits=True, is_last=microbatch == MICROBATCHES - 1)
            stage.weights(microbatch, is_last=microbatch == MICROBATCHES - 1)
        assert stage.differs() == []


def test_a_w_that_is_left_out_is_still_waiting_and_shows_in_the_numbers():
    stage = Stage()
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=True, is_last=microbatch == MICROBATCHES - 1)
    for microbatch in (0, 2):
        stage.weights(microbatch, is_last=microbatch == 2)
    assert stage.handle.num_waiting == 1
    assert set(stage.differs()) == {"first", "bias", "second"}


def test_a_w_that_runs_twice_is_refused():
    stage = Stage()
    stage.backward(0, waits=True, is_last=False)
    stage.weights(0, is_last=False)
    with pytest.raises(AssertionError, match=r"\(0, 0\), or it has run"):
        stage.weights(0, is_last=False)


def test_a_w_after_its_bucket_was_sent_is_refused():
    stage = Stage()
    for microbatch in range(2):
        stage.backward(microbatch, waits=True, is_last=microbatch == 1)
    stage.weights(0, is_last=True)
    assert stage.buffers.launches == [(0, 0)]
    with pytest.raises(AssertionError, match="came after the reduction of its bucket"):
        stage.weights(1, is_last=False)


def test_a_weight_that_is_looked_up_too_waits_for_all_contributions():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
    buffers = ranks.optimizer_of(entries(weight=weight), ranks.settings()).buffers
    buffers.expect({id(weight): 2})
    handle = WeightGradients()
    handle.bind(buffers)
    ids = torch.tensor([1, 2, 2])
    torch.nn.functional.linear(torch.nn.functional.embedding(ids, weight), weight).sin().sum().backward()
    buffers.begin_step()
    expected = weight.main_grad.clone()
    buffers.last_microbatch = True
    with handle.put_aside((0, 0)):
        linear(torch.nn.functional.embedding(ids, weight), weight, None, False, handle).sin().sum().backward()
    assert buffers.launches == []
    handle.run((0, 0))
    assert buffers.launches == [(0, 0)]
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-12, atol=1e-12)


def test_while_nobody_listens_gradients_stay_where_autograd_puts_them():
    stage = Stage()
    with stage.buffers.deaf():
        stage.forward(stage.inputs[0], stage.handle).backward()
    assert all(p.grad is not None for p in stage.parameters.values())
    assert all(slot.is_fresh for slot in stage.buffers.slots)


def test_products_of_half_precision_are_summed_in_float32():
    stage = Stage(torch.bfloat16, "float32")
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=False, is_last=microbatch == MICROBATCHES - 1)
    assert stage.parameters["first"].main_grad.dtype == torch.float32
    assert stage.differs(0.05) == []


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"mesh": {"dp": 2}},
    "tp2·dp2": {"mesh": {"tp": 2, "dp": 2}},
    "tp2·dp2, small buckets": {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"bucket_size": 3000}},
}


def calls_of(decided: Plan, batch: dict[str, Tensor]) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """Of this rank in its second step: bytes and group of each exchange, and the matrices that it orthogonalised."""
    seen: list[tuple[int, str]] = []
    shapes: list[tuple[int, int]] = []
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine, pytest.MonkeyPatch.context() as patch:
        engine.train_step(batch)
        names = {id(group): axis for axis, group in engine.groups.by_name.items()}
        real, of_matrix = dist.all_to_all_single, matrices.orthogonal

        def exchange(out: Tensor, given: Tensor, *sizes: Any, group: Any, async_op: bool) -> Any:
            seen.append((given.numel() * given.element_size(), names[id(group)]))
            return real(out, given, *sizes, group=group, async_op=async_op)

        patch.setattr(dist, "all_to_all_single", exchange)
        patch.setattr(matrices, "orthogonal", lambda x: shapes.append(tuple(x.shape)) or of_matrix(x))
        engine.train_step(batch)
    return seen, shapes


def counted(host: Any, layout: dict[str, Any]) -> Any:
    entry = families.build("gpt")
    decided = plan_again(entry.model, ruled(entry, RULE, **layout))
    rows = [(row.bytes, row.axis) for row in decided.collectives if row.kind == "all_to_all"]
    of_weights = [(row.matrices.sizes, row.shape[1]) for row in decided.parameters if row.matrices is not None]
    return rows, of_weights, Ranks(decided, "forks", host).run(calls_of, entry.batch(8, 0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_the_plan_are_the_exchanges_of_a_step_and_each_matrix_is_one_ranks(layout: str) -> None:
    rows, of_weights, ranks = session_lab().call(counted, LAYOUTS[layout])
    calls = [seen for seen, _ in ranks]
    assert len({tuple(axis for _, axis in seen) for seen in calls}) == 1
    most = [(max(seen[i][0] for seen in calls), calls[0][i][1]) for i in range(len(calls[0]))]
    assert sorted(most) == sorted(rows)
    assert rows
    wanted = sorted((size, columns) for sizes, columns in of_weights for size in sizes)
    assert sorted(shape for _, shapes in ranks for shape in shapes) == wanted
    work = [sum(a * b for a, b in shapes) for _, shapes in ranks]
    assert max(work) * len(work) <= 1.1 * sum(work)


def steps_from(decided: Plan, batches: list[dict[str, Tensor]], save: Path, start: Path | None) -> dict[str, Tensor]:
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        if start is not None:
            engine.load(start)
        for batch in batches:
            engine.train_step(batch)
        engine.save(save)
        return engine.gather_parameters()


def resumed(host: Any, folder: Path) -> Any:
    entry = families.build("gpt")
    batches = [entry.batch(8, step) for step in range(4)]
    one = plan_again(entry.model, ruled(entry, RULE, mesh={}))
    other = plan_again(families.build("gpt").model, ruled(entry, RULE, **LAYOUTS["tp2·dp2"]))
    whole = Ranks(one, "forks", host).run(steps_from, batches, folder / "whole", None)[0]
    Ranks(one, "forks", host).run(steps_from, batches[:2], folder / "half", None)
    return whole, Ranks(other, "forks", host).run(steps_from, batches[2:], folder / "rest", folder / "half")[0]


@pytest.mark.thorough
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    whole, found = session_lab().call(resumed, tmp_path)
    for name, value in whole.items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm(), name


def test_singular_values_come_near_one() -> None:
    for shape in ((8, 8), (6, 40), (40, 6)):
        found = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        values = torch.linalg.svdvals(found.float())
        assert values.min() > 0.3
        assert values.max() < 1.3
    assert orthogonal(torch.zeros(3, 5)).abs().max() == 0


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
@pytest.mark.parametrize("how", ["original", "match_rms_adamw"])
def test_the_factors_of_a_matrix_are_those_of_torch(shape: tuple[int, int], how: str) -> None:
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=how).step()
    torch.testing.assert_close(p.detach(), -_adjust_lr(1.0, how, shape) * orthogonal(p.grad).float())

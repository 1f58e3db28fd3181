"""Exchanges of whole matrices: the plan's rows are the calls that run, and each matrix is updated on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from planner import Plan
from runtime import Engine
from runtime.optimizer import matrices
from runtime.optimizer.matrices import lr_factor, orthogonal
from tests.models import families
from tests.numeric.test_muon import RULE
from tests.numeric.test_update_rules import ruled
from tests.tools.captures import plan_again
from tests.tools.laboratory import session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

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
def test_the_rows_of_the_plan_are_the_exchanges_of_a_step(layout: str) -> None:
    rows, _, ranks = session_lab().call(counted, LAYOUTS[layout])
    calls = [seen for seen, _ in ranks]
    assert len({tuple(axis for _, axis in seen) for seen in calls}) == 1
    most = [(max(seen[i][0] for seen in calls), calls[0][i][1]) for i in range(len(calls[0]))]
    assert sorted(most) == sorted(rows)
    assert rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_matrix_is_orthogonalised_on_one_rank(layout: str) -> None:
    _, of_weights, ranks = session_lab().call(counted, LAYOUTS[layout])
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
def test_the_rate_of_a_matrix_is_that_of_torch(shape: tuple[int, int], how: str) -> None:
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=how).step()
    torch.testing.assert_close(p.detach(), -lr_factor(shape, how) * orthogonal(p.grad).float(), rtol=1e-2, atol=1e-2)

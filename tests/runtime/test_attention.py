"""``attention: cudnn``: cp's attention by cuDNN, once torch takes every call on every rank; here by a stand-in."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from passes.errors import PlanError
from passes.ops.attention import causal_attention
from passes.ops.gathered_attention import gathered_attention
from planner import Plan
from planner.lower import lower
from runtime import Engine
from runtime.distributed.groups import Groups
from runtime.engine.checks import check_attention
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.cudnn_stand_in import stand_in
from tests.tools.laboratory import Case, session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.specs import inputs_of

CUDNN = {"attention": "cudnn"}


def planned(name: str = "llama", *, trains: bool = False, **more: Any) -> tuple[Plan, dict[str, Tensor]]:
    torch.manual_seed(0)
    entry = families.FAMILIES[name]()
    entry.model.train(trains)
    batch = entry.batch(2, 0)
    inputs = inputs_of(batch)
    spec = {"batch": {"global": 2, "micro": 2}, "inputs": inputs, "mesh": {"cp": 2}}
    return plan_again(entry.model, spec | more), batch


def rank_of(plan: Plan, rank: int) -> Groups:
    return Groups(plan.mesh, rank, torch.device("cpu"), timedelta(seconds=HANG_SECONDS))


def nodes_of(plan: Plan) -> list[fx.Node]:
    return [n for stage in lower(plan, 0).stages for n in stage.module.graph.nodes]


def kernels(plan: Plan) -> set[Any]:
    found = [n for n in nodes_of(plan) if n.target in (causal_attention, gathered_attention)]
    assert found
    return {n.kwargs.get("kernel") for n in found}


@pytest.mark.thorough
def test_the_kernel_of_the_spec_stands_at_each_attention_over_cp() -> None:
    assert kernels(planned()[0]) == {None}  # auto: flash
    assert kernels(planned(attention="flash")[0]) == {None}
    assert kernels(planned(**CUDNN)[0]) == {"cudnn"}


@pytest.mark.thorough
def test_attention_with_dropout_has_no_kernel_of_the_spec_as_nobody_asks_torch_about_it() -> None:
    plan, _ = planned("gpt2-dropout", trains=True, **CUDNN)
    calls = [c for n in nodes_of(plan) for c in (n.target, *n.args)]  # a stream of random numbers calls it
    assert "causal_attention" in calls
    assert all("kernel" not in str(n.args) + str(n.kwargs) for n in nodes_of(plan))


@pytest.mark.thorough
def test_torch_is_asked_about_the_parts_of_each_rank() -> None:
    plan, batch = planned(**CUDNN)
    (length,) = {x.shape[1] for x in batch.values()}
    chunk = length // 4
    for rank, keys in enumerate([{chunk, 3 * chunk}, {chunk, 2 * chunk}]):
        with stand_in() as seen:
            check_attention(plan, rank_of(plan, rank))
        assert {q[2] for q, _, _ in seen} == {chunk}
        assert {k[2] for _, k, _ in seen} == keys
        assert {v[2] for *_, v in seen} == keys


def test_a_call_that_cudnn_does_not_take_is_refused_at_its_source_line() -> None:
    plan, _ = planned(**CUDNN)
    with pytest.raises(PlanError) as found:  # this machine's torch takes none on a CPU
        check_attention(plan, rank_of(plan, 0))
    assert "cuDNN does not take this attention on rank 0" in found.value.what
    assert ".py" in str(found.value.where)
    assert "attention: auto" in str(found.value.fix)
    check_attention(planned()[0], rank_of(plan, 0))  # of flash nothing is asked


def with_cudnn(plan: Any, batches: list[dict[str, Tensor]], refusing: int | None) -> list[float] | str:
    """Losses of two steps, or the error. ``refusing``: the rank on which torch takes no call."""
    rank = torch.distributed.get_rank()
    with stand_in(lambda q, k, v: rank != refusing) if plan.spec.get("attention") == "cudnn" else nullcontext():
        try:
            with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
                return [engine.train_step(batch).loss for batch in batches[:2]]
        except PlanError as error:
            return error.what


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_by_cudnn_trains_as_by_flash_and_one_rank_that_cannot_is_an_error_on_all() -> None:
    def run(rest: dict[str, Any], refusing: int | None = None) -> list[Any]:
        return session_lab().run(Case("llama", {"cp": 2}, rest, job=with_cudnn, job_arguments=(refusing,)))

    flash, cudnn, refused = run({}), run(CUDNN), run(CUDNN, 1)
    assert cudnn[0] == pytest.approx(flash[0], rel=1e-12)
    assert len({str(error) for error in refused}) == 1
    assert "cuDNN does not take this attention on rank 1" in refused[0]

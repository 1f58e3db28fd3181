"""The engine on stage modules cut by hand equals one process, for every layout of pp, vpp and dp."""

import gc
from weakref import ref

import pytest
import torch

from passes.errors import PlanError
from planner import plan
from planner.frozen_plan import Plan
from runtime import Engine
from runtime.verify.reference import OneProcess
from tests.models import families
from tests.tools.graphed_runs import differences, engine_of, spec_of, train
from tests.tools.handmade_stages import build_batch, build_model, build_plan, lower
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

SIZE = 8


def engine_for(rank: int = 0, **layout) -> Engine:
    plan = build_plan(build_model(), size=SIZE, **layout)
    return Engine(plan, program=lower(plan, rank), timeout_seconds=HANG_SECONDS)


def run_steps(layout: dict, local: bool = False) -> dict:
    """Loss and gradients of the first batch, then three updates; on every rank."""
    import os

    with engine_for(int(os.environ.get("RANK", "0")), **layout) as engine:
        share = SIZE // engine.mesh.dp_size if local else SIZE
        first = engine.mesh.dp_rank * share if local else 0
        batches = [{k: v[first : first + share] for k, v in build_batch(SIZE, seed).items()} for seed in range(3)]
        result = {
            "evaluated": engine.evaluate(batches[0], local=local),
            "loss": engine.forward_backward(batches[0], local=local),
            "gradients": engine.gather_gradients(),
        }
        result["reports"] = [engine.optimizer_step()]
        result["reports"] += [engine.train_step(batch, local=local) for batch in batches[1:]]
        result["parameters"] = engine.gather_parameters()
    return result


def expected(clip: float | None = 0.5) -> dict:
    spec = build_plan(build_model(), size=SIZE, clip=clip).spec
    from planner.spec.spec import Spec

    one = OneProcess(build_model(), Spec.load(spec))
    loss = one.forward_backward(build_batch(SIZE, 0))
    gradients = {name: p.grad.clone() for name, p in one.model.named_parameters()}
    norms = [one.update()]
    losses = [loss]
    for seed in (1, 2):
        losses.append(one.forward_backward(build_batch(SIZE, seed)))
        norms.append(one.update())
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": dict(one.model.named_parameters())}


def assert_equal(results: list[dict], clip: float | None = 0.5) -> None:
    truth = expected(clip)
    for result in results:
        assert result["evaluated"] == pytest.approx(truth["losses"][0], rel=1e-12)
        assert result["loss"] == pytest.approx(truth["losses"][0], rel=1e-12)
        assert [r.loss for r in result["reports"]] == pytest.approx(truth["losses"], rel=1e-10)
        assert [r.grad_norm for r in result["reports"]] == pytest.approx(truth["norms"], rel=1e-10)
    for kind in ("gradients", "parameters"):
        assert set(results[0][kind]) == set(truth[kind])
        for name, value in truth[kind].items():
            torch.testing.assert_close(
                results[0][kind][name], value.detach(), rtol=1e-9, atol=1e-12, msg=f"{kind} {name}"
            )
        assert all(result[kind] == {} for result in results[1:])


def test_one_rank_needs_no_launcher_and_equals_one_process():
    assert_equal([run_steps({"micro": 2})])


def test_without_clipping_the_update_is_that_of_plain_adamw():
    assert_equal([run_steps({"micro": 2, "clip": None})], clip=None)


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_a_loaded_plan_is_one_error_before_any_group_is_made(tmp_path, layout):
    """Two ranks were not started: that would be the error of opening the groups."""
    build_plan(build_model(), size=SIZE, micro=2, **layout).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="a plan loaded from JSON does not run") as caught:
        Engine(Plan.load(tmp_path / "plan.json"))
    assert caught.value.fix == "plan the model again, or save the plan as .pt"


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        {"pp": 2, "kind": "gpipe"},
        {"pp": 4, "micro": 2},
        {"dp": 2},
        {"dp": 2, "zero": 0},
        {"dp": 4, "micro": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "vpp": 2, "kind": "interleaved_1f1b"},
    ],
    ids=str,
)
def test_layout_equals_one_process(layout):
    ranks = layout.get("pp", 1) * layout.get("dp", 1)
    assert_equal(Ranks(ranks, "processes").run(run_steps, layout))


@pytest.mark.thorough
@pytest.mark.slow
def test_local_shares_with_different_token_counts_equal_the_global_batch():
    assert_equal(Ranks(4, "processes").run(run_steps, {"pp": 2, "dp": 2}, True))


def test_engines_may_live_one_after_another_while_the_user_holds_the_model():
    model = build_model()
    plan = build_plan(model, size=SIZE, micro=2)
    losses = []
    for _ in range(2):
        with Engine(plan, program=lower(plan, 0)) as engine:
            losses.append(engine.train_step(build_batch(SIZE)).loss)
    assert losses[0] == losses[1]


@pytest.mark.thorough
def test_a_closed_engine_frees_its_buffers():
    """Its plan lives on; a hook that PyTorch holds in C++ must not keep what Python's collector cannot reach."""
    plan = build_plan(build_model(), size=SIZE)
    with Engine(plan, program=lower(plan, 0), timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(build_batch(SIZE, 0))
        held = [ref(x) for b in engine.optimizer.buffers.buffers for x in (*b.kept_parameters, *b.kept_gradients)]
    del engine
    gc.collect()
    assert held
    assert [x() for x in held if x() is not None] == []


def test_the_users_model_is_not_changed_by_training():
    model = build_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = build_plan(model, size=SIZE, micro=2)
    Engine(plan, program=lower(plan, 0)).train_step(build_batch(SIZE))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_gradients_are_not_given_after_the_update():
    engine = engine_for(micro=2)
    engine.train_step(build_batch(SIZE))
    with pytest.raises(PlanError, match="an update has consumed them"):
        engine.gather_gradients()


def test_forward_backward_twice_replaces_the_gradients():
    engine = engine_for(micro=2)
    engine.forward_backward(build_batch(SIZE, 1))
    engine.forward_backward(build_batch(SIZE, 0))
    for name, gradient in expected()["gradients"].items():
        torch.testing.assert_close(engine.gather_gradients()[name], gradient)


def test_too_few_launched_ranks_is_one_clear_error():
    with pytest.raises(PlanError, match=r"the plan is for 2 ranks \(pp 2\), but only this one is running"):
        engine_for(pp=2)


def test_a_batch_with_other_keys_is_refused():
    batch = build_batch(SIZE)
    batch["labels"] = batch.pop("target")
    with pytest.raises(PlanError, match="the batch lacks target and has the unplanned labels"):
        engine_for().train_step(batch)


def test_a_batch_of_another_shape_or_dtype_is_refused():
    engine = engine_for()
    with pytest.raises(PlanError, match=r"batch\['x'\] has shape \[8, 5\], the plan expects \[8, 6\]"):
        engine.train_step({name: value[:, 1:] for name, value in build_batch(SIZE).items()})
    with pytest.raises(PlanError, match=r"batch\['x'\] is torch.float32, the plan expects torch.float64"):
        engine.train_step({name: value.float() for name, value in build_batch(SIZE).items()})


# ---- Plans of captured models


@pytest.mark.thorough
def test_the_full_model_does_not_outlive_the_copying_of_shards():
    entry = families.build("gpt")
    reference, decided, batch = ref(entry.model), plan(entry.model, spec_of(entry, None)), entry.batch(8, 0)
    del entry
    engine = Engine(decided)
    gc.collect()
    assert reference() is None
    assert engine.train_step(batch).loss > 0
    with pytest.raises(PlanError, match="the planned model is gone"):
        Engine(decided)


def test_tied_parameters_are_gathered_under_every_name():
    engine, entry = engine_of("gpt", None)
    engine.forward_backward(entry.batch(8, 0))
    names = {name for name, _ in entry.model.named_parameters(remove_duplicate=False)}
    assert {"tokens.weight", "head.weight"} <= names
    assert set(engine.gather_parameters()) == set(engine.gather_gradients()) == names


def test_evaluation_is_without_dropout():
    engine, entry = engine_of("gpt-dropout", None)
    truth = entry.model.eval()(**entry.batch(8, 0))[1].item()
    assert engine.evaluate(entry.batch(8, 0)) == pytest.approx(truth, rel=1e-12)


@pytest.mark.thorough
def test_a_constant_loss_scale_changes_no_number_and_stays_after_an_overflow():
    """A power of two: gradients and weights keep every bit."""
    engines = [engine_of("gpt", None, precision={"loss_scale": scale}) for scale in ("none", 4096)]
    plain, scaled = (train(*each) for each in engines)
    assert differences(plain, scaled) == []
    engine, entry = engines[1]
    assert engine.loss_scale.tensor is not None
    engine.loss_scale.tensor.fill_(float("inf"))
    assert engine.train_step(entry.batch(8, 0)).skipped
    assert engine.loss_scale.value == float("inf")
    assert not engine.loss_scale.is_exhausted

"""ZeRO-1 on four gloo ranks against torch's AdamW and clipping in one process; hooks and bytes in this process."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from passes.parameters import LocalParameter
from passes.types.types import I
from runtime.optimizer.main_shards import squared_norm
from tests.tools import zero1_ranks as ranks
from tests.tools.laboratory import session_lab
from tests.tools.tiers import chosen

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 1e-2}
FULL_BYTES = {("float32", "float32"): (8, 8), ("bfloat16", "float32"): (6, 12), ("bfloat16", "bfloat16"): (4, 16)}


@pytest.fixture(scope="module")
def results(request):
    """results[rank][case] of four forks."""
    return session_lab().call(ranks.on_ranks, chosen(request, "case"))


def one_process(dtype):
    """Gradients, norms and parameters of each step, from torch's own optimizer on the whole batch."""
    model = ranks.make_model(dtype)
    model.unused.grad = torch.zeros_like(model.unused)  # weight decay moves it there as well
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for step in range(ranks.STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(ranks.make_batch(step, dtype)).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7).item()
        optimizer.param_groups[0]["lr"] = ranks.rate(step)
        optimizer.step()
        steps.append((gradients, norm, {n: p.detach().clone() for n, p in model.named_parameters()}))
    return steps


def one_process_low_precision(dtype, gradient_dtype, dp):
    """As ``one_process`` with float32 main parameters and gradients summed in ``gradient_dtype``."""
    model = ranks.make_model(dtype)
    mains = {n: p.detach().float() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(mains.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for step in range(ranks.STEPS):
        per_rank = [defaultdict(float) for _ in range(dp)]
        for sums, share in zip(per_rank, ranks.make_batch(step, dtype).chunk(dp), strict=True):
            for rows in share.chunk(ranks.MICROBATCHES):
                model(rows).backward()
                for name, parameter in model.named_parameters():
                    grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                    sums[name] = (sums[name] + grad.to(gradient_dtype)).to(gradient_dtype)
                model.zero_grad()
        gradients = {n: sum(sums[n] for sums in per_rank).float() for n in mains}
        for name, main in mains.items():
            main.grad = gradients[name].clone()
        norm = nn.utils.clip_grad_norm_(mains.values(), 0.7).item()
        optimizer.param_groups[0]["lr"] = ranks.rate(step)
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(mains[name])
        steps.append((gradients, norm, {n: p.detach().clone() for n, p in model.named_parameters()}))
    return steps


def reference(precision, dp):
    dtype, gradient_dtype = (getattr(torch, name) for name in precision)
    return one_process_low_precision(dtype, gradient_dtype, dp) if dtype == torch.bfloat16 else one_process(dtype)


def assert_near(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= tolerance * (1 + expected.double().abs().max())


def name_of(case):
    (parameters, gradients), dp, zero, alignment, bucket_size = case
    return f"{parameters}-{gradients}-dp{dp}-zero{zero}-{alignment}-{bucket_size or 'one'}"


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("case", ranks.CASES, ids=name_of)
def test_every_rank_equals_one_process(results, case):
    precision, dp, *_ = case
    tolerance = TOLERANCE[precision[0]]
    for step, (gradients, norm, parameters) in enumerate(reference(precision, dp)):
        for rank in range(ranks.WORLD):
            actual = results[rank][case]["steps"][step]
            assert actual["norm"] == pytest.approx(norm, rel=tolerance)
            assert actual["sums"] == (dp, sum(range(dp)))
            for name, expected in gradients.items():
                assert_near(actual["gradients"][name], expected, tolerance)
            for name, expected in parameters.items():
                assert_near(actual["parameters"][name], expected, tolerance)


@pytest.mark.sampled(16)
@pytest.mark.slow
@pytest.mark.parametrize("case", ranks.CASES, ids=name_of)
def test_reductions_start_while_the_backward_runs_and_in_one_order(results, case):
    *_, bucket_size = case
    for step in range(ranks.STEPS):
        of_ranks = [results[rank][case]["steps"][step] for rank in range(ranks.WORLD)]
        launches = of_ranks[0]["launches"]
        num_buckets = sum(len(layout.buckets) for layout in results[0][case]["layouts"])
        assert launches == [(0, i) for i in range(num_buckets)]
        for actual in of_ranks:
            assert actual["launches"] == launches
            # when the backward is at the first linear, ``twice`` is complete; the unused parameter comes last
            assert actual["launched_before_first"] == ([(0, 0)] if bucket_size else [])


@pytest.mark.slow
@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [c for c in ranks.CASES if c[0] in FULL_BYTES], ids=name_of)
def test_live_bytes_equal_the_table_up_to_padding(results, case):
    precision, dp, zero, *_ = case
    full, shared = FULL_BYTES[precision]
    owners = dp if zero else 1
    for rank in range(ranks.WORLD):
        (layout,) = results[rank][case]["layouts"]
        measured = sum(results[rank][case]["bytes"].values())
        assert measured == layout.num_elements * full + layout.shard_elements() * shared
        num_parameters = sum(len(slot.world) for slot in layout.slots)
        table = num_parameters * (full + shared / owners)
        assert 0 <= measured - table <= (layout.num_elements - num_parameters) * (full + shared)


@pytest.mark.slow
def test_infinite_gradient_on_one_rank_skips_the_update_on_all(results):
    assert [results[rank]["not_finite"] for rank in range(4)] == [{"skipped": True, "unchanged": True}] * 4


# ---- one process, no group


def entries(**parameters):
    return [
        (LocalParameter(n.split("__")[0], tuple(p.shape), p.dtype, I, tuple(p.shape)), p) for n, p in parameters.items()
    ]


def buffers_of(parameters):
    return ranks.optimizer_of(parameters, ranks.settings()).buffers


@pytest.mark.parametrize(("precision", "bytes_a_parameter"), [(p, sum(b)) for p, b in FULL_BYTES.items()])
@pytest.mark.parametrize("zero", [0, 1])
def test_one_rank_needs_no_group_and_has_the_bytes_of_the_table(precision, bytes_a_parameter, zero):
    weight = nn.Parameter(torch.randn(64, 2, dtype=getattr(torch, precision[0])))
    options = ranks.settings(zero=zero, alignment="nccl")
    optimizer = ranks.optimizer_of(entries(weight=weight), options, precision[1])
    before = weight.detach().clone()
    weight.square().sum().backward()
    assert not optimizer.step(0.1).figures[1]
    assert sum(optimizer.measured_bytes().values()) == 128 * bytes_a_parameter
    assert not torch.equal(weight, before)


def test_moments_lie_before_the_activations_of_the_first_step():
    weight = nn.Parameter(torch.randn(64, 2))
    optimizer = ranks.optimizer_of(entries(weight=weight), ranks.settings())
    held = optimizer.measured_bytes()
    weight.square().sum().backward()
    optimizer.step(0.1)
    assert optimizer.measured_bytes() == held
    assert held["optimizer"] == 2 * 4 * 128


def test_parameter_used_three_times_in_one_backward_fires_once_with_the_sum():
    weight = nn.Parameter(torch.tensor([2.0]))
    buffers = buffers_of(entries(weight=weight))
    buffers.last_microbatch = True
    (weight * 3 + weight * weight).backward()
    assert buffers.launches == [(0, 0)]
    assert weight.main_grad.item() == 7.0
    assert weight.grad is None


def test_microbatches_add_up_and_the_next_step_starts_afresh():
    weight = nn.Parameter(torch.tensor([2.0]))
    buffers = buffers_of(entries(weight=weight))
    for factor in (1.0, 10.0):
        (weight * factor).backward()
    assert buffers.launches == []
    buffers.last_microbatch = True
    (weight * 100.0).backward()
    buffers.finish_grad_sync()
    assert weight.main_grad.item() == 111.0
    (weight * 5.0).backward()
    assert weight.main_grad.item() == 5.0


def test_parameter_without_gradient_in_a_step_is_zero_not_stale():
    used, rare = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    buffers = buffers_of(entries(used=used, rare=rare))
    (used.sum() + rare.sum()).backward()
    buffers.finish_grad_sync()
    assert rare.main_grad.tolist() == [1.0, 1.0, 1.0]
    used.sum().backward()
    buffers.finish_grad_sync()
    assert (used.main_grad.tolist(), rare.main_grad.tolist()) == ([1.0, 1.0], [0.0, 0.0, 0.0])


def test_tied_copies_in_two_chunks_share_value_and_gradient():
    first, second = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([2.0]))
    buffers = buffers_of(entries(tied=first, tied__again=second))
    buffers.last_microbatch = True
    (second * 3).backward()
    assert buffers.launches == []
    (first * 4).backward()
    assert buffers.launches == [(0, 0)]
    assert first.main_grad.item() == 7.0
    assert first.data_ptr() == second.data_ptr()


def test_gradient_after_the_reduction_of_its_bucket_is_refused():
    weight = nn.Parameter(torch.ones(1))
    buffers = buffers_of(entries(weight=weight))
    buffers.last_microbatch = True
    weight.sum().backward()
    with pytest.raises(AssertionError, match="weight came after the reduction"):
        weight.sum().backward()


def test_meta_parameters_get_storage_and_keep_their_identity():
    module = nn.Linear(3, 2, device="meta")
    weight = module.weight
    ranks.optimizer_of(entries(weight=weight, bias=module.bias), ranks.settings())
    weight.data.fill_(2.0)
    module.bias.data.fill_(1.0)
    assert module.weight is weight
    assert module(torch.ones(3)).tolist() == [7.0, 7.0]


def test_main_shards_follow_weights_that_were_loaded_later():
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = ranks.optimizer_of(entries(weight=weight), ranks.settings(), "float32")
    weight.data.fill_(3.0)
    optimizer.sync_main_from_parameters()
    (weight.sum() * 0).backward()
    optimizer.step(1e-2)
    assert weight.float().tolist() == pytest.approx([3.0 * (1 - 1e-2 * 0.1)] * 4, rel=2**-8)


def test_loss_scale_leaves_norm_gradients_and_update_alone():
    outcomes = []
    for scale in (1.0, 1024.0):
        weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimizer = ranks.optimizer_of(entries(weight=weight), ranks.settings())
        (weight.square().sum() * scale).backward()
        optimizer.reduce_gradients()
        gradient = optimizer.gather_gradients(grad_scale=scale)["weight"].tolist()
        outcomes.append((gradient, float(optimizer.step(1e-2, grad_scale=scale).figures[0]), weight.tolist()))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:2] == ([2.0, -4.0], pytest.approx(20**0.5))


def test_frozen_parameters_stay_out_of_the_buffers():
    frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    local = LocalParameter("frozen", (5,), torch.float32, I, (5,), requires_grad=False)
    optimizer = ranks.optimizer_of([(local, frozen)], ranks.settings())
    assert optimizer.buffers.buffers == []
    assert optimizer.step(1e-2).figures[0] == 0.0


def test_no_clipping_still_reports_the_norm():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    options = ranks.OptimizerSpec(clip_grad_norm=None)
    optimizer = ranks.optimizer_of(entries(weight=weight), options)
    (weight.square().sum() / 2).backward()
    optimizer.reduce_gradients()
    assert float(optimizer.step(1e-2).figures[0]) == pytest.approx(5.0)
    assert weight.main_grad.tolist() == [3.0, 4.0]


def test_norm_of_many_float32_elements_is_exact():
    values = torch.full((5_000_001,), 1e-3) + 1e-4 * torch.randn(5_000_001, generator=torch.Generator().manual_seed(0))
    assert squared_norm(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_is_not_finite_skips_the_update_whole(bad, dtype):
    after = []
    for losses in ([1.0], [bad, 1.0]):
        weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype))
        optimizer = ranks.optimizer_of(entries(weight=weight), ranks.settings())
        for loss in losses:
            optimizer.begin_step()
            (weight.square().sum() / 2).backward()
            optimizer.reduce_gradients()
            before, result = weight.tolist(), optimizer.step(1e-2, extra=[loss])
            assert bool(result.figures[1]) == (loss != 1.0)
            assert (weight.tolist() == before) == bool(result.figures[1])
        after.append(weight.tolist())
    assert after[0] == after[1]  # neither moments nor the count of steps know of the skipped one

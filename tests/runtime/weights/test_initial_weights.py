"""Ranks that begin with other weights than rank 0 take rank 0's, or are refused: a model needs no seed."""

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from examples.gpt import GPT
from passes.errors import PlanError
from planner import plan
from planner.capture.model.meta_init import meta_parameters
from planner.spec.spec import Spec
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from runtime.verify.reference import OneProcess
from runtime.weights.initial_weights import fingerprint, fingerprint_of_model, held_tensors
from runtime.weights.sources import BLOCK, blocks_of, normal
from tests.tools.examples import examples
from tests.tools.limits import HANG_SECONDS

LENGTH, VOCABULARY, SIZE = 8, 37, 8
LAYOUTS: tuple[dict[str, int], ...] = ({"tp": 2, "pp": 2}, {"tp": 2, "dp": 2})


class Model(nn.Module):
    """A GPT with a tied head, frozen and trainable weights beside it, and buffers: random ones, and class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(vocabulary=VOCABULARY, length=LENGTH, width=16, num_layers=2, num_heads=2, dropout=0.0)
        self.frozen = nn.Parameter(torch.rand(VOCABULARY), requires_grad=False)
        self.register_buffer("noise", torch.rand(VOCABULARY), persistent=False)
        self.register_buffer("weights", torch.rand(VOCABULARY) + 0.5)
        self.noise: Tensor
        self.weights: Tensor

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.gpt(input_ids)[0] + self.noise * self.frozen
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), self.weights)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Model().double()


def spec_of(**rest: Any) -> dict[str, Any]:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    return {"mesh": {}, "batch": {"global": SIZE, "micro": 2}, "inputs": {"input_ids": ids, "targets": ids}, **rest}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randint(VOCABULARY, (SIZE, LENGTH), generator=generator) for n in ("input_ids", "targets")}


def train(model: nn.Module, spec: dict[str, Any]) -> dict[str, Any]:
    with Engine(plan(model, spec), timeout_seconds=HANG_SECONDS) as engine:
        begun = engine.gather_parameters()
        losses = [engine.train_step(batch(step)).loss for step in range(3)]
        return {"begun": begun, "losses": losses, "parameters": engine.gather_parameters()}


def own_seed_each() -> list[dict[str, Any]]:
    """Every layout, each rank with weights of its own."""
    rank = int(os.environ["RANK"])
    return [train(build(seed=rank), spec_of(mesh=mesh)) for mesh in LAYOUTS]


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_without_a_common_seed_equal_one_process_with_the_weights_of_rank_0():
    for found in launch(own_seed_each, 4, timeout_seconds=HANG_SECONDS)[0]:
        begun = dict(build(seed=0).named_parameters(remove_duplicate=False))
        assert found["begun"].keys() == begun.keys()
        assert all(torch.equal(found["begun"][name], value) for name, value in begun.items())
        one = OneProcess(build(seed=0), Spec.load(spec_of()))
        assert found["losses"] == pytest.approx([one.train_step(batch(step)) for step in range(3)], rel=1e-10)
        for name, value in one.model.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(found["parameters"][name], value.detach(), rtol=1e-8, atol=1e-10, msg=name)


def values_on_one_rank() -> list[dict[str, Tensor]]:
    """Once the first, once the second of two ranks holds weights, the other's parameters are on meta."""
    found = []
    for rank_with_values in (0, 1):
        with nullcontext() if int(os.environ["RANK"]) == rank_with_values else meta_parameters():
            model = build(seed=3)
        with Engine(plan(model, spec_of(mesh={"pp": 2})), timeout_seconds=HANG_SECONDS) as engine:
            found.append(engine.gather_parameters())
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_where_one_rank_alone_holds_weights_all_begin_as_rank_0_does():
    first, second = launch(values_on_one_rank, 2, timeout_seconds=HANG_SECONDS)[0]
    assert all(torch.equal(first[name], value) for name, value in build(seed=3).named_parameters())
    with meta_parameters():
        model = build(seed=3)
    with Engine(plan(model, spec_of())) as engine:  # fresh values of the spec's seed
        alone = engine.gather_parameters()
    assert second.keys() == alone.keys()
    assert all(torch.equal(second[name], value) for name, value in alone.items())


def errors_of_engines(pairs: tuple[tuple[int, int], ...]) -> list[str]:
    """What each engine of two ranks ends in, whose models had these seeds and must be equal."""
    found = []
    for seeds in pairs:
        decided = plan(build(seeds[int(os.environ["RANK"])]), spec_of(mesh={"tp": 2}, initial_weights="require_equal"))
        try:
            Engine(decided, timeout_seconds=HANG_SECONDS).close()
            found.append("equal")
        except PlanError as error:
            found.append(str(error))
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_require_equal_is_one_error_on_every_rank_and_equal_weights_are_not_sent():
    found = launch(errors_of_engines, 2, ((1, 2), (1, 1)), timeout_seconds=HANG_SECONDS)
    assert found[0] == found[1]
    refused, equal = found[0]
    assert refused.startswith("rank 1 starts with other weights than rank 0: parameter frozen (and ")
    assert "torch.manual_seed" in refused
    assert "at:  initial_weights" in refused
    assert equal == "equal"  # differing() was empty: take_weights has nothing to send


@pytest.mark.thorough
def test_parameters_buffers_and_constants_are_compared():
    decided = plan(build(0), spec_of())
    kinds = {held.name: held.kind for held in held_tensors(decided)}
    assert {kinds[name] for name in ("frozen", "gpt.head.weight") if name in kinds} == {"parameter"}
    assert {kinds["noise"], kinds["weights"]} == {"buffer"}


def drawn(shape=(700, 300), rows=None, num_threads=1, name="w", seed=1, dtype=torch.float32) -> torch.Tensor:
    return normal(name, shape, dtype, seed=seed, std=0.5, rows=rows, num_threads=num_threads)


WHOLE = {shape: drawn(shape) for shape in ((700, 300), (65_537,), (3, BLOCK), (5, 2, 3), (1,))}


@examples(60)
@given(st.sampled_from(sorted(WHOLE)), st.data(), st.sampled_from([1, 2, 5]))
def test_rows_are_those_of_the_whole_whatever_the_number_of_threads(shape, data, num_threads):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, shape[0]), st.integers(0, shape[0]))))
    rows = drawn(shape, (start, stop), num_threads)
    assert torch.equal(rows, WHOLE[shape][start:stop])


def test_any_number_of_threads_draws_the_same():
    assert torch.equal(drawn(num_threads=4), WHOLE[700, 300])


def test_a_global_generator_and_the_number_of_torchs_threads_change_nothing():
    threads = torch.get_num_threads()
    try:
        torch.manual_seed(99)
        torch.set_num_threads(2)
        assert torch.equal(drawn(), WHOLE[700, 300])
    finally:
        torch.set_num_threads(threads)


def test_names_seeds_and_blocks_differ():
    values = WHOLE[700, 300]
    assert not torch.equal(drawn(name="v"), values)
    assert not torch.equal(drawn(seed=2), values)
    flat = values.view(-1)
    assert len({flat[start : start + 16].sum().item() for start in range(0, flat.numel(), BLOCK)}) == 4


def test_the_values_are_normal():
    flat = WHOLE[3, BLOCK].view(-1) / 0.5
    assert flat.mean().item() == pytest.approx(0, abs=0.01)
    assert flat.std().item() == pytest.approx(1, rel=0.01)
    assert (flat.abs() < 1.96).double().mean().item() == pytest.approx(0.95, abs=0.002)


def test_every_dtype_holds_the_same_values_rounded():
    assert torch.equal(drawn(dtype=torch.bfloat16), WHOLE[700, 300].bfloat16())
    assert torch.equal(drawn(dtype=torch.float64), WHOLE[700, 300].double())


def test_a_shard_needs_the_blocks_that_it_is_in_and_no_others():
    row = 4096
    assert len(blocks_of(0, 32_000 * row)) == 2000
    assert blocks_of(4000 * row, 8000 * row) == range(250, 500)
    assert blocks_of(BLOCK - 1, BLOCK + 1) == range(2)
    assert len(blocks_of(7, 7)) == 0


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64)


def random(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from(DTYPES), st.data())
def test_one_changed_element_changes_it(size, dtype, data):
    tensor = random(size, dtype)
    changed, place = tensor.clone(), data.draw(st.integers(0, size - 1))
    changed[place] = 0 if changed[place] != 0 else 1  # in bfloat16 336 + 1 is 336
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(changed) != fingerprint(tensor)


@given(st.integers(2, 5000), st.data())
def test_two_exchanged_elements_change_it(size, data):
    tensor = torch.arange(size, dtype=torch.float32)
    a, b = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    changed = tensor.clone()
    changed[a], changed[b] = tensor[b], tensor[a]
    assert fingerprint(changed) != fingerprint(tensor)


def test_it_does_not_depend_on_strides_offsets_or_the_object():
    whole = random(6000, torch.float32).view(60, 100)
    assert fingerprint(whole.t().contiguous().t()) == fingerprint(whole)
    assert fingerprint(whole[1:]) == fingerprint(whole[1:].clone())
    assert fingerprint(whole.view(-1)[1:]) == fingerprint(whole.view(-1)[1:].clone())
    assert fingerprint(nn.Parameter(whole)) == fingerprint(whole)


@pytest.mark.parametrize("empty", [torch.empty(3, device="meta"), torch.empty(0)])
def test_what_has_no_values_is_zero(empty):
    assert fingerprint(empty) == 0


def test_a_model_is_fingerprinted_with_tied_weights_and_buffers():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    model["b"].weight = model["a"].weight
    found = fingerprint_of_model(model)
    assert found["a.weight"] == found["b.weight"] != found["a.bias"]
    assert {"norm.running_mean", "norm.num_batches_tracked"} < found.keys()

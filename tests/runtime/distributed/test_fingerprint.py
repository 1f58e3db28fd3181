"""A fingerprint is of a tensor's bits: equal for equal values however they lie, other for any change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runtime.weights.initial_weights import fingerprint, fingerprint_of_model

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

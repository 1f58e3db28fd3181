"""Losses outside the model on processes: value, gradients and steps of DPO and GRPO are those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.families import IGNORED, Entry, build
from tests.tools.laboratory import ADAMW, Case, Lab
from tests.tools.loss_outside_ranks import (
    Batch,
    Outside,
    exchanged,
    failing,
    local_rows,
    losses_of,
    outside,
    with_extras,
)

SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tp 2, pp 2, along the sequence": ("gpt", {"tp": 2, "pp": 2}, SEQUENCE),
    "cp 2, dp 2": ("gpt", {"cp": 2, "dp": 2}, {}),
    "tp 2, cp 2": ("gpt", {"tp": 2, "cp": 2}, {}),
    "two chunks a rank, recomputed": (
        "gpt",
        {"pp": 2, "vpp": 2},
        {"pipeline": {"schedule": "interleaved_1f1b"}, "recompute": "full"},
    ),
    "weight gradients wait": ("gpt", {"tp": 2, "pp": 2}, {"pipeline": {"schedule": "zero_bubble"}}),
    "in a v": ("gpt", {"tp": 2, "pp": 2, "vpp": 2}, {"pipeline": {"schedule": "zero_bubble_v"}}),
    "weights in shards": ("gpt", {"pp": 2, "dp": 2}, {"optimizer": {"zero": 3}}),
    "a head that is not sharded": ("gpt", {"tp": 2}, {"tensor_parallel": {"overrides": {"tokens": "replicate"}}}),
    "labels shifted inside": ("gpt2", {"tp": 2, "cp": 2}, {}),
    "experts": ("mixtral", {"dp": 2, "ep": 2}, {}),
    "experts that balance": ("experts", {"tp": 2, "dp": 2, "ep": 2}, {}),
}


def labels_of(entry: Entry) -> str:
    return entry.labels[0]


def log_probs_of(entry: Entry, batch: Batch) -> Tensor:
    """[b, length] at the labels: zero where one is ignored, or is the first of a model that shifts inside."""
    output: Any = entry.model(**{name: batch[name] for name in entry.inputs})
    labels = batch[labels_of(entry)]
    shifts = hasattr(output, "logits")
    logits = output.logits[:, :-1] if shifts else output[0]
    targets = labels[:, 1:] if shifts else labels
    each = -F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
    return F.pad(each, (1, 0)) if shifts else each


def num_tokens(entry: Entry, batch: Batch) -> int:
    return int((batch[labels_of(entry)] != IGNORED).sum())


def truth_of(model: str) -> Outside:
    """One process on the whole batch at once."""
    entry = build(model)
    if hasattr(entry.model, "set_experts_implementation"):
        entry.model.set_experts_implementation("eager")  # pyright: ignore  # the other takes no float64
    batch, parameters = with_extras(entry.batch(8, 0), labels_of(entry)), list(entry.model.parameters())
    update = torch.optim.AdamW(parameters, ADAMW["lr"], ADAMW["betas"], weight_decay=ADAMW["weight_decay"])
    losses, gradients, before = {}, {}, log_probs_of(entry, batch).detach()
    given = losses_of(batch, labels_of(entry), num_tokens(entry, batch))

    def backward(name: str) -> float:
        update.zero_grad()
        value = given[name](log_probs_of(entry, batch), batch)
        value.backward()
        return value.item()

    for name in given:
        losses[name] = backward(name)
        named = entry.model.named_parameters(remove_duplicate=False)
        gradients[name] = {n: None if p.grad is None else p.grad.clone() for n, p in named}
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
    update.step()
    second = backward("grpo")
    steps = (losses["grpo"], norm, second, torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
    return Outside(losses, gradients, before, steps)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_dpo_and_grpo_train_as_in_one_process(lab: Lab, case: str) -> None:
    model, mesh, rest = CASES[case]
    entry = build(model)
    labels = labels_of(entry)
    truth = truth_of(model)
    arguments = (labels, num_tokens(entry, entry.batch(8, 0)))
    ranks = lab.run(Case(model, mesh, rest, job=outside, job_arguments=arguments))
    limit = 1e-10 if model in ("gpt", "experts") else 1e-5  # Hugging Face models compute some values in float32
    close = partial(torch.testing.assert_close, rtol=limit, atol=limit)
    for found in ranks:
        close(found.log_probs, truth.log_probs)
        close(torch.tensor(found.steps[:2]), torch.tensor(truth.steps[:2]))
        close(torch.tensor(found.steps[2:]), torch.tensor(truth.steps[2:]), rtol=1e-5)  # after an update by Adam
        assert found.losses == ranks[0].losses
    for name, expected in truth.gradients.items():
        assert ranks[0].losses[name] == pytest.approx(truth.losses[name], rel=limit)
        gradients = ranks[0].gradients[name]
        assert gradients.keys() == expected.keys()
        for parameter, gradient in expected.items():
            given = gradients[parameter]
            assert given is not None
            whole = torch.zeros_like(given) if gradient is None else gradient
            close(given, whole, msg=lambda text, p=parameter, n=name: f"{n}, {p}: {text}")


@pytest.mark.thorough
@pytest.mark.slow
def test_each_dp_rank_may_give_its_own_rows(lab: Lab) -> None:
    entry = build("gpt")
    arguments = (labels_of(entry), num_tokens(entry, entry.batch(8, 0)))
    for whole, local in lab.run(Case("gpt", {"dp": 2}, job=local_rows, job_arguments=arguments)):
        assert whole == local


FAILING: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp 2, pp 2": ({"tp": 2, "pp": 2}, {}),
    "weights in shards": ({"pp": 2, "dp": 2}, {"optimizer": {"zero": 3}}),
    "cp 2, small buckets": ({"cp": 2, "dp": 2}, {"optimizer": {"bucket_size": 500}}),
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", FAILING)
def test_a_function_that_fails_is_one_error_and_the_next_step_is_as_before(lab: Lab, case: str) -> None:
    mesh, rest = FAILING[case]
    entry = build("gpt")
    arguments = (labels_of(entry), num_tokens(entry, entry.batch(8, 0)))
    ranks = lab.run(Case("gpt", mesh, rest, job=failing, job_arguments=arguments))
    for rank, found in enumerate(ranks):
        all_of_them, one_rank, last = found.messages
        assert "KeyError: 'forgotten'" in all_of_them
        assert ("rank 3" in one_rank) == (rank != 3)
        assert "returns a torch.float64 tensor of shape" in one_rank
        assert "KeyError: 'forgotten'" in last
        assert found.losses[0] == found.losses[1] == ranks[0].losses[0]
    before, after = ranks[0].gradients
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if before[name] is not None)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["tp 2, cp 2", "tp 2, pp 2, along the sequence", "a head that is not sharded"])
def test_every_exchange_of_a_step_is_listed(lab: Lab, case: str) -> None:
    model, mesh, rest = CASES[case]
    entry = build(model)
    arguments = (labels_of(entry), num_tokens(entry, entry.batch(8, 0)))
    for seen, listed in lab.run(Case(model, mesh, rest, job=exchanged, job_arguments=arguments)):
        assert seen == listed
        assert seen

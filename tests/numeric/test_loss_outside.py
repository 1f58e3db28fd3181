"""Losses outside the model on processes: value, gradients and steps of DPO and GRPO are those of one process."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.blocks.blocks import Places
from passes.errors import PlanError
from passes.lower import LOCAL, with_head
from passes.ops.loss_head import LOG_P
from passes.pieces import Piece
from passes.types.conversions import CollectivePlan
from planner.decisions import Decisions
from planner.exchanges.collectives import check_scored, rows_of_stages, weight_rows
from planner.pipeline.schedule import SchedulePlan
from planner.sharding.shards import Shards
from planner.trace.lowered import Lowered
from runtime import Engine
from runtime.engine.log_probs import LossFunction
from tests.models.families import IGNORED, Entry, build
from tests.tools.laboratory import ADAMW, Case, Lab
from tests.tools.limits import HANG_SECONDS


def rows_with_loss_outside(
    decisions: Decisions, shards: Shards, schedule: SchedulePlan, recomputed: Sequence[Piece] = ()
) -> tuple[CollectivePlan, ...]:
    """The collectives of a step with a loss outside the model, which reads log-probabilities of labels.

        the plan's rows, without those of the loss itself
        over tp, a microbatch    per token the maximum, then two scalars      if logits are sharded over the vocabulary
        over tp, a microbatch    log P of every label                         if the tokens of the logits are sharded
        over cp, a microbatch    log P of every label

    These rows are no part of a plan: only ``forward_backward`` and ``train_step`` with ``loss=function`` run them.
    Raises PlanError for a loss that gives no target a probability.
    """
    check_scored(decisions)
    places = Places(decisions.blocks)
    lowered = Lowered(decisions, shards, recomputed=tuple(recomputed), passes=with_head(LOCAL, LOG_P))
    rows = rows_of_stages(lowered, places)
    if decisions.terms.in_turn > 1:  # the forwards of the model's own loss run first, for its sums
        own = rows_of_stages(replace(lowered, recomputed=(), passes=Lowered.passes, _stages={}, _traces={}), places)
        rows += [row for row in own if row.phase == "forward"]
    return (*rows, *shards.at_step, *weight_rows(lowered, schedule))


Batch = dict[str, Tensor]


class Outside(NamedTuple):
    """Of a rank: each loss, its gradients (rank 0), log_probs before; of the last loss (loss, norm) of two steps."""

    losses: dict[str, float]
    gradients: dict[str, dict[str, Tensor | None]]
    log_probs: Tensor
    steps: tuple[float, ...]


def dpo(num_pairs: int) -> LossFunction:
    """Rows are chosen, rejected, chosen …; ``reference``: log P of each sequence by the reference model [b]."""

    def loss(log_probs: Tensor, rows: Batch) -> Tensor:
        chosen, rejected = (log_probs.sum(-1) - rows["reference"]).view(-1, 2).unbind(1)
        return -F.logsigmoid(0.3 * (chosen - rejected)).sum() / num_pairs

    return loss


def grpo(num_tokens: float) -> LossFunction:
    """Clipped ratios and a KL penalty, each token equal; ``old`` [b, length], ``advantages`` [b]."""

    def loss(log_probs: Tensor, rows: Batch) -> Tensor:
        ratio = (log_probs - rows["old"]).exp()
        gain = rows["advantages"].unsqueeze(1)
        clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        behind = rows["old"] - log_probs
        penalty = behind.exp() - behind - 1
        return ((0.04 * penalty - clipped) * (log_probs != 0)).sum() / num_tokens

    return loss


def with_extras(batch: Batch, labels: str) -> Batch:
    """The batch with the tensors that the losses read beside it."""
    generator = torch.Generator().manual_seed(3)
    size = batch[labels].shape

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {**batch, "reference": 5 * drawn(size[0]), "old": -4 + 0.5 * drawn(*size), "advantages": drawn(size[0])}


def losses_of(batch: Batch, labels: str, num_tokens: int) -> dict[str, LossFunction]:
    return {"dpo": dpo(len(batch[labels]) // 2), "grpo": grpo(num_tokens)}


def outside(plan: Any, batches: list[Batch], labels: str, num_tokens: int) -> Outside:
    """Gradients of each loss, then two steps of the last one; the model's own loss runs in between."""
    batch = with_extras(batches[0], labels)
    losses, gradients = {}, {}
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        log_probs = engine.log_probs(batch)
        for name, loss in losses_of(batch, labels, num_tokens).items():
            losses[name] = engine.forward_backward(batch, loss=loss)
            gradients[name] = dict(engine.gather_gradients())
            assert engine.forward_backward(batches[0]) != losses[name]
        assert engine.forward_backward(batch, loss=loss) == losses[name]
        norm = engine.optimizer_step().grad_norm
        report = engine.train_step(batch, loss=loss)
        return Outside(losses, gradients, log_probs, (losses[name], norm, report.loss, report.grad_norm))


def local_rows(plan: Any, batches: list[Batch], labels: str, num_tokens: int) -> list[float]:
    """The loss of the global batch, given in full and as the rows of each dp rank."""
    batch = with_extras(batches[0], labels)
    loss = losses_of(batch, labels, num_tokens)["grpo"]
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        size = len(batch[labels]) // engine.mesh.dp_size
        rows = slice(engine.mesh.dp_rank * size, (engine.mesh.dp_rank + 1) * size)
        own = {name: value[rows] for name, value in batch.items()}
        return [engine.forward_backward(batch, loss=loss), engine.forward_backward(own, loss=loss, local=True)]


class Failed(NamedTuple):
    """Of a rank: the message of each failure, and the loss and the gradients before and after all of them."""

    messages: list[str]
    losses: tuple[float, float]
    gradients: tuple[dict[str, Tensor], dict[str, Tensor]]


def failing(plan: Any, batches: list[Batch], labels: str, num_tokens: int) -> Failed:
    """Functions that fail on all ranks of the loss, on one, in the last microbatch alone; then one that does not."""
    batch, calls, messages = with_extras(batches[0], labels), [0], list[str]()
    loss = losses_of(batch, labels, num_tokens)["grpo"]

    def fails(log_probs: Tensor, rows: Batch) -> Tensor:
        return loss(log_probs, {**rows, "old": rows["forgotten"]})

    def returns_rows(log_probs: Tensor, rows: Batch) -> Tensor:
        return log_probs.sum(-1) if engine.groups.rank == engine.mesh.world_size - 1 else loss(log_probs, rows)

    def fails_at_last(log_probs: Tensor, rows: Batch) -> Tensor:
        calls[0] += 1
        return fails(log_probs, rows) if calls[0] == plan.schedule.num_microbatches else loss(log_probs, rows)

    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        before = engine.forward_backward(batch, loss=loss)
        gradients = dict(engine.gather_gradients())
        for function in (fails, returns_rows, fails_at_last):
            try:
                engine.train_step(batch, loss=function)
            except PlanError as error:
                messages.append(str(error))
        after = engine.forward_backward(batch, loss=loss)
        return Failed(messages, (before, after), (gradients, dict(engine.gather_gradients())))


def exchanged(plan: Any, batches: list[Batch], labels: str, num_tokens: int) -> tuple[dict[Any, int], dict[Any, int]]:
    """(axis, kind, phase) → bytes of this rank's exchanges in the graphs of a step, as seen and as listed."""
    batch = with_extras(batches[0], labels)
    loss = losses_of(batch, labels, num_tokens)["grpo"]
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.forward_backward(batch, loss=loss)
        axes = engine.program.axes
        for axis in axes.values():
            axis.bytes.clear()
        engine.forward_backward(batch, loss=loss)
        seen = {(name, *key): size for name in ("tp", "cp") if name in axes for key, size in axes[name].bytes.items()}
        pp_rank = engine.groups.place["pp"]
    decisions, shards = plan.to_run()
    listed: Counter[Any] = Counter()
    for row in rows_with_loss_outside(decisions, shards, plan.schedule, plan.recomputed):
        if row.axis in ("tp", "cp") and row.per == "microbatch" and plan.mesh.pp_rank_of(row.stage) == pp_rank:
            listed[row.axis, row.kind, row.phase] += row.bytes * row.count * plan.schedule.num_microbatches
    return +Counter(seen), +listed


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

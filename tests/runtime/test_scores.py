"""Scores of labels are those of the model's own logits, however its loss is spelled and its tokens are laid out."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT
from passes.ops import loss_head
from passes.ops.loss_head import COUNT, IS_TOP, LOG_PROBABILITY
from planner import Plan, PlanError, plan
from runtime import Engine
from tests.models.own_losses import class_weights_loss, logsumexp_loss, masked_loss, several_losses
from tests.tools.score_jobs import score_rows
from tests.tools.scored_ranks import scores_on
from tests.tools.simulated_mesh import spec_of

VOCABULARY, LENGTH, BATCH, IGNORED = 61, 8, 4, -100  # padded by 3 columns where it is cut
Batch = dict[str, Tensor]
Loss = Callable[..., Tensor]


class Small(nn.Module):
    """Logits of a tied embedding; ``loss(logits, labels)``."""

    def __init__(self, loss: Loss, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocabulary, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.loss = loss

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + 0.1 * torch.tanh(self.mix(x)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.logits(ids), labels)


def made(loss: Loss) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return Small(loss).double()

    return make


def batch_of(*, ignored: bool) -> Batch:
    """A third of the labels are the tokens themselves, which a tied head finds most probable, a third those before."""
    generator = torch.Generator().manual_seed(2)
    ids, labels = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    which = torch.randint(3, (BATCH, LENGTH), generator=generator)
    labels = torch.where(which == 0, ids, torch.where(which == 1, ids.roll(1, 1), labels))
    if ignored:
        labels[0, :3] = IGNORED
        labels[2] = IGNORED
    return {"ids": ids, "labels": labels}


def shifted_inside(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def written_into_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    target = labels.new_full(labels.shape, IGNORED)
    target[:, :-1] = labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def chosen(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), torch.where(labels == 3, IGNORED, labels))


def tokens_first(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.T.flatten())


def in_chunks(logits: Tensor, labels: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).split(6), labels.flatten().split(6), strict=True)
    return sum(F.cross_entropy(x, y, reduction="sum") for x, y in pieces) / (labels != IGNORED).sum()


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != IGNORED
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(picked * mask).sum() / mask.sum()


def by_nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())


def normalised(logits: Tensor, labels: Tensor) -> Tensor:
    return -(logits - logits.logsumexp(-1, keepdim=True)).gather(-1, labels[..., None]).mean()


def masked_by_themselves(logits: Tensor, labels: Tensor) -> Tensor:
    return masked_loss(logits, labels.clamp(min=0), labels != IGNORED)


KEPT = slice(None)
SPELLED: dict[str, tuple[Loss, bool, slice]] = {  # the loss, whether it ignores labels, which labels it predicts
    "nll": (by_nll, True, KEPT),
    "log_softmax and gather": (by_hand, True, KEPT),
    "logsumexp": (logsumexp_loss, True, KEPT),
    "normalised first": (normalised, False, KEPT),
    "masked": (masked_by_themselves, True, KEPT),
    "smoothed, with a penalty": (several_losses, True, KEPT),
    "weights of classes": (class_weights_loss, True, KEPT),
    "shifted inside": (shifted_inside, True, slice(1, None)),
    "shifted into a tensor": (written_into_ignored, True, slice(1, None)),
    "tokens before sequences": (tokens_first, True, KEPT),
    "in chunks": (in_chunks, True, KEPT),
}


def expected(logits: Tensor, labels: Tensor, is_scored: Tensor) -> tuple[Tensor, Tensor]:
    """log P of each label, and whether it is the arg max; zero where it is not scored."""
    each = F.cross_entropy(logits.transpose(1, 2), labels.masked_fill(~is_scored, 0), reduction="none")
    return (-each).masked_fill(~is_scored, 0.0), (logits.argmax(-1) == labels) & is_scored


def assert_scores(found: Tensor, logits: Tensor, labels: Tensor, is_scored: Tensor, tolerance: float = 1e-12) -> None:
    log_probabilities, is_top = expected(logits, labels, is_scored)
    assert found[COUNT].equal(is_scored.double())
    torch.testing.assert_close(found[LOG_PROBABILITY], log_probabilities.double(), rtol=tolerance, atol=tolerance)
    assert found[IS_TOP].equal(is_top.double())


def is_vocabulary_cut(decided: Plan) -> bool:
    return any(row.style == "vocab" for row in decided.parameters)


@pytest.mark.thorough
@pytest.mark.parametrize("spelling", SPELLED)
@torch.no_grad()
def test_a_loss_may_be_spelled_in_any_way(spelling):
    loss, ignores, kept = SPELLED[spelling]
    batch = batch_of(ignored=ignores)
    model: Small = made(loss)()  # pyright: ignore[reportAssignmentType]
    is_scored = torch.zeros(batch["labels"].shape, dtype=torch.bool)
    is_scored[:, kept] = batch["labels"][:, kept] != IGNORED
    decided, found, _ = scores_on(made(loss), batch, {"tp": 2})
    logits = model.logits(batch["ids"])
    if kept != KEPT:  # what is said of a label is said one place before it
        logits = logits.roll(1, 1)
    assert_scores(found, logits, batch["labels"], is_scored)
    assert is_vocabulary_cut(decided)
    assert 0 < found[IS_TOP].sum() < found[COUNT].sum()


@torch.no_grad()
def test_a_label_that_is_ignored_by_its_value_is_not_scored():
    batch = batch_of(ignored=False)
    _, found, _ = scores_on(made(chosen), batch, {"tp": 2})
    assert_scores(found, made(chosen)().logits(batch["ids"]), batch["labels"], batch["labels"] != 3)  # pyright: ignore


def gpt() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, length=LENGTH, width=32, num_layers=4, num_heads=4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def gpt_batch() -> Batch:
    batch = batch_of(ignored=True)
    return {"input_ids": batch["ids"], "targets": batch["labels"]}


SEQUENCE = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
LAYOUTS = {
    "tp 2": ({"tp": 2}, {}),
    "pp 2": ({"pp": 2}, {}),
    "dp 2": ({"dp": 2}, {}),
    "cp 2": ({"cp": 2}, {}),
    "tp 2, cp 2, dp 2": ({"tp": 2, "cp": 2, "dp": 2}, {}),
    "tp 2, pp 2, along the sequence": ({"tp": 2, "pp": 2}, SEQUENCE),
    "recomputed": ({"tp": 2}, {"recompute": "full"}),
    "a head that is not cut": ({"tp": 2}, {"tensor_parallel": {"overrides": {"tokens": "replicate"}}}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_every_layout_gives_the_scores_of_one_process(layout):
    mesh, rest = LAYOUTS[layout]
    batch = gpt_batch()
    _, found, _ = scores_on(gpt, batch, mesh, **rest)
    logits, _ = gpt()(batch["input_ids"])
    assert_scores(found, logits, batch["targets"], batch["targets"] != IGNORED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["tp 2", "tp 2, cp 2, dp 2", "a head that is not cut"])
@torch.no_grad()
def test_what_is_exchanged_is_what_the_rows_say(layout):
    mesh, rest = LAYOUTS[layout]
    made_plan, _, programs = scores_on(gpt, gpt_batch(), mesh, **rest)
    decisions, _ = made_plan.to_run()
    rows = [row for row in score_rows(decisions, BATCH) if row.axis == "tp"]
    planned = Counter({("all_reduce", "forward"): sum(row.bytes * row.count for row in rows)})
    for row in made_plan.collectives:
        if row.axis == "tp" and row.phase == "forward" and row.per == "microbatch":
            planned[row.kind, row.phase] += row.bytes * row.count
    assert +Counter(programs[0].axes["tp"].bytes) == +planned
    assert len(rows) == (0 if layout == "a head that is not cut" else 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [torch.distributed.ReduceOp.MAX, None], ids=["maximum", "sums"])
@torch.no_grad()
def test_without_an_exchange_the_scores_are_wrong(monkeypatch, lost):
    whole = loss_head.all_reduce

    def without(x, axis, phase, op=None, *, owned=False):
        return x if op == lost else whole(x, axis, phase, op, owned=owned)

    monkeypatch.setattr(loss_head, "all_reduce", without)
    batch = gpt_batch()
    decided, found, _ = scores_on(gpt, batch, {"tp": 2})
    assert is_vocabulary_cut(decided)
    logits, _ = gpt()(batch["input_ids"])
    with pytest.raises(AssertionError):
        assert_scores(found, logits, batch["targets"], batch["targets"] != IGNORED, tolerance=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
@torch.no_grad()
def test_of_equal_logits_the_lowest_id_is_the_top(tp):
    """All logits are zero: only where the label is 0 it is the arg max."""

    def make() -> nn.Module:
        model = Small(by_nll).double()
        nn.init.zeros_(model.embed.weight)
        return model

    batch = batch_of(ignored=False)
    batch["labels"][1, :4] = 0
    _, found, _ = scores_on(make, batch, {"tp": tp})
    assert found[IS_TOP].equal((batch["labels"] == 0).double())
    even = torch.full((BATCH, LENGTH), -math.log(VOCABULARY), dtype=torch.float64)
    torch.testing.assert_close(found[LOG_PROBABILITY], even)


def engine_of(loss: Loss, batch: Batch) -> Engine:
    return Engine(plan(made(loss)(), spec_of(batch, {}) | {"batch": {"global": BATCH, "micro": 2}}))


@torch.no_grad()
def test_the_engine_scores_a_batch_and_what_it_has_learned_since():
    batch = batch_of(ignored=True)
    with engine_of(by_hand, batch) as engine:
        before = engine.score(batch)
        assert before.key == "labels"
        assert before.is_scored.equal(batch["labels"] != IGNORED)
        mean = -before.log_probabilities.sum() / before.is_scored.sum()
        assert mean.item() == pytest.approx(engine.evaluate(batch), rel=1e-12)
        with torch.enable_grad():
            report = engine.train_step(batch)
        after = engine.score(batch)
        assert -after.log_probabilities.sum() / after.is_scored.sum() < report.loss
        assert before.is_top.dtype == torch.bool


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - F.one_hot(labels.clamp(min=0), VOCABULARY)).square().mean()


def twice(logits: Tensor, labels: Tensor) -> Tensor:
    return by_nll(logits, labels) + by_nll(2 * logits, labels)


def computed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.cumsum(1).flatten() % VOCABULARY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (squared, "the loss is not a cross-entropy over a vocabulary: it assigns no probability to a target"),
        (twice, r"the loss scores a label of batch\['labels'\] 2 times"),
        (computed, "the label of each target cannot be traced through this call"),
    ],
)
def test_a_loss_without_probabilities_of_labels_is_refused(loss, what):
    batch = batch_of(ignored=False)
    with engine_of(loss, batch) as engine, pytest.raises(PlanError, match=what) as caught:
        engine.score(batch)
    assert "fix:" in str(caught.value)
    assert loss is twice or "test_scores.py" in str(caught.value)

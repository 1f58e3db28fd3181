"""Packed documents in convolutions and scans: each is computed as the model computes it alone, on every layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from passes.errors import PlanError
from passes.partition.sequence import facts
from planner import plan
from tests.models.of_mixers import VOCABULARY, WIDTH, Mixer, Mixing, convolution
from tests.planner.test_documents import family, spec
from tests.tools import zigzag
from tests.tools.simulated_mesh import Ran, run_mesh

ENDS = [5, 8, 16]  # of the documents of a sequence; no chunk of a scan, and no part of cp, ends with one
PACKED = {"packing": "documents"}
LAYOUTS: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"cp": 2})


def _logarithms(model: Mixing, x: Tensor) -> Tensor:
    return -F.softplus(x * model.decay)


def _over(sums: Tensor) -> Tensor:
    """exp of the sums of the logarithms between any two tokens, [b, t, t, d]."""
    later = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool).triu(1)[..., None]
    return (sums[:, :, None] - sums[:, None]).masked_fill(later, float("-inf")).exp()


def scan(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    return torch.einsum("btsd,bsd->btd", _over(_logarithms(model, x).cumsum(1)), x)


def scan_in_chunks(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    length, padding = x.shape[1], (0, 0, 0, -x.shape[1] % 4)
    x, logarithms = F.pad(x, padding), F.pad(_logarithms(model, x), padding)
    chunks, logarithms = (y.reshape(-1, 4, y.shape[-1]) for y in (x, logarithms))
    sums = logarithms.cumsum(1)
    inner = torch.einsum("btsd,bsd->btd", _over(sums), chunks).reshape(x.shape)
    states = ((sums[:, -1:] - sums).exp() * chunks).sum(1).reshape(x.shape[0], -1, x.shape[2])
    sums = sums.reshape(x.shape[0], -1, 4, x.shape[2])
    found, state = [], torch.zeros_like(x[:, 0])
    for number in range(x.shape[1] // 4):
        found.append(sums[:, number].exp() * state[:, None])
        state = state * sums[:, number, -1].exp() + states[:, number]
    return (inner + torch.cat(found, 1))[:, :length]


def convolution_and_scan(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    return scan(model, F.silu(convolution(model, x, places)), places)


def padded_convolution(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    return F.conv1d(F.pad(x.mT, (2, 0)), model.conv.weight, model.conv.bias, groups=WIDTH).mT


KEPT = {mix.__name__: mix for mix in (convolution, padded_convolution, scan_in_chunks, convolution_and_scan)}


def learned_state(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    """The first document begins with it: a later one would not."""
    return scan(model, x, places) + _logarithms(model, x).cumsum(1).exp() * model.taps[0]


def no_decay(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    """The product of all tokens so far, of which 0 would be left."""
    return x * _logarithms(model, x).cumsum(1).exp()


def wide_convolution(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    """It reads the next token too."""
    return model.conv(x.mT)[..., 1 : x.shape[1] + 1].mT


REFUSED = (learned_state, no_decay, wide_convolution)


def doubled(mix: Mixer) -> nn.Module:
    return Mixing(mix).double()


def batch_of(names: tuple[str, str], shift: int) -> dict[str, Tensor]:
    """``shift``: by which labels stand before their tokens, where the model shifts them itself."""
    ids = torch.randint(3, VOCABULARY, (2, ENDS[-1]), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(b - a) for a, b in zip([0, *ENDS], ENDS, strict=False)]).expand(2, -1)
    labels = ids.masked_fill(places < shift, -100)
    return dict(zip((*names, "position_ids"), (ids, labels, places.contiguous()), strict=True))


def apart(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{n: x[:, a:b] for n, x in batch.items()} for a, b in zip([0, *ENDS], ENDS, strict=False)]


def assert_each_is_alone(make: Callable[[], nn.Module], ran: Ran, batch: dict[str, Tensor], tolerance: float) -> None:
    model, total = make(), torch.zeros(())
    counts = [int((list(part.values())[1] != -100).sum()) for part in apart(batch)]
    for part, count in zip(apart(batch), counts, strict=True):
        found: Any = model(**part)
        total = total + (found if isinstance(found, Tensor) else found.loss) * (count / sum(counts))
    total.backward()
    torch.testing.assert_close(ran.loss, total.detach(), rtol=tolerance, atol=0.0)
    for name, parameter in ((n, p) for n, p in model.named_parameters() if p.grad is not None):
        torch.testing.assert_close(ran.gradients[name], parameter.grad, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.sampled(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_a_document_is_computed_as_if_it_were_alone(name: str, mesh: dict[str, int]) -> None:
    batch = batch_of(("tokens", "targets"), 0)
    ran = run_mesh(lambda: doubled(KEPT[name]), batch, mesh, data=PACKED)
    assert any("packed documents" in note.what for note in ran.plan.diagnostics)
    assert_each_is_alone(lambda: doubled(KEPT[name]), ran, batch, 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["scan_in_chunks", "convolution_and_scan"])
def test_tokens_of_others_change_no_bit_of_loss_and_gradients(name: str) -> None:
    batch = batch_of(("tokens", "targets"), 0)
    batch["targets"][:, : ENDS[0]] = batch["targets"][:, ENDS[1] :] = -100
    others = batch | {"tokens": batch["tokens"].clone()}
    others["tokens"][:, : ENDS[0]] = VOCABULARY + 2 - others["tokens"][:, : ENDS[0]]
    ran = [run_mesh(lambda: doubled(KEPT[name]), b, {}, data=PACKED) for b in (batch, others)]
    assert torch.equal(ran[0].loss, ran[1].loss)
    for key in ("inner.weight", "decay" if "scan" in name else "conv.weight", "head.weight"):
        assert torch.equal(ran[0].gradients[key], ran[1].gradients[key])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mix", REFUSED)
def test_a_document_that_would_not_be_computed_as_alone_is_refused(mix: Mixer) -> None:
    with pytest.raises(PlanError, match="lets a token change the loss of another document"):
        plan(Mixing(mix), spec(16))


FAMILIES = ["lfm2", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "qwen3_5_text", "qwen3_next"]


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_documents_of_a_hybrid_family_are_apart(kind: str) -> None:
    def make() -> nn.Module:
        return family(kind).eval()

    batch = batch_of(("input_ids", "labels"), 1)
    assert_each_is_alone(make, run_mesh(make, batch, {"tp": 2}, data=PACKED), batch, 1e-4)


# ---- which tokens a rank of cp holds


@given(st.integers(1, 9), st.integers(1, 5))
def test_the_ranks_hold_each_token_once_and_each_sees_as_many(cp, length):
    size = 2 * cp * length
    held = [zigzag.places(size, cp, rank) for rank in range(cp)]
    assert sorted(place for of_rank in held for place in of_rank) == list(range(size))
    assert all(facts.chunks(cp, facts.owner(cp, c)[0])[facts.owner(cp, c)[1]] == c for c in range(2 * cp))
    seen = [sum(place + 1 for place in of_rank) for of_rank in held]
    assert seen == [zigzag.pairs(size, cp, rank) for rank in range(cp)]
    assert len(set(seen)) == 1


def test_what_a_rank_holds_is_written_as_in_the_field():
    assert [facts.rows(16, 2, rank) for rank in range(2)] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]

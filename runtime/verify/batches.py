"""Random batches by a spec's inputs; and batches with each packed document in its own row.

The latter are the reference for a model that mixes the documents of a sequence, if its plan ends ops at their ends.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from passes.program.program import PACKED
from planner.capture.forms import given_by
from planner.documents import telling_values
from planner.frozen_plan import Plan
from planner.spec.inputs import InputSpec, role_of
from planner.spec.spec import Spec

IGNORED_FRACTION = 0.25  # of the labels, if the loss can ignore some: microbatches then have different token counts
_BEGINS = 0.2  # probability that a document begins at a token


def random_batch(spec: Spec, decided: Plan, seed: int, *, is_uneven: bool = False) -> dict[str, Tensor]:
    """Return a random global batch by the spec's inputs.

    A quarter of the labels are ignored ones, if the loss can ignore labels and no other op, such as one_hot, reads
    them. Seeds take the lengths of a spec in turn, the longest first. With ``packing: documents``, documents are
    random. ``is_uneven``: rows differ in the range of ids, the size of numbers and the share of ignored labels.
    """
    generator = torch.Generator().manual_seed(spec.seed + seed)
    lengths = [decided, *decided.shorter]
    of = spec if len(lengths) == 1 else Spec.load({**lengths[seed % len(lengths)].spec, "cluster": None})
    batch = {n: _random_input(n, i, of.batch.global_size, generator) for n, i in of.require_inputs().items()}
    if is_uneven:
        highs = {n: i.high for n, i in of.require_inputs().items() if n in batch}
        batch = {n: _uneven(rows, highs[n], generator) for n, rows in batch.items()}
    if spec.data.packing == "documents":
        _pack(batch, spec, generator)
    decisions = decided.to_run()[0]
    for name, ignored in decisions.ignored_labels.items():
        reads = decisions.id_ranges.get(name, ())
        may_stand = all(ids.skipped == ignored or ids.low <= ignored < ids.high for ids in reads)
        if may_stand and name in batch and not batch[name].is_floating_point():
            batch[name] = batch[name].clone()
            chance = torch.rand(len(batch[name]), generator=generator) if is_uneven else IGNORED_FRACTION
            drawn = torch.rand(batch[name].shape, generator=generator)
            batch[name][(drawn.movedim(0, -1) < chance).movedim(-1, 0)] = ignored
    for name, skipped in (ignored_apart(decided) or {}).items():
        if role_of(name, spec.data.inputs) == "labels":  # shifted by the model: the first is for another document
            batch[name] = batch[name].masked_fill(_begins(batch, spec), skipped)
    return given_by(of.forms, batch)


def _random_input(name: str, spec: InputSpec, size: int, generator: torch.Generator) -> Tensor:
    shape, dtype = (size, *spec.sizes), getattr(torch, spec.dtype)
    if spec.value is not None:
        return torch.tensor(spec.value, dtype=dtype).expand(shape)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if spec.high is not None:
        return torch.randint(spec.high, shape, generator=generator).to(dtype)
    if "position" in name:
        return torch.arange(shape[-1]).expand(shape).to(dtype).contiguous()
    return torch.ones(shape, dtype=dtype) if "mask" in name else torch.zeros(shape, dtype=dtype)


def _uneven(rows: Tensor, high: int | None, generator: torch.Generator) -> Tensor:
    """Return rows of which each is scaled by another factor, or has ids below another bound."""
    last = rows.movedim(0, -1)
    if rows.is_floating_point():
        return (last * torch.randn(len(rows), generator=generator).exp().to(rows.dtype)).movedim(-1, 0).contiguous()
    if high is None or high < 2:
        return rows
    bounds = torch.randint(1, high + 1, (len(rows),), generator=generator).to(rows.dtype)
    return (last % bounds).movedim(-1, 0).contiguous()


def _pack(batch: dict[str, Tensor], spec: Spec, generator: torch.Generator) -> None:
    """Replace the inputs that mark documents by those of the same random documents."""
    roles = {name: role_of(name, spec.data.inputs) for name in batch}
    sequences = [x.shape for name, x in batch.items() if x.dim() == 2 and roles[name] != "cu_seqlens"]
    if not sequences:
        return
    length, counts = sequences[0][1], [x.shape[1] for name, x in batch.items() if roles[name] == "cu_seqlens"]
    begins = torch.rand(sequences[0], generator=generator) < _BEGINS
    begins[:, 0] = True
    begins &= begins.cumsum(-1) < min([*counts, length + 2]) - 1
    marks = telling_values(begins, max([*counts, 0]))
    for name, role in roles.items():
        if role in marks:
            batch[name] = marks[role].to(batch[name].dtype)


def ignored_apart(decided: Plan) -> Mapping[str, int] | None:
    """Return key → ignored label for a plan that ends convolutions or scans with documents; None for any other plan."""
    is_changed = any(note.what.startswith(PACKED) for note in decided.diagnostics)
    return decided.to_run()[0].ignored_labels if is_changed else None


def each_document_alone(batch: Mapping[str, Tensor], spec: Spec, ignored: Mapping[str, int]) -> dict[str, Tensor]:
    """Return a batch with each document in its own row, filled up with tokens that the loss ignores."""
    begins = _begins(batch, spec)
    (sequences, starts), length = begins.nonzero().unbind(1), begins.shape[1]
    ends = torch.where(sequences[1:] == sequences[:-1], starts[1:], length)
    ends = torch.cat([ends, ends.new_tensor([length])])
    places = starts[:, None] + torch.arange(int((ends - starts).max()))
    of_tokens = sequences[:, None], places.clamp(max=length - 1)
    rows = {n: x[of_tokens if x.shape[:2] == begins.shape else sequences] for n, x in batch.items()}
    return rows | {n: rows[n].masked_fill(places >= ends[:, None], skipped) for n, skipped in ignored.items()}


def _begins(batch: Mapping[str, Tensor], spec: Spec) -> Tensor:
    begins = next(x for name, x in batch.items() if role_of(name, spec.data.inputs) == "positions") == 0
    begins[:, 0] = True
    return begins

"""Two forms of an input: the form that the model takes, as processors of images and audio make it, and rows.

    joined: true              [b·n, …]     ⇄  [b, n, …]      patches of all samples, concatenated
    batch_dim: 1              [3, b, s]    ⇄  [b, 3, s]
    value: [[1, 4, 4]]        [b, 1, 3]                      equal in every sample: known before any batch

The model gets the left form. All other code uses rows, one of every input for each sample: a batch becomes rows when it
arrives, and the captured graph makes the left form from them. An input with a value becomes a constant of the graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError

Forms = tuple[tuple[str, "Form"], ...]


@dataclass(frozen=True)
class Form:
    """The form of one input in the model. ``value``: the constant value of one sample."""

    joined: bool = False
    batch_dim: int = 0
    value: Any = None
    dtype: str = "int64"

    @cached_property
    def tensor(self) -> Tensor:
        return torch.tensor(self.value, dtype=getattr(torch, self.dtype))

    def given(self, rows: Tensor) -> Tensor:
        """Return the form that the model takes, from ``rows`` [samples, …]."""
        if self.value is not None:
            rows = torch.tensor(self.value, dtype=rows.dtype).repeat(len(rows), *[1] * (rows.dim() - 1))
        return rows.flatten(0, 1) if self.joined else rows.movedim(0, self.batch_dim).contiguous()

    def shape(self, size: int, of_sample: tuple[int, ...]) -> list[int]:
        """Return the shape of ``given`` for ``size`` samples of shape ``of_sample`` in rows."""
        if self.joined:
            return [size * of_sample[0], *of_sample[1:]]
        return [*of_sample[: self.batch_dim], size, *of_sample[self.batch_dim :]]


PLAIN = Form()


def forms_of(inputs: Mapping[str, Any], *, with_values: bool = True) -> Forms:
    """Return (name, form) of each of the spec's ``inputs`` that is not in rows in the model, or has a value."""
    forms = {n: Form(i.joined, i.batch_dim, i.value if with_values else None, i.dtype) for n, i in inputs.items()}
    return tuple(
        (name, form) for name, form in forms.items() if form.joined or form.batch_dim or form.value is not None
    )


def given_by(forms: Forms, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch in the model's form, from a batch in rows."""
    return {**rows, **{name: form.given(rows[name]) for name, form in forms if name in rows}}


def in_rows(forms: Forms, batch: Any, sizes: Mapping[str, tuple[int, ...]]) -> Any:
    """Return the batch in rows, from a batch in the model's form.

    Inputs that do not fit their form are left unchanged, for the later check of the batch to report. ``sizes``: the
    shapes of one sample, which give the number of samples if all inputs are joined.
    """
    if not forms or not isinstance(batch, Mapping):
        return batch
    rows, of = dict(batch), dict(forms)
    for name, form in forms:
        if isinstance(x := rows.get(name), Tensor) and form.batch_dim and x.dim() > form.batch_dim:
            rows[name] = x.movedim(form.batch_dim, 0)
    counts = [len(x) for n, x in rows.items() if isinstance(x, Tensor) and x.dim() and not of.get(n, PLAIN).joined]
    for name, form in forms:
        if isinstance(x := rows.get(name), Tensor) and form.joined and x.dim():
            count = counts[0] if counts else len(x) // sizes.get(name, (1,))[0]
            if count and not len(x) % count:
                rows[name] = x.reshape(count, -1, *x.shape[1:])
    return rows


def require_unchanged(forms: Forms, given: Mapping[str, Tensor], versions: Mapping[str, int]) -> None:
    """Raise PlanError if the model has written into an input with a value, which must be equal in every forward."""
    for name, form in forms:
        if form.value is not None and name in given and given[name]._version != versions[name]:
            raise PlanError(
                f"the model changes inputs.{name} in place, but this input has a constant value",
                where=f"inputs.{name}.value",
                fix=f"let the forward copy it first ({name} = {name}.clone()), or write its shape instead of a value",
            )

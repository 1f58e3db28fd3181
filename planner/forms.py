"""Inputs as processors of images and sounds make them, and in rows: for each sample one row of every input.

    joined: true              [b·n, …]     ⇄  [b, n, …]      patches of all samples, one after another
    batch_dim: 1              [3, b, s]    ⇄  [b, 3, s]
    value: [[1, 4, 4]]        [b, 1, 3]                      equal in every sample: known before any batch

A model gets the left form. Everything else has rows: a batch is in rows from its arrival on, and the captured graph
makes the left form from them, with the value of an input in place of the input.
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
    """Of one input. ``value``: of one sample."""

    joined: bool = False
    batch_dim: int = 0
    value: Any = None
    dtype: str = "int64"

    @cached_property
    def tensor(self) -> Tensor:
        return torch.tensor(self.value, dtype=getattr(torch, self.dtype))

    def given(self, rows: Tensor) -> Tensor:
        if self.value is not None:
            rows = torch.tensor(self.value, dtype=rows.dtype).repeat(len(rows), *[1] * (rows.dim() - 1))
        return rows.flatten(0, 1) if self.joined else rows.movedim(0, self.batch_dim).contiguous()

    def shape(self, size: int, of_sample: tuple[int, ...]) -> list[int]:
        """The shape of ``given`` for ``size`` samples."""
        if self.joined:
            return [size * of_sample[0], *of_sample[1:]]
        return [*of_sample[: self.batch_dim], size, *of_sample[self.batch_dim :]]


PLAIN = Form()


def forms_of(inputs: Mapping[str, Any], *, with_values: bool = True) -> Forms:
    """By name, of the ``inputs`` of a spec that have not one row for each sample, or have a value."""
    found = {n: Form(i.joined, i.batch_dim, i.value if with_values else None, i.dtype) for n, i in inputs.items()}
    return tuple(
        (name, form) for name, form in found.items() if form.joined or form.batch_dim or form.value is not None
    )


def given_by(forms: Forms, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch in rows as the model gets it."""
    return {**rows, **{name: form.given(rows[name]) for name, form in forms if name in rows}}


def in_rows(forms: Forms, batch: Any, sizes: Mapping[str, tuple[int, ...]]) -> Any:
    """A batch as the model gets it, in rows; inputs that cannot be so stay as they are, for the check of the batch.

    ``sizes``: the shapes of one sample, if all inputs may be joined.
    """
    if not forms or not isinstance(batch, Mapping):
        return batch
    made, of = dict(batch), dict(forms)
    for name, form in forms:
        if isinstance(x := made.get(name), Tensor) and form.batch_dim and x.dim() > form.batch_dim:
            made[name] = x.movedim(form.batch_dim, 0)
    counts = [len(x) for n, x in made.items() if isinstance(x, Tensor) and x.dim() and not of.get(n, PLAIN).joined]
    for name, form in forms:
        if isinstance(x := made.get(name), Tensor) and form.joined and x.dim():
            count = counts[0] if counts else len(x) // sizes.get(name, (1,))[0]
            if count and not len(x) % count:
                made[name] = x.reshape(count, -1, *x.shape[1:])
    return made


def require_unchanged(forms: Forms, given: Mapping[str, Tensor], versions: Mapping[str, int]) -> None:
    """Raise PlanError if the model has written into an input with a value, which must be equal in every forward."""
    for name, form in forms:
        if form.value is not None and name in given and given[name]._version != versions[name]:
            raise PlanError(
                f"the model changes inputs.{name} in place, which has a value",
                where=f"inputs.{name}.value",
                fix=f"let the forward copy it first ({name} = {name}.clone()), or give its shape in place of the value",
            )

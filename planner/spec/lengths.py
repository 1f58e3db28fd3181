"""Several lengths of a sequence in one spec: an input with a list for a dim of its shape.

    inputs: {input_ids: {shape: [[256, 512, 1024]]}, labels: {like: input_ids}}
    batch: {tokens: 32768, micro: 2}                       128 sequences of 256, 64 of 512, 32 of 1024 in a step

The numbers of all lists belong together: the first of each list, the second of each, …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from passes.errors import PlanError, SpecError
from planner.spec.sections import BatchSpec, InputSpec, sizes_of


def lists_of(inputs: Mapping[str, InputSpec]) -> dict[str, tuple[int, ...]]:
    """Dotted path of a shape → the lengths of its first dim that has several."""
    found = {}
    for name, given in inputs.items():
        several = [n for n in given.shape if isinstance(n, tuple)]
        if several:
            found[f"inputs.{name}.shape"] = several[0]
    return found


def lengths_of(inputs: Mapping[str, InputSpec]) -> tuple[int, ...]:
    """The lengths of a sequence, ascending; () if the inputs have one."""
    return next(iter(lists_of(inputs).values()), ())


def inputs_at(inputs: Mapping[str, InputSpec], place: int) -> dict[str, InputSpec]:
    """The inputs with the number at ``place`` of each list."""
    return {n: i.model_copy(update=_at(i, place, has_several=bool(lists_of(inputs)))) for n, i in inputs.items()}


def _at(given: InputSpec, place: int, *, has_several: bool) -> dict[str, Any]:
    if given.value is not None:
        return {"value": given.value[place] if has_several else given.value}
    return {"shape": tuple(n[place] if isinstance(n, tuple) else n for n in given.shape)}


def tokens_of(inputs: Mapping[str, InputSpec]) -> int:
    """Tokens of one sequence: elements of the first input of integers, or the first dim of the first input."""
    of_ids = [prod(i.sizes) for i in inputs.values() if "int" in i.dtype and i.shape]
    return (of_ids or [i.sizes[0] for i in inputs.values() if i.shape] or [1])[0]


def num_sequences(batch: BatchSpec, inputs: Mapping[str, InputSpec], dp: Any) -> int:
    """Sequences of a step, for inputs of one length: as many as ``batch.tokens`` has room for, or ``batch.global``."""
    if batch.tokens is None:
        return batch.global_size
    step = batch.micro * dp if isinstance(batch.micro, int) and isinstance(dp, int) else 1
    return batch.tokens // tokens_of(inputs) // step * step


def length_problems(inputs: Mapping[str, InputSpec]) -> Iterator[PlanError]:
    """Lists that do not belong together, or are not ascending."""
    lists = lists_of(inputs)
    for lengths, path in {lengths: path for path, lengths in reversed(lists.items())}.items():
        if list(lengths) != sorted(set(lengths)):
            fix = f"write {sorted(set(lengths))}"
            yield SpecError(f"{path} has the lengths {list(lengths)}, which do not ascend", where=path, fix=fix)
    for name, given in inputs.items():
        path = f"inputs.{name}.shape"
        if len({len(n) for n in given.shape if isinstance(n, tuple)}) > 1:
            yield SpecError(f"{path} has lists of different sizes", where=path, fix="give each dim as many lengths")
    sizes = {len(lengths) for lengths in lists.values()}
    for name, given in inputs.items():
        if sizes and given.value is not None and sizes_of(given.value)[:1] != (min(sizes),):
            path, what = f"inputs.{name}.value", "is no list with a value for each of the lengths of a sequence"
            yield SpecError(f"{path} {what}", where=path, fix=f"write a list of {min(sizes)} values")
    if len(sizes) > 1:
        told = ", ".join(f"{path} has {len(lengths)}" for path, lengths in lists.items())
        path = list(lists)[-1]
        yield SpecError(f"inputs have different numbers of lengths: {told}", where=path, fix="give all as many")


def batch_problems(batch: BatchSpec, inputs: Mapping[str, InputSpec], dp: Any) -> Iterator[PlanError]:
    """``batch.tokens`` that no step of some length can have."""
    if batch.tokens is None:
        if not batch.global_size:
            yield SpecError("batch.global is missing", where="batch.global", fix="add `global: 16`")
        return
    longest = num_sequences(batch, inputs_at(inputs, -1), dp) if inputs else 0
    if batch.global_size not in (0, longest):
        what = f"batch.global = {batch.global_size}, but batch.tokens = {batch.tokens} makes {longest} sequences a step"
        yield SpecError(what, where="batch.global", fix="remove one of them")
        return
    if not inputs:
        fix = "add `inputs`, or set batch.global instead"
        yield SpecError("batch.tokens counts tokens of inputs, and the spec has none", where="batch.tokens", fix=fix)
        return
    for place in range(max(1, len(lengths_of(inputs)))):
        of_length = inputs_at(inputs, place)
        if not num_sequences(batch, of_length, dp):
            step = f"batch.micro · mesh.dp = {batch.micro} · {dp} sequences" if isinstance(dp, int) else "a sequence"
            yield SpecError(
                f"batch.tokens = {batch.tokens} is less than {step} of {tokens_of(of_length)} tokens",
                where="batch.tokens",
                fix="raise batch.tokens, or lower batch.micro or mesh.dp",
            )
            return

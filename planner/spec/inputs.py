"""The inputs of a spec: keys that one takes from another, and several lengths of a sequence.

``like``: an input takes missing keys from another one; the nearest that has a key wins.

Lengths: an input with a list for a dim of its shape. The numbers of all lists belong together: the first of each list,
the second of each, …

    inputs: {input_ids: {shape: [[256, 512, 1024]]}, labels: {like: input_ids}}
    batch: {tokens: 32768, micro: 2}                       128 sequences of 256, 64 of 512, 32 of 1024 in a step

The sections ``data`` and ``audit``, on which no plan depends, and the roles of inputs, for batches made of a text.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from passes.errors import PlanError, SpecError
from planner.spec.fields import (
    MOST_DIMS,
    MOST_INPUTS,
    MOST_LENGTHS,
    Count,
    Dtype,
    Flag,
    Fraction,
    Name,
    Positive,
    Section,
    Size,
    Word,
    key,
    optional_by_like,
)
from planner.spec.messages import wrong
from planner.spec.sections import BatchSpec

Lengths = Annotated[tuple[Size, ...], Field(min_length=1, max_length=MOST_LENGTHS)]


def _nested(value: Any) -> Any:
    return tuple(map(_nested, value)) if isinstance(value, (list, tuple)) else value


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return the shape of nested tuples of numbers. Raises ValueError if they have none."""
    if not isinstance(value, tuple):
        if not isinstance(value, (int, float)):
            raise ValueError(f"{value!r} is no number")
        return ()
    sizes = {sizes_of(inner) for inner in value}
    if len(sizes) != 1:
        raise ValueError("it has lists that are empty, or of different sizes")
    return len(value), *sizes.pop()


Value = Annotated[tuple[Any, ...], Field(min_length=1), BeforeValidator(_nested)]


class InputSpec(Section):
    """One tensor of the batch. A Spec fills in the keys that it takes from the input that it is ``like``."""

    shape: Annotated[tuple[Size | Lengths, ...], Field(max_length=MOST_DIMS)] = optional_by_like(
        (), "without the batch dim; required, unless like another input; a list for a dim of several lengths"
    )
    dtype: Dtype = optional_by_like("int64", "of the tensor; required, unless like another input")
    high: Size | None = key(None, "integers of the input are smaller than this")
    joined: Flag = key(False, "samples lie one after another: shape [n, …] of one sample is [b · n, …] of a batch")
    batch_dim: Count = key(0, "the dim of the batch in the tensor of a batch")
    value: Value | None = key(
        None, "in place of shape and high: the value of every sample; of several lengths a list of such values"
    )
    like: Name | None = key(None, "another input, which gives the keys that are missing here")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return ``shape``, or that of ``value``, of an input of one length."""
        if self.value is not None:
            return sizes_of(self.value)
        found = tuple(n for n in self.shape if isinstance(n, int))
        assert len(found) == len(self.shape), "one of several lengths is to be chosen first"
        return found


def resolve_like(given: dict[str, InputSpec]) -> dict[str, InputSpec]:
    """Return the inputs with every value filled in. Raises SpecError with all their errors."""
    errors = [error for name in given for error in _chain_errors(given, name)]
    if not errors:
        given = {name: _filled(given, name) for name in given}
        errors = [error for name in given for error in _value_errors(given[name], f"inputs.{name}")]
    if errors:
        raise SpecError.of(errors)
    return given


def _chain(given: dict[str, InputSpec], name: str) -> list[str]:
    """Return ``name``, the input that it is like, …; end before a name that is unknown or occurs again."""
    chain = [name]
    while (like := given[chain[-1]].like) in given and like not in chain:
        chain.append(like)
    return chain


def _chain_errors(given: dict[str, InputSpec], name: str) -> Iterator[PlanError]:
    at, like = f"inputs.{name}.like", given[name].like
    if like is not None and like not in given:
        yield wrong(at, f" names no input: '{like}'", f"name one of the inputs: {', '.join(given)}")
    elif name == given[_chain(given, name)[-1]].like:
        yield wrong(at, ": the inputs refer to each other in a circle", "give one of them a shape and a dtype")


def _filled(given: dict[str, InputSpec], name: str) -> InputSpec:
    chain = _chain(given, name)
    values = {key: getattr(given[n], key) for n in reversed(chain) for key in sorted(given[n].model_fields_set)}
    return InputSpec(**{**values, "like": given[name].like})


def _value_errors(tensor: InputSpec, at: str) -> Iterator[PlanError]:
    has_value = tensor.value is not None
    for name, example in (("shape", "shape: [1024]"), ("dtype", "dtype: int64")):
        if name not in tensor.model_fields_set and not has_value:
            yield wrong(f"{at}.{name}", " is missing", f"add `{example}`")
    if tensor.high is not None and (tensor.dtype == "bool" or "float" in tensor.dtype):
        fix = "remove `high`, or choose an integer dtype"
        yield wrong(f"{at}.high", f" is for integers, not {tensor.dtype}", fix)
    yield from _form_errors(tensor, at)


def _form_errors(tensor: InputSpec, at: str) -> Iterator[PlanError]:
    """Yield keys of the form of an input that exclude each other."""
    has_value = tensor.value is not None
    try:
        sizes = sizes_of(tensor.value) if has_value else tensor.shape
    except ValueError as error:
        fix = "write a list of numbers, or of such lists: [[1, 16, 16]]"
        yield wrong(f"{at}.value", f" is no tensor: {error}", fix)
        return
    for name in ("shape", "high"):
        if has_value and getattr(tensor, name):
            yield SpecError(f"{at} has a value and a {name}", where=f"{at}.{name}", fix=f"remove {name}")
    if tensor.joined and tensor.batch_dim:
        yield SpecError(f"{at} is joined, and has a batch_dim", where=f"{at}.batch_dim", fix="remove one of them")
    if tensor.joined and not sizes:
        yield SpecError(f"{at} is joined, and a sample has no dim", where=f"{at}.joined", fix="give a shape [n, …]")
    if tensor.batch_dim > len(sizes):
        what = f" is {tensor.batch_dim}, and the tensor of a batch has dims 0 to {len(sizes)}"
        yield wrong(f"{at}.batch_dim", what, f"set it to {len(sizes)} or less")
    if has_value and "float" not in tensor.dtype and "." in str(tensor.value):
        yield wrong(f"{at}.value", f" has fractions, and dtype {tensor.dtype}", "add `dtype: float32`")


def lists_of(inputs: Mapping[str, InputSpec]) -> dict[str, tuple[int, ...]]:
    """Return dotted path of a shape → the lengths of its first dim that has several."""
    found = {}
    for name, given in inputs.items():
        several = [n for n in given.shape if isinstance(n, tuple)]
        if several:
            found[f"inputs.{name}.shape"] = several[0]
    return found


def lengths_of(inputs: Mapping[str, InputSpec]) -> tuple[int, ...]:
    """Return the lengths of a sequence, ascending; () if the inputs have one."""
    return next(iter(lists_of(inputs).values()), ())


def inputs_at(inputs: Mapping[str, InputSpec], place: int) -> dict[str, InputSpec]:
    """Return the inputs with the number at ``place`` of each list."""
    return {n: i.model_copy(update=_at_place(i, place, has_several=bool(lists_of(inputs)))) for n, i in inputs.items()}


def _at_place(given: InputSpec, place: int, *, has_several: bool) -> dict[str, Any]:
    if given.value is not None:
        return {"value": given.value[place] if has_several else given.value}
    return {"shape": tuple(n[place] if isinstance(n, tuple) else n for n in given.shape)}


def tokens_of(inputs: Mapping[str, InputSpec]) -> int:
    """Return tokens of one sequence: elements of the first integer input, or the first dim of the first input."""
    of_ids = [prod(i.sizes) for i in inputs.values() if "int" in i.dtype and i.shape]
    return (of_ids or [i.sizes[0] for i in inputs.values() if i.shape] or [1])[0]


def num_sequences(batch: BatchSpec, inputs: Mapping[str, InputSpec], dp: Any) -> int:
    """Return sequences of a step at one length: as many as fit into ``batch.tokens``, or ``batch.global``."""
    if batch.tokens is None:
        return batch.global_size
    step = batch.micro * dp if isinstance(batch.micro, int) and isinstance(dp, int) else 1
    return batch.tokens // tokens_of(inputs) // step * step


def length_problems(inputs: Mapping[str, InputSpec]) -> Iterator[PlanError]:
    """Yield lists of different sizes, or that do not ascend."""
    lists = lists_of(inputs)
    for lengths, path in {lengths: path for path, lengths in reversed(lists.items())}.items():
        if list(lengths) != sorted(set(lengths)):
            what = f" has the lengths {list(lengths)}, which do not ascend"
            yield wrong(path, what, f"write {sorted(set(lengths))}")
    for name, given in inputs.items():
        if len({len(n) for n in given.shape if isinstance(n, tuple)}) > 1:
            yield wrong(f"inputs.{name}.shape", " has lists of different sizes", "give each dim as many lengths")
    sizes = {len(lengths) for lengths in lists.values()}
    for name, given in inputs.items():
        if sizes and given.value is not None and sizes_of(given.value)[:1] != (min(sizes),):
            what = " is no list with a value for each of the lengths of a sequence"
            yield wrong(f"inputs.{name}.value", what, f"write a list of {min(sizes)} values")
    if len(sizes) > 1:
        told = ", ".join(f"{path} has {len(lengths)}" for path, lengths in lists.items())
        path = list(lists)[-1]
        yield SpecError(f"inputs have different numbers of lengths: {told}", where=path, fix="give all as many")


def batch_problems(batch: BatchSpec, inputs: Mapping[str, InputSpec], dp: Any) -> Iterator[PlanError]:
    """Yield values of ``batch.tokens`` that are too small for a step of some length."""
    if batch.tokens is None:
        if not batch.global_size:
            yield wrong("batch.global", " is missing", "add `global: 16`")
        return
    longest = num_sequences(batch, inputs_at(inputs, -1), dp) if inputs else 0
    if batch.global_size not in (0, longest):
        what = f" = {batch.global_size}, but batch.tokens = {batch.tokens} makes {longest} sequences a step"
        yield wrong("batch.global", what, "remove one of them")
        return
    if not inputs:
        what = " counts tokens of inputs, and the spec has none"
        yield wrong("batch.tokens", what, "add `inputs`, or set batch.global instead")
        return
    for place in range(max(1, len(lengths_of(inputs)))):
        of_length = inputs_at(inputs, place)
        if not num_sequences(batch, of_length, dp):
            step = f"batch.micro · mesh.dp = {batch.micro} · {dp} sequences" if isinstance(dp, int) else "a sequence"
            what = f" = {batch.tokens} is less than {step} of {tokens_of(of_length)} tokens"
            yield wrong("batch.tokens", what, "raise batch.tokens, or lower batch.micro or mesh.dp")
            return


Role = Literal[
    "tokens",
    "next_tokens",
    "labels",
    "attention_mask",
    "segments",
    "positions",
    "documents",
    "document_mask",
    "cu_seqlens",
    "sentence_order",
]
ROLES: tuple[str, ...] = get_args(Role)
_LONGEST_NGRAM = 64
NAMES = {
    "input_ids": "tokens",
    "token_ids": "tokens",
    "ids": "tokens",
    "tokens": "tokens",
    "idx": "tokens",
    "x": "tokens",
    "targets": "next_tokens",
    "y": "next_tokens",
    "labels": "labels",
    "attention_mask": "attention_mask",
    "token_type_ids": "segments",
    "segment_ids": "segments",
    "position_ids": "positions",
    "document_ids": "documents",
    "doc_ids": "documents",
    "document_mask": "document_mask",
    "cu_seqlens": "cu_seqlens",
    "next_sentence_label": "sentence_order",
    "sentence_order_label": "sentence_order",
}
TELLING = ("documents", "positions", "document_mask", "cu_seqlens")  # by them a model keeps documents apart


class MaskSpec(Section):
    share: Fraction = key(0.15, "share of tokens that the model predicts")
    ngram: Annotated[Size, Field(le=_LONGEST_NGRAM)] = key(
        3, "maximum number of consecutive whole words that are masked together"
    )


class DataSpec(Section):
    objective: Literal["next_token", "masked"] = key("next_token", "next_token | masked")
    packing: Flag | Annotated[Literal["documents"], Word] = key(
        True,
        "for next_token: true: sequences run on over the ends of documents; documents: whole documents, each attending "
        "to itself alone; false: one document each, padded",
    )
    overlong: Annotated[Literal["cut", "drop", "refuse"], Word] = key(
        "cut",
        "for packing: documents or false, what happens to documents longer than a sequence: cut | drop | refuse; of "
        "samples with labels, cut takes away context first",
    )
    mean_document: Size | None = key(
        None,
        "for packing: documents, tokens of a token's document on average, for the predicted memory and time; null: all",
    )
    validation: Fraction = key(0.0, "share of the text, at its end, held out for validation")
    mixture: Annotated[dict[Name, Positive], Field(max_length=MOST_INPUTS)] = key(
        {}, "texts with their shares, used without --data: {a.tokens: 0.7, b.tokens: 0.3}"
    )
    inputs: Annotated[dict[Name, Annotated[Role, Word]], Field(max_length=MOST_INPUTS)] = key(
        {}, f"roles of inputs that their names do not imply: {' | '.join(ROLES)}"
    )
    mask: MaskSpec = key(MaskSpec(), "masking, for objective: masked")

    def problems(self) -> Iterator[PlanError]:
        if self.packing == "documents" and self.objective != "next_token":
            what = f"packing: documents is for objective: next_token, and the objective is {self.objective}"
            yield PlanError(what, where="packing", fix="remove packing: a sample of masked words is of one document")
        if self.mean_document is not None and self.packing != "documents":
            fix = "set packing: documents, or remove mean_document"
            yield PlanError("mean_document is for packing: documents", where="mean_document", fix=fix)


class AuditSpec(Section):
    every: Size | None = key(
        None, "every N-th step, the loss of one microbatch is compared with the model itself; null: never"
    )
    on_difference: Literal["stop", "warn"] = key("stop", "stop | warn")
    tolerance: Positive | None = key(
        None, "relative; null: depends on the lowest precision in the computation of the model"
    )


def role_of(name: str, given: Mapping[str, str]) -> str | None:
    """Return the role of an input; None if it is unknown. ``given``: the spec's ``data.inputs``."""
    return given.get(name) or NAMES.get(name)

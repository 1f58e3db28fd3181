"""``like``: an input takes missing keys from another one; the nearest that has a key wins."""

from __future__ import annotations

from collections.abc import Iterator

from passes.errors import PlanError, SpecError
from planner.spec.sections import InputSpec, sizes_of


def resolve_like(given: dict[str, InputSpec]) -> dict[str, InputSpec]:
    """The inputs with every value filled in. Raises SpecError for all that is wrong with them."""
    errors = [error for name in given for error in _chain_errors(given, name)]
    if not errors:
        given = {name: _filled(given, name) for name in given}
        errors = [error for name in given for error in _value_errors(given[name], f"inputs.{name}")]
    if errors:
        raise SpecError.of(errors)
    return given


def _chain(given: dict[str, InputSpec], name: str) -> list[str]:
    """``name``, the input that it is like, …; ends before a name that is unknown or comes again."""
    chain = [name]
    while (like := given[chain[-1]].like) in given and like not in chain:
        chain.append(like)
    return chain


def _chain_errors(given: dict[str, InputSpec], name: str) -> Iterator[PlanError]:
    at, like = f"inputs.{name}.like", given[name].like
    if like is not None and like not in given:
        fix = f"name one of the inputs: {', '.join(given)}"
        yield SpecError(f"{at} names no input: '{like}'", where=at, fix=fix)
    elif name == given[_chain(given, name)[-1]].like:
        fix = "give one of them a shape and a dtype"
        yield SpecError(f"{at}: the inputs refer to each other in a circle", where=at, fix=fix)


def _filled(given: dict[str, InputSpec], name: str) -> InputSpec:
    chain = _chain(given, name)
    values = {key: getattr(given[n], key) for n in reversed(chain) for key in sorted(given[n].model_fields_set)}
    return InputSpec(**{**values, "like": given[name].like})


def _value_errors(tensor: InputSpec, at: str) -> Iterator[PlanError]:
    has_value = tensor.value is not None
    for key, example in (("shape", "shape: [1024]"), ("dtype", "dtype: int64")):
        if key not in tensor.model_fields_set and not has_value:
            yield SpecError(f"{at}.{key} is missing", where=f"{at}.{key}", fix=f"add `{example}`")
    if tensor.high is not None and (tensor.dtype == "bool" or "float" in tensor.dtype):
        fix = "remove `high`, or choose an integer dtype"
        yield SpecError(f"{at}.high is for integers, not {tensor.dtype}", where=f"{at}.high", fix=fix)
    yield from _form_errors(tensor, at)


def _form_errors(tensor: InputSpec, at: str) -> Iterator[PlanError]:
    """Keys of the form of an input that exclude each other."""
    has_value = tensor.value is not None
    try:
        sizes = sizes_of(tensor.value) if has_value else tensor.shape
    except ValueError as error:
        fix = "write a list of numbers, or of such lists: [[1, 16, 16]]"
        yield SpecError(f"{at}.value is no tensor: {error}", where=f"{at}.value", fix=fix)
        return
    for key in ("shape", "high"):
        if has_value and getattr(tensor, key):
            yield SpecError(f"{at} has a value and a {key}", where=f"{at}.{key}", fix=f"remove {key}")
    if tensor.joined and tensor.batch_dim:
        yield SpecError(f"{at} is joined, and has a batch_dim", where=f"{at}.batch_dim", fix="remove one of them")
    if tensor.joined and not sizes:
        yield SpecError(f"{at} is joined, and a sample has no dim", where=f"{at}.joined", fix="give a shape [n, …]")
    if tensor.batch_dim > len(sizes):
        what = f"{at}.batch_dim is {tensor.batch_dim}, and the tensor of a batch has dims 0 to {len(sizes)}"
        yield SpecError(what, where=f"{at}.batch_dim", fix=f"set it to {len(sizes)} or less")
    if has_value and "float" not in tensor.dtype and "." in str(tensor.value):
        what = f"{at}.value has fractions, and dtype {tensor.dtype}"
        yield SpecError(what, where=f"{at}.value", fix="add `dtype: float32`")

"""``like``: an input takes missing keys from another one; the nearest that has a key wins."""

from __future__ import annotations

from collections.abc import Iterator

from passes.errors import PlanError, SpecError
from planner.spec.sections import InputSpec


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
    for key, example in (("shape", "shape: [1024]"), ("dtype", "dtype: int64")):
        if key not in tensor.model_fields_set:
            yield SpecError(f"{at}.{key} is missing", where=f"{at}.{key}", fix=f"add `{example}`")
    if tensor.high is not None and (tensor.dtype == "bool" or "float" in tensor.dtype):
        fix = "remove `high`, or choose an integer dtype"
        yield SpecError(f"{at}.high is for integers, not {tensor.dtype}", where=f"{at}.high", fix=fix)

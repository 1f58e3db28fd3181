"""In which operands a call is linear, as sets of operands that are added up together: f(a + b) = f(a) + f(b).

add(x, y)       {x, y}             mul(x, y)    {x}, {y}            where(m, x, 0)    {x}
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch

from passes.program.ops.aten import has_gradient, packets, tensors_of
from passes.program.ops.sequence import gather_sequence, local_rows, sum_over_ranks
from passes.rules.rule import Call

Sets = tuple[frozenset[int], ...]


def everywhere(call: Call) -> Sets:
    return (frozenset(range(len(call.operands))),)


def first(call: Call) -> Sets:
    return (frozenset({0}),)


def sums(call: Call) -> Sets:
    """Take both of two tensors: a number would be added once for each part."""
    return everywhere(call) if len(call.operands) == 2 else ()


def factors(call: Call) -> Sets:
    """Return each operand as a set of its own, while the others stay: not of x · x."""
    if len(set(call.operands)) < len(call.operands):
        return ()
    return tuple(frozenset({i}) for i in range(len(call.operands)))


def cast(call: Call) -> Sets:
    """Not of floats to integers, which are rounded, and to bools."""
    before, after = (next(tensors_of(n)).dtype for n in (call.operands[0], call.node))
    return first(call) if has_gradient(after) or not (before.is_floating_point or after == torch.bool) else ()


def masked(call: Call) -> Sets:
    """where(mask, x, 0) and where(mask, 0, x)."""
    numbers = [call.given.get(name) for name in ("self", "other")]
    return (frozenset({1}),) if 0 in [n for n in numbers if isinstance(n, (int, float))] else ()


def of(*names: str) -> Callable[[Call], Sets]:
    """Return the arguments of these names together: not an index beside them."""
    return lambda call: (frozenset(p for name in names if (p := call.position(name)) is not None),)


def scattered(call: Call) -> Sets:
    """Take rows of a tensor too, added or in place of others."""
    reduces = call.given.get("reduce") is not None
    return of("self", "src")(call) if call.position("src") is not None and not reduces else ()


def zero_padded(call: Call) -> Sets:
    return first(call) if not call.given.get("value") and call.given.get("mode", "constant") == "constant" else ()


LINEAR: dict[Any, Callable[[Call], Sets]] = (
    packets("add sub subtract rsub", sums)
    | packets("mul multiply", factors)
    | packets("div divide true_divide", lambda call: () if call.given.get("rounding_mode") else factors(call)[:1])
    | packets("mm bmm matmul mv dot einsum", factors)
    | packets("linear", lambda call: factors(call) if len(call.operands) == 2 else ())  # without a bias
    | packets("_grouped_mm", lambda call: factors(call)[:2])
    | packets("where", masked)
    | packets("to _to_copy", cast)
    | packets("neg contiguous clone dropout detach alias", first)
    | packets("view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand", first)
    | packets("permute transpose t movedim slice select split_with_sizes unfold", first)
    | packets("view_as_complex view_as_real cumsum flip roll diff tril triu diagonal sum mean", first)
    | packets("index_select gather index split chunk unbind", first)
    | dict.fromkeys((gather_sequence, local_rows, sum_over_ranks, getitem), first)
    | packets("cat stack", everywhere)
    | packets("scatter scatter_add", scattered)
    | packets("index_add index_copy", of("self", "source"))
    | packets("index_put", of("self", "values"))
    | packets("pad constant_pad_nd", zero_padded)
)


def linear_in(call: Call, packet: Any) -> Sets:
    """Return the operands, by position; empty if the op is linear in none."""
    found = LINEAR.get(packet)
    return found(call) if found is not None else ()

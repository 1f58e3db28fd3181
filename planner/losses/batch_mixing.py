"""Find where the sequences of a batch see each other: there a microbatch cannot compute what the global batch would.

    x − x.mean(0)        statistics over the batch            z @ z.T              each sequence with each other
    softmax, cumsum …    along the batch                      x[: n // 2], flip    one half against the other
    a user's own backward that does not work sequence by sequence, or (on weights alone) is not linear

Whether a dim holds the batch is known from two captures (planner.losses.batch_dims). The second costs as much as the
first, so it is asked for only where an op could do one of these; a sum over the features, as of a norm, could not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import fx

from planner.canonical.emit import named
from planner.gradients.own_backward import OwnBackward
from planner.losses.batch_dims import BatchDims
from planner.losses.counts import reduced_dims, reduces_batch
from planner.rules.base import adds_up

ALONG = {"softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort",
         "topk", "flip", "roll", "slice", "split_with_sizes", "narrow"}  # fmt: skip
PRODUCTS = {"mm", "matmul", "bmm", "einsum", "linear"}


def mixing_nodes(graph: fx.Graph, on_batch: Collection[fx.Node], loss_terms: Collection[fx.Node],
                 where_batch_stands: Callable[[], BatchDims | None]) -> list[fx.Node]:
    """Calls with a gradient that mix the sequences of a batch, other than the sums and means that make the loss.

    ``where_batch_stands`` is called at most once, and only for a graph that leaves a doubt; what it cannot say (None,
    or a node that it does not know) is not claimed.
    """
    inner = [n for n in graph.nodes if n in on_batch and n not in loss_terms and _has_gradient(n)]
    inner = [n for n in inner if not (isinstance(n.target, OwnBackward) and _is_loss_term(n, loss_terms))]
    doubtful = [n for n in inner if _may_mix(n, on_batch)]
    known = where_batch_stands() if doubtful else None
    mixing = {n for n in doubtful if known is not None and _mixes(n, known)}
    mixing |= {n for n in graph.nodes if n not in on_batch and _has_gradient(n) and not adds_up(n)}
    return [n for n in graph.nodes if n in mixing]


def _has_gradient(node: fx.Node) -> bool:
    return node.op == "call_function" and any(n.meta.get("grad") for n in node.all_input_nodes)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def _may_mix(node: fx.Node, on_batch: Collection[fx.Node]) -> bool:
    """Told by the op alone: cheap, and true of few ops of a Transformer."""
    if isinstance(node.target, OwnBackward):
        return not _works_by_sequence(node.target, [{0} if n in on_batch else set() for n in node.args])
    if _name(node) in ALONG:
        return 0 in _dims_along(node)
    if _name(node) in PRODUCTS:
        return all(n in on_batch for n in node.all_input_nodes) and not _is_batched(node)
    return reduces_batch(node) and 0 in reduced_dims(node)


def _is_loss_term(node: fx.Node, others: Collection[fx.Node]) -> bool:
    value = node.meta["val"]
    is_number = not isinstance(value, (tuple, list)) and value.dim() == 0
    return is_number and any(user.op == "output" or user in others for user in node.users)


def _works_by_sequence(call: OwnBackward, batch_dims: Sequence[Collection[int]]) -> bool:
    """Whether it was shown to work part by part along the dims that hold the batch."""
    return any(
        all(dim in dims if dims else dim is None for dim, dims in zip(cut.inputs, batch_dims, strict=True))
        for cut in call.facts.cuts
    )


def _is_batched(node: fx.Node) -> bool:
    """A product of operands of three or more dims, of which the first stays a dim of its own."""
    if _name(node) == "einsum":
        words, _, result = str(node.args[0]).partition("->")
        return all(word[:1] == result[:1] for word in words.split(","))
    return all(n.meta["val"].dim() > 2 for n in node.all_input_nodes)


def _dims_along(node: fx.Node) -> frozenset[int]:
    """The dims that an op runs along."""
    given = named(node, list(node.args), dict(node.kwargs))
    dims = given.get("dim", given.get("dims", 0))
    ndim = max(1, node.all_input_nodes[0].meta["val"].dim())
    return frozenset(int(d) % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def _mixes(node: fx.Node, known: BatchDims) -> bool:
    inputs = [known.dims.get(n.name) for n in node.all_input_nodes]
    if any(dims is None for dims in inputs):
        return False
    if isinstance(node.target, OwnBackward):
        return not _works_by_sequence(node.target, [known.dims[n.name] for n in node.args])  # pyright: ignore
    held = [dims for dims in inputs if dims]
    if _name(node) in PRODUCTS:
        made = known.dims.get(node.name)
        return made is not None and len(made) != 1 and bool(held)
    along = _dims_along(node) if _name(node) in ALONG else reduced_dims(node)
    return bool(held) and not along.isdisjoint(held[0])

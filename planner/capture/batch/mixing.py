"""Find ops that mix the sequences of a batch: there a microbatch cannot compute the values of the global batch.

    x − x.mean(0)        statistics over the batch            z @ z.T              each sequence with each other
    softmax, cumsum …    along the batch                      x[: n // 2], flip    one half against the other
    a user's own backward that does not work sequence by sequence, or (on weights alone) is not linear

Whether a dim holds the batch is known from two captures (capture.batch.two_captures). The second costs as much as the
first, so it is made only if an op could do one of these; a sum over the features, as of a norm, could not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import fx

from planner.capture.loss.counts import input_only, reduces_batch
from planner.graph.ops.aten import named, reduced_dims
from planner.graph.ops.own_backward import OwnBackward
from planner.graph.ops.spatial import dims_of_image, is_spatial
from planner.graph.program import Program
from planner.graph.walks import operands, walk

ALONG = {"softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort",
         "topk", "flip", "roll", "slice", "split_with_sizes", "narrow", "cummax", "cummin", "diff", "_safe_softmax",
         "kthvalue", "mode", "quantile", "nanquantile", "nanmedian", "msort", "renorm", "index_select",
         "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft"}  # fmt: skip
PRODUCTS = {"mm", "matmul", "bmm", "einsum", "linear"}

BatchDims = Callable[[fx.Node], frozenset[int] | None]  # the dims of a value that hold the batch, if known


def has_gradient(node: fx.Node) -> bool:
    return node.op == "call_function" and any(n.meta.get("grad") or n.meta.get("stopped") for n in node.all_input_nodes)


def computed_along(program: Program, on_batch: Collection[fx.Node], loss: Collection[fx.Node]) -> list[fx.Node]:
    """Values computed from the batch outside of ``loss`` that affect gradients: those with a gradient, and their inputs
    made of batch tensors alone, such as a maximum over the ids that scales an embedding.
    """
    given, inner = input_only(program), [n for n in program.graph.graph.nodes if n in on_batch and n not in loss]
    with_gradient = {n for n in inner if has_gradient(n)}
    read = {n for reader in with_gradient for n in reader.all_input_nodes if given.get(n.name)}
    of_inputs = set(walk(read, operands, into=lambda n: bool(given.get(n.name))))
    return [n for n in inner if n in with_gradient or (n in of_inputs and n.op == "call_function")]


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def may_mix(node: fx.Node, on_batch: Collection[fx.Node]) -> bool:
    """Decided by the op alone: cheap, and true of few ops of a Transformer."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, OwnBackward):
        return not _works_by_sequence(node.target, [{0} if n in on_batch else set() for n in node.args])
    if _runs_along_dims(node):
        return 0 in dims_along(node)
    if _name(node) in PRODUCTS:
        return all(n in on_batch for n in node.all_input_nodes) and not _is_batched(node)
    return reduces_batch(node) and 0 in reduced_dims(node)


def _runs_along_dims(node: fx.Node) -> bool:
    return _name(node) in ALONG or is_spatial(node)


def is_own_loss(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether a user's own backward makes a term of the loss, which is reported as one."""
    value = node.meta["val"]
    if not isinstance(node.target, OwnBackward):
        return False
    is_number = not isinstance(value, (tuple, list)) and value.dim() == 0
    return is_number and any(user.op == "output" or user in others for user in node.users)


def _works_by_sequence(call: OwnBackward, batch_dims: Sequence[Collection[int]]) -> bool:
    """Whether it was shown to work part by part along the dims that hold the batch."""
    return any(
        all(dim in dims if dims else dim is None for dim, dims in zip(cut.inputs, batch_dims, strict=True))
        for cut in call.facts.cuts
    )


def _is_batched(node: fx.Node) -> bool:
    """A product of operands of three or more dims that keeps the first as a batch dim."""
    if _name(node) == "einsum":
        words, _, result = str(node.args[0]).partition("->")
        return all(word[:1] == result[:1] for word in words.split(","))
    return all(n.meta["val"].dim() > 2 for n in node.all_input_nodes)


def dims_along(node: fx.Node) -> frozenset[int]:
    """The dims that an op runs along."""
    if is_spatial(node):
        return dims_of_image(node)
    given = named(node)
    dims = given.get("dim", given.get("dims", 0))
    ndim = max(1, node.all_input_nodes[0].meta["val"].dim())
    if dims is None:
        return frozenset(range(ndim))
    return frozenset(int(d) % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def mixes_along_a_dim(node: fx.Node) -> bool:
    """Whether an op makes one value of all that lie along a dim: then it matters which dim holds the batch."""
    is_cut = _name(node) in ("slice", "split_with_sizes", "narrow")
    return node.op == "call_function" and not is_cut and (_runs_along_dims(node) or reduces_batch(node))


def may_run_along(node: fx.Node, flow: Mapping[fx.Node, frozenset[int] | None]) -> bool:
    """Of an op that may mix: whether a dim that it runs along may hold the batch (planner.capture.batch.flow)."""
    held = [flow.get(n) for n in node.all_input_nodes]
    if isinstance(node.target, OwnBackward) or _name(node) in PRODUCTS or any(dims is None for dims in held):
        return True
    along = dims_along(node) if _runs_along_dims(node) else reduced_dims(node)
    return any(not along.isdisjoint(dims) for dims in held if dims)


def mixes(node: fx.Node, dims_of: BatchDims) -> bool:
    """Whether an op that may mix does: it runs along the batch. False if that is unknown."""
    inputs = [dims_of(n) for n in node.all_input_nodes]
    if any(dims is None for dims in inputs):
        return False
    if isinstance(node.target, OwnBackward):
        return not _works_by_sequence(node.target, [dims_of(n) or set() for n in node.args])  # pyright: ignore
    held = [dims for dims in inputs if dims]
    if _name(node) in PRODUCTS:
        made = dims_of(node)
        return made is not None and len(made) != 1 and bool(held)
    if not _runs_along_dims(node) and not reduces_batch(node):
        return False
    along = dims_along(node) if _runs_along_dims(node) else reduced_dims(node)
    return bool(held) and not along.isdisjoint(held[0])

"""The kernels of one call of a stage, forward and backward: products and bytes moved, at the shapes of one rank.

linear      forward  x W         one product [m, k] · [k, n]
            backward g Wᵀ, xᵀ g  one for each operand with a gradient; a sum for the bias
attention   forward 2 products, backward 5: scores are recomputed (Dao et al. 2022, "FlashAttention")
others      bytes: forward operands and results; backward incoming gradients, saved tensors, and each new gradient
a view      nothing
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import Any

from torch import fx

from passes.ops.documents import attention_by_documents
from passes.ops.meeting import grouped_linear
from passes.own_linears import PRODUCTS
from passes.program.ops.aten import arguments, aten, packet_of
from passes.program.ops.groups import ATTENTION, CONVOLUTIONS, LOOKUPS, WITH_WEIGHT
from passes.program.ops.sequence import causal_attention, gathered_attention
from passes.rules.flops import has_flops, multiplied, node_flops
from planner.cost.cut.units import OF_FIRST, OF_SECOND, CallOps, Op, Sides, Size, together
from planner.trace.observe import Like
from planner.trace.trace import StageTrace, TraceCall

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # of attention: its backward recomputes the scores


def touched(like: Like) -> int:
    """Return the bytes that a reader of a full value reads: elements of an expanded dim count once."""
    return like.dtype.itemsize * prod(n for n, stride in zip(like.shape, like.strides, strict=True) if stride or not n)


def factors_of(call: TraceCall, node: fx.Node) -> list[int]:
    """Return the numbers of the values that a product multiplies; in lowered linears they come first."""
    first, last = (0, 1) if call.node.target in PRODUCTS else multiplied(node.target) or (0, 1)
    return list(call.operands[first : last + 1])


def puts_aside(trace: StageTrace, call: TraceCall) -> bool:
    """Whether a W may compute weight gradients of a call: it multiplies trained parameters and a value with a gradient.

    Products of experts do not wait (passes.ops.meeting).
    """
    if call.node.target not in PRODUCTS or call.node.target is grouped_linear:
        return False
    value, *held = (trace.values[number].like.requires_grad for number in call.operands)
    return value and any(held)


def waiting_calls(trace: StageTrace) -> frozenset[int]:
    """Return the indices of the calls with weight gradients that wait for a W. It includes calls inside CUDA graphs,
    which do not wait, so this is an upper bound.
    """
    return frozenset(at for at, call in enumerate(trace.calls) if puts_aside(trace, call))


def made_of(calls: Iterable[TraceCall]) -> set[int]:
    """Return the memory that ``calls`` allocate, without views of what they read."""
    return {memory for call in calls for memory in call.makes if memory not in call.reads}


class OpsOf:
    """The kernels of the calls of a stage. ``follows``: names of values with a size proportional to the batch."""

    def __init__(self, trace: StageTrace, micro: int, node_of: Callable[[str], fx.Node], follows: set[str]) -> None:
        self.trace, self.micro, self.node_of, self.follows = trace, micro, node_of, follows
        self.memory_follows = [False] * len(trace.bytes_of)
        for name, memory in trace.memory_of.items():
            self.memory_follows[memory] |= name in follows
        self.value_follows: dict[int, bool] = {}
        for call in trace.calls:
            for number in call.results:
                self.value_follows[number] = call.name in follows
            for memory in call.makes:
                if memory not in call.reads:
                    self.memory_follows[memory] = call.name in follows
        self._cache: dict[Any, CallOps] = {}

    def of(self, call: TraceCall) -> CallOps:
        """Return the kernels of a call, cached for equal calls."""
        values = self.trace.values
        key = (
            call.node.target, tuple(self.node_of(n).target for n in call.ops), call.seen,
            call.changed is None or call.changed.how.name,
            tuple(values[n].like for n in call.operands), tuple(values[n].like for n in call.results),
            tuple(self.size_follows(n) for n in (*call.operands, *call.results)),
            len(call.makes) - len({*call.makes} & {*call.reads}), self._held_bytes(call),
        )  # fmt: skip
        kernels = self._cache.get(key)
        if kernels is None:
            kernels = self._cache[key] = self._kernels(call)
        return kernels

    def size_follows(self, number: int) -> bool:
        return self.value_follows.get(number, self.memory_follows[self.trace.values[number].memory])

    def _held_bytes(self, call: TraceCall) -> Size:
        """Return the bytes of the saved tensors that the backward of a call reads."""
        kept = (Size.of(self.trace.bytes_of[m], self.micro, follows=self.memory_follows[m]) for m in call.keeps)
        return reduce(Size.plus, kept, self.hidden(call))

    def hidden(self, call: TraceCall) -> Size:
        """Return the bytes that only this call saves; proportional to the batch if an operand is."""
        follows = call.name in self.follows or any(map(self.size_follows, call.operands))
        return Size.of(sum(call.hidden), self.micro, follows=follows)

    def size_of(self, number: int) -> Size:
        """Return the bytes that a reader of the full value reads."""
        like = self.trace.values[number].like
        return Size.of(touched(like), self.micro, follows=self.size_follows(number))

    def sizes_of(self, numbers: Iterable[int]) -> Size:
        """Return the sum of ``size_of`` over several values."""
        return Size.total(map(self.size_of, numbers))

    def _kernels(self, call: TraceCall) -> CallOps:
        if call.changed is not None:
            return self._products(call) if call.ops else self._copied(call, self.size_of(call.results[0]))
        node = self.node_of(call.ops[0])
        if node.target in ATTENTION:
            return self._attention(call, node)
        product = self._product(call, node)
        if product is not None:
            return self._of_product(call, product)
        return self._moved(call)

    # ---- ops other than products

    def _moved(self, call: TraceCall) -> CallOps:
        made = [n for n in call.results if self.trace.values[n].memory not in call.reads]
        if not made:
            return CallOps((), tuple(self._gradient_ops(call)))
        target = self.node_of(call.name).target
        if target in LOOKUPS or packet_of(target) is aten.embedding:
            total = self.sizes_of(made).times(2)  # a lookup reads as many bytes as it writes
        else:
            total = self.sizes_of((*call.operands, *made))
        return CallOps((Op(self.dtype_of(call), total),), tuple(self._gradient_ops(call)))

    def _gradient_ops(self, call: TraceCall) -> Iterator[Op]:
        """Yield one kernel for all gradients that are new memory, if there are any."""
        new = self._new_gradients(call)
        if not new:
            return
        results = [self.size_of(n) for n in call.results if self.trace.values[n].like.requires_grad]
        yield Op(self.dtype_of(call), reduce(Size.plus, (*results, *new), self._held_bytes(call)))

    def _new_gradients(self, call: TraceCall) -> list[Size]:
        values, seen = self.trace.values, call.seen
        if not seen.gradients:
            return [self.size_of(n) for n in call.operands if values[n].like.requires_grad]
        pairs = zip(call.operands, seen.gradients, strict=True)
        return [
            Size.of(g.bytes, self.micro, follows=self.size_follows(n))
            for n, g in pairs if g is not None and not g.is_given
        ]  # fmt: skip

    def _copied(self, call: TraceCall, result: Size) -> CallOps:
        """Return the copy of a gather or scatter along an inner dim; its collective is a message. ``result``: bytes of
        the value in its new type."""
        assert call.changed is not None
        how = call.changed.how
        copies = how.name in ("gather", "collect", "scatter", "exchange")
        size = result.plus(self.size_of(call.operands[0]))
        forward = (Op(self.dtype_of(call), size),) if copies and how.forward else ()
        backward = (Op(self.dtype_of(call), size),) if copies and how.backward else ()
        return CallOps(forward, backward)

    # ---- products

    def _of_product(self, call: TraceCall, product: Op) -> CallOps:
        factors, values = factors_of(call, self.node_of(call.ops[0])), self.trace.values
        total = self.sizes_of((*call.operands, *call.results))
        trained = [values[n].like.requires_grad for n in factors]
        rest = any(values[n].like.requires_grad for n in call.operands if n not in factors)
        return self._both_ways(call, product, total, (*trained, False)[:2], call.results[0], rest)

    def _products(self, call: TraceCall) -> CallOps:
        """Return the kernels of several linears of one value, which the call gathers, or reduces in the backward."""
        args: Any = call.node.args
        *_, weights, biases, _ = args
        unique = dict.fromkeys((args[0], *weights, *(b for b in biases if b is not None)))
        number_of, value = dict(zip(unique, call.operands, strict=True)), call.operands[0]
        parts = [self._copied(call, self._factor(value, number_of[weights[0]], call.results[0]))]
        for weight, bias, result in zip(weights, biases, call.results, strict=True):
            parts.append(self._of_linear(call, value, number_of[weight], number_of.get(bias), result))
        return together(parts)

    def _of_linear(self, call: TraceCall, value: int, weight: int, bias: int | None, result: int) -> CallOps:
        x, w, out = (self.trace.values[n].like for n in (value, weight, result))
        m, n = prod(out.shape[:-1]), out.shape[-1]
        k, follows = prod(w.shape) // n, self.size_follows(value)
        total = self._factor(value, weight, result).plus(self.size_of(weight)).plus(self.size_of(result))
        product = self._per_sequence(call, (1, m, n, k), 1 if follows else -1)
        has_bias = bias is not None and self.trace.values[bias].like.requires_grad
        return self._both_ways(call, product, total, (x.requires_grad, w.requires_grad), result, has_bias)

    def _factor(self, value: int, weight: int, result: int) -> Size:
        """Return the bytes of the full value that is multiplied; ``value`` may be a shard of it."""
        x, w, out = (self.trace.values[n].like for n in (value, weight, result))
        elements = prod(out.shape[:-1]) * (prod(w.shape) // out.shape[-1])
        return Size.of(elements * x.dtype.itemsize, self.micro, follows=self.size_follows(value))

    def _both_ways(
        self, call: TraceCall, product: Op, total: Size, trained: tuple[bool, ...], result: int, bias: bool
    ) -> CallOps:
        """Return the kernels of a product. ``trained``: which of its two factors, ``bias``: whether an addend, has a
        gradient."""
        forward = Op(product.dtype, total, product.sides, product.follows)
        of_value = (product.turned(OF_FIRST, total),) if trained[0] else ()
        held = (product.turned(OF_SECOND, total),) if trained[1] else ()
        if bias:
            held += (Op(product.dtype, self.size_of(result)),)
        return CallOps((forward,), (*of_value, *held), held)

    def _per_sequence(self, call: TraceCall, sides: Sides, at: int) -> Op:
        """Return a product with ``sides`` of all sequences; side ``at`` is proportional to them (−1: none)."""
        if at >= 0 and sides[at] % self.micro:
            at = -1
        b, m, n, k = (side // self.micro if i == at else side for i, side in enumerate(sides))
        return Op(self.dtype_of(call), Size(), (b, m, n, k), at)

    def _product(self, call: TraceCall, node: fx.Node) -> Op | None:
        if not has_flops(node):
            return None
        factors = factors_of(call, node)
        if not call.results or not factors:
            return None
        likes = [self.trace.values[n].like for n in factors]
        out = self.trace.values[call.results[0]].like
        follows = [self.size_follows(n) for n in (*factors, call.results[0])]
        packet = packet_of(node.target)
        is_plain = packet in WITH_WEIGHT or packet in (aten.bmm, aten.matmul, aten.baddbmm)
        if len(likes) == 2 and is_plain:
            sides, at = _plain_sides(packet, likes[0], likes[1], out, follows)
        else:
            sides, at = _other_sides(self._local_flops(node, likes, out), out, follows)
        return self._per_sequence(call, sides, at)

    def _local_flops(self, node: fx.Node, likes: Sequence[Like], out: Like) -> float:
        """Return the FLOPs of a product on one rank; assumes that each dim is in two of its three tensors."""
        if node.target not in CONVOLUTIONS and packet_of(node.target) is not aten.einsum and likes[0].shape:
            return 2.0 * prod(out.shape) * likes[0].shape[-1]
        whole, local = 1.0, 1.0
        nodes = [n for n in node.all_input_nodes if hasattr(n.meta.get("val"), "shape")][: len(likes)]
        for value, like in zip(nodes, likes, strict=False):
            whole *= max(1, value.meta["val"].numel())
            local *= max(1, prod(like.shape))
        result = node.meta["val"]
        whole *= max(1, result.numel() if hasattr(result, "numel") else 1)
        local *= max(1, prod(out.shape))
        return node_flops(node) * (local / whole) ** 0.5

    # ---- attention

    def _attention(self, call: TraceCall, node: fx.Node) -> CallOps:
        values = self.trace.values
        query, key, value = (values[n].like.shape for n in (call.operands * 3)[:3])
        cp = int(node.args[4]) if node.target is gathered_attention else 1  # pyright: ignore[reportArgumentType]
        flops = 2.0 * prod(query[:-2]) * query[-2] * key[-2] * cp * (query[-1] + value[-1])
        lowered = call.node.target is attention_by_documents
        documents: Any = call.node.args[4] if lowered else call.node.kwargs.get("documents")  # tokens per document
        if documents is not None:
            flops *= documents / (key[-2] * cp)
        elif (node.target is causal_attention or arguments(node).get("is_causal")) and query[-2] == key[-2]:
            flops /= 2  # kernels skip the scores above the diagonal
        total = self.sizes_of(dict.fromkeys((*call.operands, *call.results)))
        work = Size.of(flops, self.micro, follows=self.size_follows(call.operands[0]))
        forward = Op(self.dtype_of(call), total, attention=work, head=query[-1])
        if not any(values[n].like.requires_grad for n in call.operands):
            return CallOps((forward,))
        again = work.times(BACKWARD_PRODUCTS / FORWARD_PRODUCTS)
        backward = Op(self.dtype_of(call), total.times(2), attention=again, head=query[-1])
        return CallOps((forward,), (backward,))

    def dtype_of(self, call: TraceCall) -> str:
        """Return the dtype of a call: the first floating-point one of its results and operands."""
        values = self.trace.values
        dtypes = [values[n].like.dtype for n in (*call.results, *call.operands)]
        dtype = next((d for d in dtypes if d.is_floating_point), dtypes[0] if dtypes else None)
        return str(dtype).removeprefix("torch.")


def _plain_sides(packet: Any, a: Like, b: Like, out: Like, follows: list[bool]) -> tuple[Sides, int]:
    """Return (batch, m, n, k) of a product, and the index of the side that is proportional to the sequences, or −1."""
    k = a.shape[-1] if a.shape else 1
    if packet is aten.linear or len(b.shape) <= 2:
        n = prod(out.shape) // max(1, prod(a.shape[:-1])) if a.shape else 1
        return (1, prod(a.shape[:-1]), max(1, n), k), 1 if follows[0] else (2 if follows[1] else -1)
    *outer, m, n = (1, 1, *out.shape)
    batch = prod(outer)
    if len(a.shape) < len(b.shape) and len(a.shape) <= 2:
        return (batch, m, n, k), 0 if follows[2] else -1
    return (batch, m, n, k), 0 if follows[2] or (follows[0] and follows[1]) else -1


def _other_sides(flops: float, out: Like, follows: list[bool]) -> tuple[Sides, int]:
    """Return the sides of one matrix product with as many FLOPs as a convolution, an einsum, or products of experts."""
    n = out.shape[-1] if out.shape else 1
    m = max(1, prod(out.shape) // max(1, n))
    k = max(1, round(flops / (2 * max(1, m * n))))
    return (1, m, n, k), 1 if follows[-1] else -1

"""The device work of one call of a stage, forward and backward: products and bytes moved, at the shapes of one rank.

    linear      forward  x W         one product [m, k] · [k, n]
                backward g Wᵀ, xᵀ g  one for each operand that has a gradient; the bias is a sum
    attention   forward 2 products, backward 5: scores are recomputed (Dao et al. 2022, "FlashAttention")
    the rest    bytes: forward operands and results; backward the gradient, saved tensors, and each new gradient
    a view      nothing

Sizes proportional to the batch are separate from constant ones, so that one trace serves every microbatch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import fx

from passes.program.ops.aten import arguments, aten, packet_of
from passes.program.ops.groups import ATTENTION, CONVOLUTIONS, LOOKUPS, WITH_WEIGHT
from passes.program.ops.sequence import causal_attention, gathered_attention
from passes.rules.flops import has_flops, multiplied, node_flops
from planner.saved.observe import Like
from planner.saved.trace import Call, StageTrace

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # of attention: its backward recomputes the scores


class Size(NamedTuple):
    """``fixed`` and, for each sequence of a microbatch, ``per``: bytes, elements or operations."""

    fixed: float = 0.0
    per: float = 0.0

    @classmethod
    def of(cls, amount: float, micro: int, *, follows: bool) -> Size:
        """``amount`` of ``micro`` sequences."""
        return cls(0.0, amount / micro) if follows else cls(float(amount), 0.0)

    def at(self, micro: int) -> float:
        return self.fixed + self.per * micro

    def plus(self, other: Size) -> Size:
        return Size(self.fixed + other.fixed, self.per + other.per)

    def times(self, factor: float) -> Size:
        return Size(self.fixed * factor, self.per * factor)


NOTHING = Size()
Sides = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel. ``sides``: batch, m, n and k of a product, for one sequence; ``follows``: the index of the side that
    is proportional to the sequences of a microbatch (−1: none). ``attention``: operations of its products.
    """

    dtype: str
    bytes: Size
    sides: tuple[int, int, int, int] | None = None
    follows: int = -1
    attention: Size = NOTHING

    def sides_at(self, micro: int) -> tuple[int, int, int, int]:
        assert self.sides is not None
        b, m, n, k = self.sides
        at = self.follows
        return (
            (b * micro, m, n, k)
            if at == 0
            else (b, m * micro, n, k)
            if at == 1
            else ((b, m, n * micro, k) if at == 2 else (b, m, n, k * micro) if at == 3 else (b, m, n, k))
        )

    def flops(self, micro: int) -> float:
        """Operations of its products."""
        return self.attention.at(micro) if self.sides is None else 2.0 * prod(self.sides_at(micro))

    def turned(self, order: tuple[int, int, int, int], more: Size) -> Op:
        """The product with its sides in another order, as the gradient of an operand is."""
        assert self.sides is not None
        b, m, n, k = (self.sides[i] for i in order)
        return Op(self.dtype, more, (b, m, n, k), order.index(self.follows) if self.follows >= 0 else -1)


OF_FIRST, OF_SECOND = (0, 1, 3, 2), (0, 3, 2, 1)  # [m, k] = g Bᵀ contracts n; [k, n] = Aᵀ g contracts m


@dataclass(frozen=True, slots=True)
class CallOps:
    """Kernels of one call. ``of_held``: those of the backward that make gradients of its second operand alone.

    ``of_weights``: of these, the ones that a W of a schedule may run: the second operand is a parameter, and the first
    has a gradient of its own. ``puts_aside``: bytes of the gradient that they wait with.
    """

    forward: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    of_held: tuple[Op, ...] = ()
    of_weights: tuple[Op, ...] = ()
    puts_aside: Size = NOTHING


def touched(like: Like) -> int:
    """Bytes that whoever reads all of a value reads: of a view its own elements, of a repeated one each once."""
    return like.dtype.itemsize * prod(n for n, stride in zip(like.shape, like.strides, strict=True) if stride or not n)


def factors_of(call: Call, node: fx.Node) -> list[int]:
    """Numbers of the values that a product multiplies."""
    first, last = multiplied(node.target) or (0, 1)
    return list(call.operands[first : last + 1])


def multiplies_weight(trace: StageTrace, call: Call, node: fx.Node) -> bool:
    """Whether a call multiplies a value that has a gradient with a trained parameter, as the linear op does."""
    if call.changed is not None or node.target not in WITH_WEIGHT:
        return False
    factors = [trace.values[number] for number in factors_of(call, node)]
    if len(factors) != 2 or not all(value.like.requires_grad for value in factors):
        return False
    return factors[1].number in trace.stored and factors[0].memory not in trace.outside


class OpsOf:
    """Kernels of the calls of a stage. ``follows``: whether a value of the captured graph follows the batch."""

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

    def of(self, call: Call) -> CallOps:
        """Of equal calls once."""
        values = self.trace.values
        key = (
            self.node_of(call.name).target, call.seen, call.changed is None or call.changed.how.name,
            tuple(values[n].like for n in call.operands), tuple(values[n].like for n in call.results),
            tuple(self.size_follows(n) for n in (*call.operands, *call.results)), call.in_place,
            len(call.makes) - len({*call.makes} & {*call.reads}), self._held_bytes(call), self.has_weight(call),
        )  # fmt: skip
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._made(call)
        return found

    def size_follows(self, number: int) -> bool:
        return self.value_follows.get(number, self.memory_follows[self.trace.values[number].memory])

    def kept(self, call: Call) -> Size:
        """Bytes of values that a call keeps, without memory that the stage does not own."""
        total = Size()
        for memory in call.keeps:
            if memory not in self.trace.outside:
                total = total.plus(self._memory(memory))
        return total

    def _held_bytes(self, call: Call) -> Size:
        """Bytes that the backward of a call reads: its saved tensors."""
        total = self.hidden(call)
        for memory in call.keeps:
            total = total.plus(self._memory(memory))
        return total

    def hidden(self, call: Call) -> Size:
        """Bytes that only this call saves; they are proportional to the batch if an operand is, for a loss too."""
        follows = call.name in self.follows or any(map(self.size_follows, call.operands))
        return Size.of(sum(call.hidden), self.micro, follows=follows)

    def _memory(self, memory: int) -> Size:
        return Size.of(self.trace.bytes_of[memory], self.micro, follows=self.memory_follows[memory])

    def _value(self, number: int) -> Size:
        like = self.trace.values[number].like
        return Size.of(touched(like), self.micro, follows=self.size_follows(number))

    def _made(self, call: Call) -> CallOps:
        node = self.node_of(call.name)
        if call.changed is not None:
            return self._change(call)
        if node.target in ATTENTION:
            return self._attention(call, node)
        product = self._product(call, node)
        if product is not None:
            return self._of_product(call, product)
        return self._moved(call)

    # ---- ops other than products

    def _moved(self, call: Call) -> CallOps:
        made = [n for n in call.results if self.trace.values[n].memory not in call.reads]
        if call.in_place:  # a bias, added by its product
            return CallOps((), tuple(self._gradient_ops(call)))
        if not made:
            return CallOps((), tuple(self._gradient_ops(call)))
        total, target = Size(), self.node_of(call.name).target
        picks = target in LOOKUPS or packet_of(target) is aten.embedding
        for number in made if picks else (*call.operands, *made):
            total = total.plus(self._value(number))
        if picks:
            total = total.times(2)  # it reads as much as it makes
        return CallOps((Op(self._dtype(call), total),), tuple(self._gradient_ops(call)))

    def _gradient_ops(self, call: Call) -> Iterator[Op]:
        """One kernel for all gradients that are new memory."""
        new = self._new_gradients(call)
        if not new:
            return
        total = self._held_bytes(call)
        for number in call.results:
            if self.trace.values[number].like.requires_grad:
                total = total.plus(self._value(number))
        for size in new:
            total = total.plus(size)
        yield Op(self._dtype(call), total)

    def _new_gradients(self, call: Call) -> list[Size]:
        values, seen = self.trace.values, call.seen
        if not seen.gradients:
            grads = [n for n in call.operands if values[n].like.requires_grad]
            return [self._value(n) for n in grads]
        pairs = zip(call.operands, seen.gradients, strict=True)
        return [
            Size.of(g.bytes, self.micro, follows=self.size_follows(n))
            for n, g in pairs if g is not None and not g.is_given
        ]  # fmt: skip

    def _change(self, call: Call) -> CallOps:
        """A gather or scatter along an inner dim copies once; its communication is counted in the messages."""
        assert call.changed is not None
        how, result, operand = call.changed.how, call.results[0], call.operands[0]
        copies = how.name in ("gather", "collect", "scatter", "exchange")
        size = self._value(result).plus(self._value(operand))
        forward = (Op(self._dtype(call), size),) if copies and how.forward else ()
        backward = (Op(self._dtype(call), size),) if copies and how.backward else ()
        return CallOps(forward, backward)

    # ---- products

    def _of_product(self, call: Call, product: Op) -> CallOps:
        numbers = list(call.operands)
        total = Size()
        for number in (*numbers, *call.results):
            total = total.plus(self._value(number))
        forward = Op(product.dtype, total, product.sides, product.follows)
        values = self.trace.values
        factors = self._factors(call)
        backward, held = list[Op](), list[Op]()
        for number, order in zip(factors, (OF_FIRST, OF_SECOND), strict=False):
            if values[number].like.requires_grad:
                made = product.turned(order, total)
                backward.append(made)
                if order == OF_SECOND:
                    held.append(made)
        rest = [n for n in numbers if n not in factors and values[n].like.requires_grad]
        if rest:
            grad = self._value(call.results[0])
            backward.append(Op(product.dtype, grad))
            held.append(backward[-1])
        if not self.has_weight(call):
            return CallOps((forward,), tuple(backward), tuple(held))
        return CallOps((forward,), tuple(backward), tuple(held), tuple(held), self._value(call.results[0]))

    def has_weight(self, call: Call) -> bool:
        """Whether it multiplies a value that has a gradient with a trained parameter."""
        return multiplies_weight(self.trace, call, self.node_of(call.name))

    def _factors(self, call: Call) -> list[int]:
        return factors_of(call, self.node_of(call.name))

    def _product(self, call: Call, node: fx.Node) -> Op | None:
        if not has_flops(node):
            return None
        factors = self._factors(call)
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
        if at >= 0:
            if sides[at] % self.micro:
                at = -1
            else:
                sides = tuple(n // self.micro if i == at else n for i, n in enumerate(sides))
        b, m, n, k = sides
        return Op(self._dtype(call), Size(), (b, m, n, k), at)

    def _local_flops(self, node: fx.Node, likes: Sequence[Like], out: Like) -> float:
        """Of one rank. Each dim of an einsum or a convolution is in two of its three tensors, as a rule."""
        if node.target not in CONVOLUTIONS and packet_of(node.target) is not aten.einsum and likes[0].shape:
            return 2.0 * prod(out.shape) * likes[0].shape[-1]
        whole, local = 1.0, 1.0
        nodes = [n for n in node.all_input_nodes if hasattr(n.meta.get("val"), "shape")][: len(likes)]
        for value, like in zip(nodes, likes, strict=False):
            whole *= max(1, value.meta["val"].numel())
            local *= max(1, prod(like.shape))
        held = node.meta["val"]
        whole *= max(1, held.numel() if hasattr(held, "numel") else 1)
        local *= max(1, prod(out.shape))
        return node_flops(node) * (local / whole) ** 0.5

    # ---- attention

    def _attention(self, call: Call, node: fx.Node) -> CallOps:
        values = self.trace.values
        query, key, value = (values[n].like.shape for n in self._three(call))
        cp = int(node.args[4]) if node.target is gathered_attention else 1  # pyright: ignore[reportArgumentType]
        flops = 2.0 * prod(query[:-2]) * query[-2] * key[-2] * cp * (query[-1] + value[-1])
        if _is_causal(node) and query[-2] == key[-2]:
            flops /= 2  # kernels skip the scores above the diagonal
        total = Size()
        for number in dict.fromkeys((*call.operands, *call.results)):
            total = total.plus(self._value(number))
        work = Size.of(flops, self.micro, follows=self.size_follows(call.operands[0]))
        forward = Op(self._dtype(call), total, attention=work)
        if not any(values[n].like.requires_grad for n in call.operands):
            return CallOps((forward,))
        more = total.times(2)
        backward = Op(self._dtype(call), more, attention=work.times(BACKWARD_PRODUCTS / FORWARD_PRODUCTS))
        return CallOps((forward,), (backward,))

    def _three(self, call: Call) -> list[int]:
        numbers = list(call.operands)
        return (numbers * 3)[:3] if len(numbers) < 3 else numbers[:3]

    def _dtype(self, call: Call) -> str:
        values = self.trace.values
        floats = [values[n].like.dtype for n in (*call.results, *call.operands)]
        found = next((d for d in floats if d.is_floating_point), floats[0] if floats else None)
        return str(found).removeprefix("torch.")


def _plain_sides(packet: Any, a: Like, b: Like, out: Like, follows: list[bool]) -> tuple[Sides, int]:
    """(batch, m, n, k), and which of them follows the batch."""
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
    """Of a convolution, an einsum, products of experts: as if one matrix were multiplied with another."""
    n = out.shape[-1] if out.shape else 1
    m = max(1, prod(out.shape) // max(1, n))
    k = max(1, round(flops / (2 * max(1, m * n))))
    return (1, m, n, k), 1 if follows[-1] else -1


def _is_causal(node: fx.Node) -> bool:
    return node.target is causal_attention or bool(arguments(node).get("is_causal"))

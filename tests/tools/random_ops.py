"""Single ops with random cuts under discussion, for the property tests of the rules."""

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor, fx

from passes.partition.typings.table import Option, Site, options_of
from passes.types.types import Placement, Segment
from tests.tools.examples import examples
from tests.tools.simulated_ranks import Op, check

SETTINGS = examples(
    50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def rule_property(test: Callable[[st.DataObject], None]) -> Callable[..., None]:
    """A hypothesis test whose tensors' values are the same every time."""

    @SETTINGS
    @given(st.data())
    def seeded(data: st.DataObject) -> None:
        torch.manual_seed(0)
        test(data)

    seeded.__name__ = test.__name__
    return seeded


class Weight:
    """Marks an argument as a parameter."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def op_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, item: int | None = None) -> Op:
    """A graph of one call (and an item of its tuple) whose tensor arguments are placeholders."""
    graph, values = fx.Graph(), {}

    def holder(tensor: Tensor, weight: bool = False) -> fx.Node:
        node = graph.placeholder(f"x{len(values)}")
        values[node.name] = tensor
        node.meta = {"val": tensor, "grad": tensor.requires_grad}
        if weight:
            node.meta["parameter"] = "w"
        return node

    def replace(value: Any) -> Any:
        if isinstance(value, Weight):
            return holder(value.tensor, True)
        if isinstance(value, Tensor):
            return holder(value)
        return type(value)(replace(v) for v in value) if isinstance(value, (list, tuple)) else value

    node = graph.call_function(
        target, tuple(replace(a) for a in args), {k: replace(v) for k, v in (kwargs or {}).items()}
    )
    inner = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    node.meta = {"val": target(*inner[0], **inner[1]), "grad": any(n.meta["grad"] for n in node.all_input_nodes)}
    if item is not None:
        piece = graph.call_function(operator.getitem, (node, item))
        piece.meta = {"val": node.meta["val"][item], "grad": node.meta["grad"]}
        node = piece
    node.meta["grad"] = node.meta["grad"] and node.meta["val"].requires_grad
    graph.output(node)
    return Op(node, values)


def real(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


def random_cut(random: Random, shape: tuple[int, ...], tp: int) -> Placement | None:
    """A random cut of a tensor of ``shape``: one to four segments, some whole, perhaps padded; None where none fits."""
    dims = [d for d, n in enumerate(shape) if n >= tp]
    if not dims:
        return None
    dim = random.choice(dims)
    size, segments = shape[dim], []
    if size % tp and random.random() < 0.5:
        return Placement("V", dim, (Segment(size),), tp * (-(-size // tp) + random.randint(0, 1)) - size)
    while size and len(segments) < 4:
        sharded = random.random() < 0.7 and size >= tp
        step = tp if sharded else 1
        length = size if random.random() < 0.5 and size % step == 0 else step * random.randint(1, size // step)
        segments.append(Segment(length, sharded))
        size -= length
    if size or not any(s.sharded for s in segments):
        return None
    return Placement("V", dim, tuple(segments))


def options(draw: Callable[..., Any], op: Op, tp: int) -> list[tuple[Option | None, Option]]:
    """What the rule admits when random cuts of the op's inputs and result are under discussion.

    Pairs: the option of the tuple that an item is taken of (None where the op is no item), and that of the op.
    """
    cuts: dict[str, set[Placement]] = {}
    random = Random(draw(st.integers(0, 2**30), "seed of the cuts"))
    for node in (*op.inputs, op.node):
        found = [random_cut(random, tuple(node.meta["val"].shape), tp) for _ in range(4)]
        cuts[node.name] = {c for c in found if c is not None}
    if len(op.chain) == 1:
        return [(None, o) for o in options_of(Site(op.node, tp, cuts))]
    first = options_of(Site(op.chain[0], tp, cuts))
    cuts[op.chain[0].name] = {o.out for o in first if o.out.is_sharded}
    return [(f, o) for o in options_of(Site(op.node, tp, cuts)) for f in first if f.out == o.args[0]]


def check_options(data: st.DataObject, op: Op) -> None:
    """Every option that the rule admits, by values and gradients."""
    tp = data.draw(st.sampled_from([2, 3, 4]), "tp")
    found = options(data.draw, op, tp)
    for source, option in found:
        try:
            check(op, option, tp, source=source)
        except Exception as error:
            shapes = [tuple(n.meta["val"].shape) for n in op.inputs]
            raise AssertionError(
                f"tp {tp}, {op.chain[0].target} {op.chain[0].args} on {shapes}: {option}\n{error}"
            ) from error


def sizes(draw: Callable[..., Any], ndim: int) -> list[int]:
    """Sizes with many divisors, and some with few."""
    return draw(st.lists(st.sampled_from([4, 8, 6, 12, 3, 5, 2, 1]), min_size=ndim, max_size=ndim))

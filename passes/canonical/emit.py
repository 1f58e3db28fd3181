"""Code that rewrites of captured calls share: emitting a call, shapes, and tables by op name.

A rewrite is a function ``(emit, node, args, kwargs) -> value``: ``node`` is the captured call, ``args`` and ``kwargs``
are its arguments in the graph under construction, and ``emit(target, args, kwargs, val)`` adds one call for it.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from passes.program.ops.aten import aten, ops_named, shape_of

Emit = Callable[..., fx.Node]
Rewrite = Callable[..., Any]


def applied(emit: Emit, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Emit ``target(*args, **kwargs)``; the shape of its value is found by running it on the arguments' fake values."""
    given, options = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    return emit(target, args, kwargs, target(*given, **options))


def reshaped(emit: Emit, x: fx.Node, val: Any) -> fx.Node:
    """Return ``x`` seen in the shape of ``val``."""
    if shape_of(x) == tuple(val.shape):
        return x
    return emit(aten.reshape.default, (x, [int(n) for n in val.shape]), {}, val)


def viewed(emit: Emit, x: fx.Node, shape: list[int]) -> fx.Node:
    """Return ``x.reshape(shape)``."""
    return reshaped(emit, x, x.meta["val"].reshape(shape))


def viewed_back(emit: Emit, x: fx.Node, shape: list[int]) -> fx.Node:
    """Return ``x.reshape(shape)``; if ``x`` is itself a view of a tensor with that shape, that tensor."""
    value, source = x.meta["val"].reshape(shape), x.all_input_nodes[0] if x.target is aten.reshape.default else x
    return source if shape_of(source) == tuple(value.shape) else reshaped(emit, x, value)


def dim_of(args: list[Any], kwargs: dict[str, Any], position: int) -> int:
    """Return the ``dim`` argument at ``position``, counted from the front."""
    dim = kwargs.get("dim", args[position] if len(args) > position else 0)
    return dim % max(1, args[0].meta["val"].dim())


def table(groups: dict[Rewrite, str]) -> dict[Any, Rewrite]:
    """Op → rewrite, from rewrite → names of ops."""
    return {op: rewrite for rewrite, paths in groups.items() for op in ops_named(paths)}

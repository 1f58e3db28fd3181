"""Facts of one call of a captured graph: its arguments by name, its inputs and results, whether it draws.

    arguments(sum(x, [1]))      {"self": x, "dim": [1]}                         as given
    named(sum(x, [1]))          … "keepdim": False, "dtype": None               the schema's defaults too

Read from PyTorch's schemas and tags; the two tables of names below hold the facts that these lack.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from passes.program.ops.ctc import CTC_LOSSES
from passes.program.ops.sequence import causal_attention

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)  # dtypes of half precision

# ---- arguments


def arguments(node: fx.Node, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The given arguments of a call by their name in the schema; ``args``, ``kwargs``: others than the node's own."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    given = node.args if args is None else args
    return dict(zip(names, given, strict=False)) | dict(node.kwargs if kwargs is None else kwargs)


def named(node: fx.Node, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return all arguments of a call by their name in the schema, defaults included."""
    schema = getattr(node.target, "_schema", None)
    held = [a for a in schema.arguments if a.has_default_value()] if schema is not None else []
    return {a.name: a.default_value for a in held} | arguments(node, args, kwargs)


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in an argument, or in several; one that stands there twice also twice."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def position_of(target: Any, name: str) -> int:
    """Return the position of the argument ``name`` in the schema of an op."""
    return [a.name for a in target._schema.arguments].index(name)


def size_argument(target: Any) -> int | None:
    """Return the position of the argument of an op that gives the size of its result."""
    schema = getattr(target, "_schema", None)
    given = [(a.name, str(a.type)) for a in schema.arguments] if schema is not None else []
    return next((i for i, (n, kind) in enumerate(given) if n in ("size", "sizes", "shape") and "List" in kind), None)


def with_sizes(node: fx.Node, args: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """``args`` of ``node``; where they give the sizes of its result, or of some dims of it, they give ``sizes``."""
    at, found = size_argument(node.target), list(args)
    if at is None or at >= len(args) or not isinstance(args[at], (list, tuple)):
        return found
    whole = shape_of(node)
    first = int(args[1]) % len(whole) if packet_of(node.target) is aten.unflatten else 0
    named = whole[first : first + len(args[at])]
    if len(named) == len(args[at]) and all(n in (-1, size) for n, size in zip(args[at], named, strict=True)):
        found[at] = list(sizes[first : first + len(named)])
    return found


def returns_nothing(target: Any) -> bool:
    """Return whether an op only checks something, as an assertion does."""
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.returns


def without_reshapes(node: fx.Node) -> fx.Node:
    """Return the value of which ``node`` is the same elements in another shape; itself if it is no reshape."""
    while node.target is aten.reshape.default:
        node = node.all_input_nodes[0]
    return node


def reduced_dims(node: fx.Node) -> frozenset[int]:
    """Return the dims of its first operand that an op reduces or runs along; all if it names none."""
    ndim = next(tensors_of(node.all_input_nodes[0])).dim()
    given = arguments(node)
    dims = given.get("dim", given.get("dims"))
    if dims is None or dims == []:
        return frozenset(range(ndim))
    return frozenset(int(d) % max(1, ndim) for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def permutation(target: Any, ndim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the dims that an op puts in another order: read off a meta tensor with distinct sizes."""
    return [int(n) - 2 for n in target(torch.empty(tuple(range(2, 2 + ndim)), device="meta"), *args, **kwargs).shape]


# ---- values


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the static (microbatch, global over tp) shape of a value, of a tuple its first tensor's."""
    return tuple(map(int, next(tensors_of(node)).shape))


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the tensors of a node's value."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (v for v in value if isinstance(v, torch.Tensor))


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether numbers of this type may have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def has_floats(node: fx.Node) -> bool:
    """Return whether a value has elements that may have a gradient."""
    return any(has_gradient(t.dtype) for t in tensors_of(node))


def value_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value (of all its tensors, for a tuple)."""
    return sum(t.numel() * t.element_size() for t in tensors_of(node))


def shares_memory(node: fx.Node) -> bool:
    """Whether the result may lie in the memory of the first argument: a view, perhaps a view, or a write in place."""
    if node.op != "call_function":
        return False
    if node.target in (operator.getitem, aten._unsafe_view.default):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def is_view(node: fx.Node) -> bool:
    """Whether the result shares the memory of an argument: PyTorch's schema says so, and no conversion happens."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return False
    before, after = next(tensors_of(node.all_input_nodes[0]), None), next(tensors_of(node), None)
    return before is not None and after is not None and before.dtype == after.dtype


def dim_of_cat(node: fx.Node) -> int:
    """Return the dim along which a concatenation joins its operands."""
    return int(node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node))  # pyright: ignore[reportArgumentType]


# ---- cuts


def splits(node: fx.Node) -> bool:
    return node.target is aten.split_with_sizes.default


def is_cut(node: fx.Node) -> bool:
    """Return whether a call is a slice, or one of the pieces of a split."""
    if node.target is operator.getitem:
        return splits(node.all_input_nodes[0])
    return node.target is aten.slice.Tensor and len(node.args) == 4


def cut_source(node: fx.Node) -> fx.Node:
    """Return the value of which a cut takes a part."""
    source = node.all_input_nodes[0]
    return source.all_input_nodes[0] if node.target is operator.getitem else source


def cut_of(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """Return (x, dim, start, stop) of a call that takes neighbouring elements of x along one dim."""
    if not is_cut(node):
        return None
    source, args = cut_source(node), node.args
    if node.target is aten.slice.Tensor:
        return source, int(args[1]), int(args[2]), int(args[3])  # pyright: ignore
    sizes: Any = node.all_input_nodes[0].args[1]
    dim: Any = node.all_input_nodes[0].args[2] if len(node.all_input_nodes[0].args) > 2 else 0
    index: Any = args[1]
    return source, int(dim), sum(sizes[:index]), sum(sizes[: index + 1])


# ---- ops


def op_named(path: str) -> Any:
    """Return an overload by name (``slice.Tensor``), or None on a PyTorch that lacks it."""
    name, _, overload = path.partition(".")
    return getattr(getattr(aten, name, None), overload or "default", None)


def ops_named(paths: str) -> list[Any]:
    """Return those of the overloads, apart by spaces, that this PyTorch has."""
    return [op for op in map(op_named, paths.split()) if op is not None]


def packets(names: str, value: Any) -> dict[Any, Any]:
    """Return ``value`` for all overloads of each of the ops, apart by spaces, that this PyTorch has."""
    return {getattr(aten, name): value for name in names.split() if hasattr(aten, name)}


def packet_of(target: Any) -> Any:
    """Return all overloads of an op together."""
    return getattr(target, "overloadpacket", target)


def draws(target: Any) -> bool:
    """Return whether an op may draw random numbers: PyTorch's tag, which an OwnBackward has too."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_random(node: fx.Node) -> bool:
    """Return whether two calls may give different values."""
    if node.target is causal_attention:
        return bool(node.kwargs.get("dropout_p"))
    if not draws(node.target):
        return False
    schema = getattr(node.target, "_schema", None)
    names = {a.name for a in schema.arguments} if schema is not None else set[str]()
    rate = names.intersection(("dropout_p", "dropout"))  # of attention, of lstm: tagged for it, and it is mostly 0
    return bool(arguments(node).get(rate.pop())) if rate else True


def is_mutable(target: Any) -> bool:
    """Return whether an op writes into an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def written_by(target: Any) -> list[str]:
    """Return the names in the schema of the arguments that an op writes into."""
    schema = getattr(target, "_schema", None)
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] if schema else []


def is_pointwise(target: object) -> bool:
    """Return whether PyTorch itself tags the op as pointwise, or it is one of the few that it forgets."""
    if target in FORGOTTEN:
        return True
    is_op = isinstance(target, torch._ops.OpOverload)
    return is_op and torch.Tag.pointwise in target.tags and not draws(target) and not is_mutable(target)


FORGOTTEN = set(
    ops_named(
        "to.dtype to.device to.dtype_layout to.other contiguous clone detach dropout masked_fill.Scalar "
        "masked_fill.Tensor zeros_like ones_like full_like where.self where.ScalarOther where.ScalarSelf where.Scalar "
        "gelu silu relu6 softplus __and__.Tensor __or__.Tensor square type_as rsub.Scalar rsub.Tensor "
        "true_divide.Tensor mish leaky_relu hardswish selu celu subtract.Tensor multiply.Tensor divide.Tensor "
        "log_sigmoid clamp clip float_power.Tensor_Scalar fill.Tensor fill.Scalar floor_divide floor_divide.Scalar "
        "empty_like real imag conj _conj polar complex resolve_conj relu logical_and hardsigmoid"
    )
)


_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_LENGTHS = {CTC_LOSSES}  # loops on the host over a number of frames that depends on data
_MASKS = {torch.bool, torch.uint8}


def reads_on_host(target: Any, args: Sequence[Any], value_of: Callable[[Any], Any] = lambda value: value) -> bool:
    """Return whether a call waits for the device, as it reads values of tensors on the host, to return them or to shape
    its results: no CUDA graph captures it. ``value_of`` an argument: the tensor that it is, or one like it.

    PyTorch tags such ops. An index of integers is none of them, though tagged because of masks, nor is a mask that is
    filled with one number.
    """
    puts = packet_of(target) in (aten.index_put, aten.index_put_, aten._index_put_impl_)
    if target is aten.index.Tensor or puts:
        by_mask = any(index is not None and value_of(index).dtype in _MASKS for index in args[1])
        fills = puts and value_of(args[2]).numel() == 1 and args[3:4] != (True,)
        return by_mask and not fills
    if target is aten.one_hot.default:
        return (*args[1:], -1)[0] == -1
    return target in _LENGTHS or bool(_TAGS & set(getattr(target, "tags", ())))


SEVERAL = 2
_ONE_STEP = set(
    map(
        packet_of,
        ops_named(
            "linear matmul einsum conv1d conv2d conv3d reshape contiguous to.dtype expand_as pad layer_norm "
            "softmax.int log_softmax.int cross_entropy_loss scaled_dot_product_attention dropout where.ScalarOther"
        ),
    )
)


def num_addends(reader: fx.Node, value: fx.Node) -> int:
    """The number of times that the call names the value; twice that if PyTorch makes several steps of the call."""
    return nodes_in((reader.args, reader.kwargs)).count(value) * (SEVERAL if _is_written_out(reader.target) else 1)


def _is_written_out(target: object) -> bool:
    """Return whether an op has no derivative of its own: a few are then one step that has."""
    if not isinstance(target, torch._ops.OpOverload) or packet_of(target) in _ONE_STEP:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")

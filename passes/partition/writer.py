"""The writer of a rank's program, the same over every axis: conversions between a value and its readers, and each op
in the form of its typing.

    convert     the readers of a value that want another type read a conversion of it
    rewrite     an op on whole tensors becomes the op on a rank's parts; written sizes and bounds become local

An axis adds its own conversions, and the forms that need its collectives: passes.localize over tp,
passes.partition.sequence over cp. Both begin with values and arguments of global sizes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from passes.partition.typings.base import Form, Option
from passes.partition.typings.layout import pieces_of
from passes.program.ops.aten import aten, position_of, shape_of, with_sizes
from passes.program.walks import last_of_header
from passes.types.types import Placement

AXIS = object()


class Scene:
    """One node with its option, and the facts of its axis: ``size`` ranks, and the argument that stands for it in
    calls of its collectives. ``node`` is the result of the rewrite afterwards.
    """

    def __init__(self, node: fx.Node, option: Option, size: int, axis: Callable[[], Any]) -> None:
        self.node, self.option, self.size, self.axis = node, option, size, axis

    def input_type(self, position: int) -> Placement:
        """Type of the ``position``-th distinct tensor input."""
        return self.option.args[position]

    def local_shape(self) -> list[int]:
        return list(self.option.out.local_shape(shape_of(self.node), self.size))

    def set_named(self, name: str, value: Any) -> None:
        """The argument that the schema calls ``name``, which may be given by position or by keyword."""
        position = position_of(self.node.target, name)
        if position < len(self.node.args):
            self.node.update_arg(position, value)
        else:
            self.node.update_kwarg(name, value)

    def become(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Replace the node by a call that gets the axis in place of AXIS in ``args``."""
        given = tuple(self.axis() if a is AXIS else a for a in args)
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_function(function, given, kwargs or {})
        return self.be(new)

    def be(self, new: fx.Node) -> fx.Node:
        """Replace the node by ``new``, which stands before it."""
        new.meta = dict(self.node.meta)
        self.node.replace_all_uses_with(new)
        self.node.graph.erase_node(self.node)
        self.node = new
        return new


Rewrite = Callable[[Scene], None]


def convert(value: fx.Node, readers: Iterable[fx.Node], write: Callable[[], fx.Node]) -> fx.Node:
    """One conversion for all ``readers`` that want the same type, right after its value and behind all placeholders."""
    with value.graph.inserting_before(last_of_header(value).next):  # several calls keep their order
        call = write()
    for reader in readers:
        reader.replace_input_with(value, call)
    return call


def rewrite(scene: Scene, forms: Mapping[Form, Rewrite]) -> fx.Node:
    """The op in its form: one of every axis, or one of ``forms``. Returns the node that has the value."""
    form = scene.option.form
    if form not in SAME_OP:
        (REWRITES.get(form) or forms[form])(scene)
    elif scene.option.out.is_sharded:
        scene.node.args = tuple(with_sizes(scene.node, scene.node.args, scene.local_shape()))
    return scene.node


def _sized(scene: Scene) -> None:
    """Written sizes and bounds."""
    scene.node.args = tuple(local_arguments(scene.node, scene.option, scene.size))


def _mean(scene: Scene) -> None:
    """P = Σ over ranks of (local mean · local/global)."""
    node = scene.node
    with node.graph.inserting_after(node):
        new = node.graph.call_function(aten.mul.Tensor, (node, 1.0 / scene.size))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    scene.node = new


def local_arguments(node: fx.Node, option: Option, size: int) -> list[Any]:
    """The arguments of ``node``, of the full program, for one rank."""
    change = CHANGES.get(option.form)
    return change(node, option, size) if change else list(node.args)


def _sizes(node: fx.Node, option: Option, size: int) -> list[Any]:
    args, place = list(node.args), 1 if node.all_input_nodes else 0
    if option.out.is_sharded:
        args[place] = list(option.out.local_shape(shape_of(node), size))
    return args


def _split(node: fx.Node, option: Option, size: int) -> list[Any]:
    args: list[Any] = list(node.args)
    if option.out.is_sharded and option.out.dim == args[2]:
        args[1] = _local_sizes(option.out, args[1], size)
    return args


def _segment(node: fx.Node, option: Option, size: int) -> list[Any]:
    args: list[Any] = list(node.args)
    whole = sum(option.args[0].sizes)
    before, length, _ = _local_sizes(option.args[0], [args[2], args[3] - args[2], whole - args[3]], size)
    args[2:4] = before, before + length
    return args


def _strided(node: fx.Node, option: Option, size: int) -> list[Any]:
    args: list[Any] = list(node.args)
    args[3] = option.args[0].local_size(size)
    return args


def _local_sizes(cut: Placement, sizes: list[int], size: int) -> list[int]:
    pieces = pieces_of(cut, sizes)
    assert pieces is not None
    return [p.local_size(size) if p.is_sharded else n for p, n in zip(pieces, sizes, strict=True)]


CHANGES: dict[Form, Callable[[fx.Node, Option, int], list[Any]]] = {
    Form.SIZES: _sizes,
    Form.SPLIT: _split,
    Form.SEGMENT: _segment,
    Form.STRIDED: _strided,
}
SAME_OP = frozenset({Form.WHOLE, Form.PARTS, Form.PARTIAL, Form.SUM, Form.COLUMN, Form.ROW, Form.ROWS})
REWRITES: dict[Form, Rewrite] = {**dict.fromkeys(CHANGES, _sized), Form.MEAN: _mean}

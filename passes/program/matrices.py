"""The hidden matrices of a model, and how each weight is made of them, for update rules that see whole matrices; and
the roles of parameters.

hidden      a weight of products alone, with another such weight after it: no embedding, no table that is added, and no
            output projection, which has none between it and the loss
q, k, v     a fused weight is one matrix for each part into which its result is cut: [q | k | v], or head by head. Parts
            that are put together again (halves of a rotation) are one. By heads, each head of a part that attention
            reads is one
experts     a stack is one matrix for each expert

The role of each parameter, from the ops that read it: how fresh weights are drawn depends on it.

scale      of a norm, or a vector that multiplies         residual   a matrix with a product added to activations
bias       any other vector                               ""         any other matrix
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import NamedTuple

import torch
from torch import Tensor, fx

from passes.program.ops import groups
from passes.program.ops.aten import aten, packet_of, permutation
from passes.program.walks import readers, walk
from passes.program.weights import is_weight


@dataclass(frozen=True, slots=True)
class Matrices:
    """The last two dims of a weight [.., a, b] hold these matrices: ``dim`` (of the weight) is ``repeats`` times the
    rows of ``sizes``, one after another.

        [q | k | v]     repeats 1, sizes (h·d, h·d, h·d)          head by head     repeats h, sizes (d, d, d)
    """

    dim: int
    repeats: int
    sizes: tuple[int, ...]

    @property
    def period(self) -> int:
        return sum(self.sizes)

    def ranges(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of elements of matrix ``index`` along ``dim``."""
        first = sum(self.sizes[:index])
        for start in range(first, self.repeats * self.period, self.period):
            yield start, start + self.sizes[index]


def find_matrices(graph: fx.Graph, parameters: Mapping[str, str], *, by_heads: bool = False) -> dict[str, Matrices]:
    """Map the fqn of each hidden weight to its matrices. ``parameters``: placeholder → fqn."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in parameters or node.meta["val"].dim() < 2:
            continue
        reads = list(_reads(node, -2))
        # another product with a weight reads a result
        after = walk([user for read in reads if read for user in read.product.users], readers, stop=_is_of_weight)
        if reads and all(read is not None for read in reads) and any(map(_is_of_weight, after)):
            found[parameters[node.name]] = _matrices(node, [read for read in reads if read is not None], by_heads)
    return found


class Read(NamedTuple):
    """A product that reads a weight as ``operand``. ``rows``: its dim, from the end, that is the weight's second to
    last; None if that is not known.
    """

    product: fx.Node
    operand: fx.Node
    rows: int | None


def _reads(node: fx.Node, rows: int | None) -> Iterator[Read | None]:
    """Yield the products that read a weight, or a value with its elements; None for a reader of another kind."""
    for user in node.users:
        if user.target in groups.PRODUCTS or groups.is_grouped(user.target):
            yield Read(user, node, rows)
        elif user.target in groups.PERMUTES:
            yield from _reads(user, None if rows is None else _moved(user, node, rows))
        elif user.target in groups.RESHAPES:
            yield from _reads(user, None)
        elif user.target is getitem or user.target in _ELEMENTS:
            yield from _reads(user, rows)
        else:
            yield None


_ELEMENTS = groups.CASTS | groups.COPIES | groups.CUTS | groups.SPLITS | groups.LOOKUPS


def _moved(permute: fx.Node, given: fx.Node, dim: int) -> int:
    """Where a dim goes, counted from the end."""
    moved = permutation(permute.target, given.meta["val"].dim(), permute.args[1:], permute.kwargs)
    return moved.index(dim % len(moved)) - len(moved)


def _is_of_weight(node: fx.Node) -> bool:
    if node.target not in groups.PRODUCTS and not groups.is_grouped(node.target):
        return False
    return any(is_weight(operand) and operand.meta["val"].dim() > 1 for operand in node.all_input_nodes)


# ---- the parts of a fused weight


def _matrices(weight: fx.Node, reads: list[Read], by_heads: bool) -> Matrices:
    shape = weight.meta["val"].shape
    whole = Matrices(len(shape) - 2, 1, (shape[-2],))
    found = {_by_cuts(read, shape, by_heads) for read in reads}
    made = found.pop() if len(found) == 1 else None
    return whole if made is None else made


def _by_cuts(read: Read, shape: Sequence[int], by_heads: bool) -> Matrices | None:
    """Cut as the result of a product is; ``by_heads``: and then into heads, if each has its rows side by side."""
    product, of_result = read.product, -2 if read.product.target is aten.linear.default else -1
    if read.rows is None or product.target is aten.einsum.default or read.operand is not product.args[1]:
        return None
    dim = of_result if read.rows == -2 else -3 - of_result  # of the weight itself
    size = shape[dim]
    if product.meta["val"].shape[-1] != size:
        return None
    rows = torch.arange(size).expand(product.meta["val"].shape)
    parts = list(_parts(product, rows))
    heads = [head for part in parts for head in _heads(*part)] if by_heads else []
    made = _pattern(len(shape) + dim, size, heads) if heads else None
    return made or _pattern(len(shape) + dim, size, [_distinct(of_part) for _, of_part in parts])


def _parts(node: fx.Node, rows: Tensor) -> Iterator[tuple[fx.Node, Tensor]]:
    """Yield each part into which the value is cut, and its rows. ``rows``: that of each element; along other dims it
    does not change, and has no strides."""
    users = [user for user in node.users if user.op == "call_function"]
    if len(users) == 1 and (seen := _seen(users[0], rows)) is not None:
        yield from _parts(users[0], seen)
        return
    cuts = list(_cuts(users, rows))
    parts = [] if None in cuts else [cut for cut in cuts if cut is not None]
    held = [_distinct(x) for _, x in parts]
    is_tiled = sum(map(len, held)) == len(_distinct(rows)) == len(torch.cat(held).unique()) if held else False
    if len(parts) < 2 or not is_tiled or _meet_again([user for user, _ in parts]):
        yield node, rows
        return
    for user, x in parts:
        yield from _parts(user, x)


def _seen(user: fx.Node, rows: Tensor) -> Tensor | None:
    """Return ``rows`` behind a reader that only lays the elements out, or adds a bias."""
    if user.target in groups.RESHAPES:
        try:
            return rows.view(user.meta["val"].shape)
        except RuntimeError:
            return None
    if user.target in groups.PERMUTES:
        return user.target(rows, *user.args[1:], **user.kwargs)  # pyright: ignore[reportCallIssue]
    if user.target in groups.LAID_OUT and user.meta["val"].shape == rows.shape:
        return rows
    is_bias = user.target is aten.add.Tensor and any(is_weight(n) for n in user.all_input_nodes)
    return rows if is_bias and user.meta["val"].shape == rows.shape else None


def _cuts(users: list[fx.Node], rows: Tensor) -> Iterator[tuple[fx.Node, Tensor] | None]:
    for user in users:
        if user.target in groups.CUTS:
            yield user, user.target(rows, *user.args[1:], **user.kwargs)  # pyright: ignore[reportCallIssue]
        elif user.target in groups.SPLITS:
            parts = user.target(rows, *user.args[1:], **user.kwargs)  # pyright: ignore[reportCallIssue]
            for part in user.users:
                yield (part, parts[part.args[1]]) if part.target is getitem else None
        else:
            yield None


def _heads(part: fx.Node, rows: Tensor) -> list[Tensor]:
    """The rows of each head, if attention reads the part as heads, such as [b, h, s, d]; else those of the part."""
    by_dim = _each_once(rows)
    beyond = [node for node in walk([part], readers, stop=_is_product) if not _is_of_weight(node)]
    # a product of two activations is half of an attention
    is_read = any(node.target in groups.ATTENTION or node.target in groups.PRODUCTS for node in beyond)
    return list(by_dim.flatten(0, -2)) if by_dim.dim() > 1 and is_read else [by_dim.flatten()]


def _distinct(rows: Tensor) -> Tensor:
    """Return the rows, each once, in their order."""
    return _each_once(rows).flatten()


def _each_once(rows: Tensor) -> Tensor:
    """Drop the dims along which the rows do not change."""
    return rows[tuple(0 if stride == 0 else slice(None) for stride in rows.stride())]


def _meet_again(parts: list[fx.Node]) -> bool:
    """Return whether several of them lead to one concatenation, with no product or attention between."""
    joins: set[fx.Node] = set()
    for part in parts:
        beyond = walk([part], readers, stop=lambda n: _is_join(n) or _is_product(n), most=200)
        reached = set(filter(_is_join, beyond))
        if joins & reached:
            return True
        joins |= reached
    return False


def _is_join(node: fx.Node) -> bool:
    return node.target in groups.JOINS or node.target is aten.stack.default


def _is_product(node: fx.Node) -> bool:
    return node.target in groups.PRODUCTS or node.target in groups.ATTENTION or groups.is_grouped(node.target)


def _pattern(dim: int, size: int, parts: list[Tensor]) -> Matrices | None:
    """Return the parts as repeated rows; None if they are no such."""
    parts = sorted((part.sort().values for part in parts), key=lambda part: int(part[0]))
    repeats = int((parts[0].diff() != 1).sum()) + 1
    if any(len(part) % repeats for part in parts):
        return None
    made = Matrices(dim, repeats, tuple(len(part) // repeats for part in parts))
    wanted = [torch.cat([torch.arange(a, b) for a, b in made.ranges(i)]) for i in range(len(parts))]
    is_so = repeats * made.period == size and all(map(torch.equal, wanted, parts))
    return made if is_so else None


def parameter_roles(graph: fx.Graph, parameters: Mapping[str, str]) -> dict[str, str]:
    """The role of each parameter of a captured graph, by fqn: "scale", "bias", "residual", or "" for other weights."""
    return {parameters[n.name]: _role(n) for n in graph.nodes if n.op == "placeholder" and n.name in parameters}


def _role(node: fx.Node) -> str:
    uses = [(user, position) for user in node.users for position, arg in enumerate(user.args) if arg is node]
    names = [(getattr(user.target, "_opname", str(user.target)), position) for user, position in uses]
    if any("norm" in name for name, _ in names):
        # the weight stands before the bias in every norm's arguments
        first = min(p for name, p in names if "norm" in name)
        user = next(user for user, p in uses if p == first)
        earlier = [
            a for a in user.args[:first] if isinstance(a, fx.Node) and a.op == "placeholder" and a.meta["val"].ndim == 1
        ]
        return "bias" if earlier else "scale"
    if node.meta["val"].ndim <= 1:
        return "scale" if any(name.startswith("mul") for name, _ in names) else "bias"
    return "residual" if any(_writes_residual(user) for user, _ in uses) else ""


def _writes_residual(node: fx.Node) -> bool:
    """Whether the output of this linear reaches, through views, dropout and its bias, a sum of two activations."""
    if node.target in groups.PERMUTES:
        return any(_writes_residual(user) for user in node.users)
    if node.target not in groups.WITH_WEIGHT and node.target is not aten.matmul.default:
        return False
    while len(node.users) == 1:
        (node,) = node.users
        packet = packet_of(node.target)
        if packet is aten.add and all(isinstance(a, fx.Node) and a.op != "placeholder" for a in node.args[:2]):
            return True
        if packet not in groups.LAID_OUT and packet not in (aten.add, aten.dropout, aten.native_dropout, getitem):
            return False
    return False

"""Causal convolutions and scans end at the borders of packed documents, though the model does not know of any.

    conv(x)[.., t] = Σ w[j] · x[.., t − j]      a tap reads a token of its own document, or 0: over windows of taps,
                                                where(positions[t] ≥ j, x[.., t − j], 0)
    state ← exp(a[t]) · state + …               of the state before a document nothing is left: its first decay is 0.
    … · exp(Σ a[s + 1 .. t])                    In chunks a scan multiplies by exponentials of sums of a. Each is 0 if
                                                the same sum of 1 at first tokens, and 0 elsewhere, is not 0

Whether that is enough, and a document is computed as if alone, a trial says (passes.partition.sequence.crossing).
"""

from typing import Any

import torch
from torch import fx

from passes.program.builder import Builder, arguments_with, prune
from passes.program.ops.aten import aten, is_pointwise, named, packet_of, shape_of
from passes.program.ops.groups import CASTS, CHOICES, PADS, Ops
from passes.program.program import PACKED, Program
from passes.program.source_lines import where_of
from passes.program.walks import in_order, operands, walk
from passes.rules.rule import RESULT, OpRule, operands_of
from passes.rules.table import rule_of

MOST_STEPS = 512  # of a chunk
Layout = tuple[int, int]  # the dims of sequences and of their tokens
ALONE = -1  # in place of the dim of sequences, if there is one sequence


def end_at_borders(program: Program, positions: str) -> bool:
    """Rewrite ``program`` in place; returns whether anything has changed. ``positions``: the placeholder of the place
    of each token in its document [b, tokens].
    """
    ends = _Ends(program, program.node(positions))
    before = len(program.rewrites)
    for node in list(program.graph.graph.nodes):
        ends.visit(node)
    prune(program.graph.graph)
    return len(program.rewrites) > before


class _Ends:
    """Owns the layouts of values that are rows of tokens, and the values of positions alone, which stand first."""

    def __init__(self, program: Program, positions: fx.Node) -> None:
        self.program, self.positions = program, positions
        self.sizes = shape_of(positions)
        self.graph = program.graph.graph
        first = next(n for n in self.graph.nodes if n.op == "call_function")
        self.head = Builder(self.graph, first, first)
        self.layouts: dict[fx.Node, Layout] = {}
        self.longer: dict[fx.Node, Layout] = {}  # with rows behind those of tokens
        self.of_tokens: set[fx.Node] = set()
        self.counts: dict[fx.Node, fx.Node | None] = {}  # of values, None for others than sums
        self.counted: set[fx.Node] = set()  # the counts over several tokens
        self.made: dict[str, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        if node.name in self.program.inputs and node is not self.positions:
            self.of_tokens.add(node)
            if shape_of(node)[:2] == self.sizes:
                self.layouts[node] = (0 if self.sizes[0] > 1 else ALONE, 1)
        elif node.op == "call_function" and any(n in self.of_tokens for n in node.all_input_nodes):
            self.of_tokens.add(node)
            if (layout := self._carried(node)) is not None:
                self.layouts[node] = layout
            elif any(n in self.longer for n in node.all_input_nodes):
                self._shorter(node)
            elif node.target is aten.conv1d.default:
                self._convolution(node)
            elif node.target is aten.exp.default:
                self._decay(node, node.all_input_nodes[0])

    def _carried(self, node: fx.Node) -> Layout | None:
        """Return the dims of a result that is computed token by token; None for others."""
        rule = rule_of(node)
        for i, n in enumerate(operands_of(node)):
            if rule is not None and n in self.layouts:
                pairs = zip(self.layouts[n], self.sizes, strict=True)
                sequences, tokens = (_carried_dim(rule, i, dim, size, shape_of(node)) for dim, size in pairs)
                if sequences is not None and tokens is not None:
                    return sequences, tokens
        return None

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Return one call for all layers."""
        key = str((target, args, kwargs))
        if key not in self.made:
            self.made[key] = self.head.call(target, *args, **kwargs)
        return self.made[key]

    def _places(self, size: int) -> fx.Node:
        return self._call(aten.arange.default, size, device=torch.device("cpu"))

    # ---- convolutions

    def _convolution(self, node: fx.Node) -> None:
        """Behind the last token there may be results of the padding there, as many as the model will leave out."""
        given: Any = named(node)
        x, weight, (padding,) = given["input"], given["weight"], given["padding"]
        (batch, tokens), (channels, inner, taps), length = self.sizes, shape_of(weight), shape_of(node)[2]
        if x.target is aten.pad.default and list(x.args[1]) == [taps - 1, 0] and not padding:
            x, padding = x.args[0], taps - 1
        is_plain = ([*given["stride"]], [*given["dilation"]], inner, given["groups"]) == ([1], [1], 1, channels)
        layout = self.layouts.get(x)
        if not is_plain or padding != taps - 1 or layout not in ((0, 2), (ALONE, 2)) or shape_of(x)[0] != batch:
            return
        build = Builder(self.graph, node, node)
        padded = build.call(aten.pad.default, x, [taps - 1, length - tokens], "constant", 0.0)
        windows = build.call(aten.unfold.default, padded, 2, taps, 1)
        kept = build.call(aten.where.ScalarOther, self._seen(length, taps), windows, 0)
        rows = build.call(aten.reshape.default, kept, [batch, channels, length * taps])
        made = build.call(aten.conv1d.default, rows, weight, given["bias"], [taps], [0], [1], channels)
        node.replace_all_uses_with(made)
        self.of_tokens.add(made)
        (self.layouts if length == tokens else self.longer)[made] = layout
        self._tell(made, f"this convolution reads windows of {taps} tokens, each of one document")

    def _seen(self, length: int, taps: int) -> fx.Node:
        """Return [b, 1, length, taps]: whether a token of the window is of the document of its last one."""
        (batch, tokens), places = self.sizes, self.positions
        if length > tokens:
            places = self._call(aten.pad.default, places, [0, length - tokens], "constant", 0.0)
        places = self._call(aten.reshape.default, places, [batch, 1, length, 1])
        return self._call(aten.ge.Scalar, self._call(aten.add.Tensor, places, self._places(taps)), taps - 1)

    def _shorter(self, node: fx.Node) -> None:
        """Note of results of tokens, and of what is behind them, those of tokens."""
        layout = next(self.longer[n] for n in node.all_input_nodes if n in self.longer)
        if is_pointwise(node.target):
            self.longer[node] = layout
        elif node.target is aten.slice.Tensor and node.args[1:] == (layout[1], 0, self.sizes[1]):
            self.layouts[node] = layout

    # ---- scans

    def _decay(self, node: fx.Node, logarithm: fx.Node) -> None:
        """End sums of logarithms at borders: their exponential is 0 where one lies between the first and the last."""
        count = self._count(logarithm)
        if count is None or count not in self.counted:
            return
        sums = list(walk([logarithm], operands, into=self.counts.__contains__, stop=self.layouts.__contains__))
        if any(_is_of_two(n) for n in sums):
            for running in (n for n in sums if n.target is aten.cumsum.default and n in self.of_tokens):
                self._restart(running)
        kept = self._call(aten.eq.Scalar, count, 0)
        made = Builder(self.graph, node.next, node).call(aten.where.ScalarOther, kept, node, 0)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        self.of_tokens.add(made)
        self._tell(node, "this scan begins again with each document: its decay over a border is 0")

    def _restart(self, node: fx.Node) -> None:
        """A running sum of which differences are taken: rounded by no token of another document.

        y[t] = Σ over s ≤ t of where(borders up to s = borders up to t, x[s], 0)
        """
        x, shape = node.all_input_nodes[0], list(shape_of(node))
        dim: int = node.args[1] % len(shape)  # pyright: ignore
        count, size = self.counts[node], shape[dim]
        if size > MOST_STEPS or node.kwargs:
            return
        of_rows, of_columns = [*shape[: dim + 1], 1, *shape[dim + 1 :]], [*shape[:dim], 1, *shape[dim:]]
        places, behind = self._places(size), [1] * (len(shape) - dim - 1)
        rows, columns = (self._call(aten.reshape.default, places, [*n, *behind]) for n in ([size, 1], [1, size]))
        counts = [self._call(aten.reshape.default, count, sizes) for sizes in (of_rows, of_columns)]
        same, before = self._call(aten.eq.Tensor, *counts), self._call(aten.ge.Tensor, rows, columns)
        build = Builder(self.graph, node.next, node)
        read = build.call(aten.reshape.default, x, of_columns)
        read = build.call(aten.where.ScalarOther, self._call(aten.__and__.Tensor, same, before), read, 0)
        made = build.call(aten.sum.dim_IntList, read, [dim + 1])
        node.replace_all_uses_with(made)
        self.counts[made] = count
        self.of_tokens.add(made)

    def _count(self, value: fx.Node) -> fx.Node | None:
        """Return the same sums, of 1 at borders in place of logarithms."""
        for node in in_order([value], self.counts, lambda n: () if n in self.layouts else n.all_input_nodes):
            self.counts[node] = self._counted(node)
        return self.counts[value]

    def _counted(self, node: fx.Node) -> fx.Node | None:
        """Return a value that no token reaches itself; None for others than sums."""
        given = [self.counts.get(n) for n in node.all_input_nodes]
        if node in self.layouts:
            return self._borders(node)
        if node.op != "call_function" or None in given:
            return None if node in self.of_tokens else node
        args, kwargs = arguments_with(node, self.counts)  # pyright: ignore[reportArgumentType]
        if node not in self.of_tokens:
            return self._call(node.target, *args, **kwargs)
        if node.target in CASTS:
            return args[0]
        made = self._chosen(node, args) if node.target in CHOICES else self._linear(node, args, kwargs)
        is_sum = packet_of(node.target) in (aten.cumsum, aten.sum)
        if made is not None and (is_sum or not self.counted.isdisjoint(given)):
            self.counted.add(made)
        return made

    def _linear(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node | None:
        rule, is_padded = rule_of(node), node.target in PADS and named(node).get("value")
        is_linear = rule is not None and frozenset(range(len(operands_of(node)))) in rule.linear
        if not is_linear or is_padded or not self.of_tokens.issuperset(node.all_input_nodes):
            return None
        if _is_of_two(node) and not all(n in self.of_tokens for n in node.args):
            return None
        return self._call(node.target, *args, **kwargs)

    def _chosen(self, node: fx.Node, args: Any) -> fx.Node | None:
        """Return where(mask, count, 0): what stands in place of a sum is no sum."""
        order = (0, 1, 2) if node.target in Ops("where") else (1, 2, 0)  # masked_fill(no, mask, yes)
        (of_mask, of_yes, of_no), (mask, yes, no) = ([x[i] for i in order] for x in (node.args, args))
        if of_mask in self.of_tokens or all(n in self.of_tokens for n in (of_yes, of_no)):
            return None
        if of_yes in self.of_tokens:
            return self._call(aten.where.ScalarOther, mask, yes, 0)
        return self._call(aten.where.ScalarSelf, mask, 0, no)

    def _borders(self, node: fx.Node) -> fx.Node:
        """Return 1 at the first token of each document but that of a sequence, in the shape of a value."""
        (sequences, tokens), shape = self.layouts[node], shape_of(node)
        begins, places = self._call(aten.eq.Scalar, self.positions, 0), self._places(self.sizes[1])
        within = self._call(aten.__and__.Tensor, begins, self._call(aten.gt.Scalar, places, 0))
        found = self._call(aten.to.dtype, within, torch.float32)
        if tokens < sequences:
            found = self._call(aten.permute.default, found, [1, 0])
        sizes = [n if d in (sequences, tokens) else 1 for d, n in enumerate(shape)]
        return self._call(aten.expand.default, self._call(aten.reshape.default, found, sizes), list(shape))

    def _tell(self, node: fx.Node, what: str) -> None:
        self.program.rewrites.append((PACKED + what, where_of(node)))


def _is_of_two(node: fx.Node) -> bool:
    return packet_of(node.target) in (aten.add, aten.sub)


def _carried_dim(rule: OpRule, operand: int, dim: int, size: int, shape: tuple[int, ...]) -> int | None:
    """Return the dim of the result that counts the same, each by itself."""
    if dim == ALONE:
        return dim
    place = rule.carried(operand, dim, 1, size, RESULT) if rule.is_alone(operand, dim) else None
    return place[0] if place is not None and place[1] == 1 and shape[place[0]] == size else None

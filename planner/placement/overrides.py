"""Overrides of a spec: the parameters that they match, their possible styles, and the kinds of blocks that follow.

    column    sharded along its output features            vocab   sharded along the rows of a vocabulary
    row       sharded along its input features             expert  a stack of matrices: full matrices on each rank
    replicate replicated on every rank

The last glob that matches a parameter decides. A glob that decides nothing is an error.

A vector is sharded like the features that it is combined with. If the same override matches a matrix of its module,
the vector follows that matrix, as a bias does.

Blocks of one kind with different overrides are decided separately: each group has its own first block.

    overrides {"h.0.mlp.up": replicate}      h.0 alone is a kind; h.2 … repeat h.1
    overrides {"h.*.mlp.up": replicate}      all repeat h.0, as without overrides
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import fx

from passes.blocks.blocks import Blocks
from passes.errors import PlanError
from passes.partition.typings.base import Form
from passes.partition.typings.products import contraction
from passes.partition.typings.table import Option, rule_of
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.program import Program
from passes.program.walks import readers, walk
from passes.program.weights import is_computed_weight
from passes.rules.flops import has_flops
from passes.types.types import Placement
from planner.placement.candidates import Candidates, uneven_words

aten = torch.ops.aten
OF_FORM = {Form.ROW: "row", Form.VOCABULARY: "vocab", Form.CLASSES: "vocab"}
_MAX_WALK = 100


@dataclass(frozen=True, slots=True)
class Asked:
    """The override that decides a parameter: its glob and its style."""

    pattern: str
    style: str

    @property
    def path(self) -> str:
        return f"tensor_parallel.overrides.{self.pattern}"


def is_meant(program: Program, fqn: str, pattern: str) -> bool:
    """Whether an override's glob matches the parameter, its module, or a name of a tied weight."""
    names = [fqn, *(a for a, first in program.aliases.items() if first == fqn)]
    return any(fnmatchcase(n, pattern) or fnmatchcase(n.rpartition(".")[0], pattern) for n in names)


def asked_of(program: Program, overrides: Mapping[str, str]) -> dict[str, Asked]:
    """Return placeholder → the override that decides it. Raises PlanError for a glob that matches nothing, or that
    later globs override for every parameter it matches."""
    deciding, hits_of = dict[str, Asked](), dict[str, list[str]]()
    for pattern, style in overrides.items():
        hits_of[pattern] = [name for name, fqn in program.parameters.items() if is_meant(program, fqn, pattern)]
        if not hits_of[pattern]:
            _matches_nothing(program, pattern)
        deciding |= dict.fromkeys(hits_of[pattern], Asked(pattern, style))
    for (pattern, hits), style in zip(hits_of.items(), overrides.values(), strict=True):
        if all(deciding[name].style != style for name in hits):
            later = deciding[hits[0]]
            raise PlanError(
                f"tensor_parallel.overrides: `{pattern}: {style}` has no effect: `{later.pattern}: {later.style}` "
                f"comes later and matches {program.parameters[hits[0]]} too",
                where=Asked(pattern, style).path,
                fix="remove one of the two, or write the narrower glob last (names of a tied weight are one parameter)",
            )
    return deciding


def _matches_nothing(program: Program, pattern: str) -> None:
    names = sorted({f.rpartition(".")[0] for f in program.parameters.values()})
    raise PlanError(
        f"tensor_parallel.overrides: `{pattern}` matches no parameter",
        where=Asked(pattern, "").path,
        fix=f"use a glob over dotted names such as {names[0]}" if names else "the model has no parameters",
    )


def kinds_by_override(program: Program, blocks: Blocks, overrides: Mapping[str, str]) -> Blocks:
    """Return ``blocks`` with representatives that are shared only by blocks with equal overrides."""
    asked = asked_of(program, overrides)
    if not asked:
        return blocks
    same, leaders = dict(blocks.representative), {}
    for block, members in zip(blocks.instances, _members(program, blocks), strict=True):
        styles = tuple((inner, asked[own]) for inner, own in sorted(members.items()) if own in asked)
        leader = leaders.setdefault((block.kind, styles), members)
        same.update((own, leader[inner]) for inner, own in members.items())
    return replace(blocks, representative=same)


def _members(program: Program, blocks: Blocks) -> list[dict[str, str]]:
    """Return for each block: node of the first block of its kind → its own node or a parameter that only it reads."""
    block_of = blocks.block_of()
    members = [{blocks.representative[name]: name for name in block.nodes} for block in blocks.instances]
    for name in program.parameters:
        reading = {block_of.get(user.name) for user in program.node(name).users}
        index = reading.pop() if len(reading) == 1 else None
        if index is not None:
            members[index][blocks.representative[name]] = name
    return members


class Overrides:
    """The overrides of parameters that reach the loss; refuses at once those of other parameters."""

    def __init__(self, program: Program, candidates: Candidates, asked: Mapping[str, Asked]) -> None:
        self.program, self.candidates = program, candidates
        known = {node.name: node for node in candidates.nodes}
        self.asked = {name: wish for name, wish in asked.items() if name in known and known[name].users}
        self.followed = {
            (wish.pattern, self._module(name))
            for name, wish in self.asked.items()
            if not self._is_vector(program.node(name))
        }
        read = {wish for name, wish in asked.items() if program.node(name).users}
        for wish in dict.fromkeys(wish for name, wish in asked.items() if name not in self.asked and wish not in read):
            if wish.style != "replicate":
                self._refuse(next(n for n in asked if asked[n] == wish), wish, "it does not reach the loss", set())

    def constrain(self) -> None:
        """Restrict each parameter to the options of its style. Raises PlanError if there are none."""
        for name, wish in self.asked.items():
            node, options = self.program.node(name), self.candidates.options[name]
            kept = [o for o in options if self._fits(node, o, wish)]
            if not kept:
                cuts = [o.out for o in options if o.out.is_sharded and not self._is_detour(node, o.out)]
                possible = {s for cut in cuts for s in self.styles(node, cut)}
                self._refuse(name, wish, self.obstacle(node, wish.style), possible)
            self.candidates.options[name] = kept

    def check(self, options: Mapping[str, Option]) -> None:
        """Raise PlanError if a vector is sharded although the features that it is combined with are replicated."""
        for name, wish in self.asked.items():
            node = self.program.node(name)
            if self._is_vector(node) and options[name].out.is_sharded and not self._follows(name, wish):
                for reader, position in self.candidates.reading(node):
                    others = [i for i in range(len(reader.all_input_nodes)) if i != position]
                    if any(self._is_torn(options, reader, i) for i in others):
                        self._refuse(name, wish, "the features that it is applied to are not sharded", set())

    def _is_torn(self, options: Mapping[str, Option], reader: fx.Node, position: int) -> bool:
        wanted = options[reader.name].args[position]
        producers = [n for n in self.candidates.making(reader, position) if n.name not in self.program.parameters]
        return wanted.is_sharded and any(not options[n.name].out.is_sharded for n in producers if n.meta.get("grad"))

    def _fits(self, node: fx.Node, option: Option, wish: Asked) -> bool:
        if wish.style == "replicate":
            return not option.out.is_sharded
        if self._is_vector(node) and self._follows(node.name, wish):
            return True
        return option.out.is_sharded and wish.style in self.styles(node, option.out)

    def _follows(self, name: str, wish: Asked) -> bool:
        return (wish.pattern, self._module(name)) in self.followed

    def styles(self, node: fx.Node, cut: Placement) -> Iterator[str]:
        """Yield the style names of a sharding, from its use in the readers; looks through reshapes of weights."""
        for reader, position in self.candidates.reading(node):
            for option in self.candidates.options[reader.name]:
                if option.args[position] != cut:
                    continue
                if is_computed_weight(reader) and option.out.is_sharded:
                    yield from self.styles(reader, option.out)
                    continue
                is_of_stack = _is_of_stack(node, option, reader, cut)
                if is_of_stack:
                    yield "expert"
                # column parallel needs replicated other operands; tokens of each expert are sharded with the stack
                if not is_of_stack or not any(t.is_sharded for i, t in enumerate(option.args) if i != position):
                    yield OF_FORM.get(option.form, "column")
                if option.form is Form.COLUMN and _meets_a_loss(reader):
                    yield "vocab"

    def _is_detour(self, node: fx.Node, cut: Placement) -> bool:
        """Whether all readers of such a shard compute statistics over sharded features, as a norm does."""
        reading, options = self.candidates.reading(node), self.candidates.options
        return all(o.detour for reader, i in reading for o in options[reader.name] if o.args[i] == cut)

    def obstacle(self, node: fx.Node, style: str) -> str:
        shape = node.meta["val"].shape
        if self._is_vector(node) and style in ("row", "expert"):
            return "it is a vector"
        if style == "vocab" and not any(r.target is aten.embedding.default or _meets_a_loss(r) for r in node.users):
            return "it is not a vocabulary table"
        if style == "expert" and len(shape) < 3:
            return "it is not a stack of matrices"
        return uneven_words(shape, self.candidates.tp, ",") or "no op that reads it can run on such a shard"

    def _refuse(self, name: str, wish: Asked, why: str, possible: set[str]) -> None:
        styles = ", ".join(sorted(possible | {"replicate"}))
        raise PlanError(
            f"tensor_parallel.overrides: {self.program.parameters[name]} cannot be {wish.style}: {why}",
            where=wish.path,
            fix=f"it can be {styles}; or remove it, and the solver decides",
        )

    def _module(self, name: str) -> str:
        return self.program.parameters[name].rpartition(".")[0]

    @staticmethod
    def _is_vector(node: fx.Node) -> bool:
        return len(node.meta["val"].shape) < 2


def _is_of_stack(weight: fx.Node, option: Option, product: fx.Node, cut: Placement) -> bool:
    """Whether ``cut`` shards a stack of matrices [e, i, o] along e, which the product keeps as a batch dim."""
    is_product = rule_of(product) is contraction
    return is_product and option.form is Form.COLUMN and cut.dim == 0 and weight.meta["val"].dim() > 2


def _meets_a_loss(product: fx.Node) -> bool:
    """Whether the result of ``product`` is the logits of a loss: no other product lies between them."""
    after = walk([product], readers, stop=lambda n: n is not product and has_flops(n), most=_MAX_WALK)
    return any(n.target in CROSS_ENTROPIES for n in after)

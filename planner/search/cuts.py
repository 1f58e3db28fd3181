"""The sharding of the captured model under one cut: decided once per tp, cp and so on, on the folded program.

    captured → folded         three blocks of each row of equal ones: a cut costs as much as of a few layers
    cp, ep, etp → variant     the sequence cut, the experts opened
    + tp, sequence parallel   placements, stages of one pipeline rank, shards → CutWork, unfolded

    kinds    a a a a a a a b b b b b        a a a b b b        of a row of equal blocks three are left:
    source   0 1 1 1 1 1 2 3 4 4 4 5                           the first, one between, the last

The first block follows something unique (an embedding), and the last precedes a head; those between are alike, so one
represents all. Readers of a row's results then read the remaining blocks. A model is folded only if that is exact: the
results of the blocks in between are read by their neighbours alone, and only blocks compute.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

from torch import fx

from passes.blocks.blocks import Block, Blocks
from passes.blocks.live_sets import needed_anchors, recomputed_nodes, stages_of_copies
from passes.moe.find import find_experts
from passes.partition.sequence.flow import longest_sequence
from passes.pieces import NONE
from passes.program.program import Program, copied, program_of
from planner.captured import Prepared
from planner.cluster.cluster import Cluster
from planner.cost.cut.units import CutWork
from planner.cost.planned import cut_work
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.pipeline.layout import may_be_alone
from planner.pipeline.stages import BlockCosts, balanced_sizes, block_costs
from planner.recipe import Opened, blocks_of, decide_cut, opened
from planner.search.space import Cut, Facts
from planner.sharding.shards import decide_shards
from planner.spec.fields import AUTO
from planner.spec.spec import Spec


@dataclass(frozen=True, slots=True)
class _Variant:
    """The program of some cp, ep and etp. ``source``: for each block of the model, which of ``blocks`` it is here."""

    opened: Opened
    blocks: Blocks
    source: tuple[int, ...]
    costs: BlockCosts


_LEFT = 3  # blocks of a row: the first, one between, the last


@dataclass(frozen=True, slots=True)
class Folded:
    """``source``: for each block of the model, the index in ``blocks`` that represents it; it ascends."""

    program: Program
    blocks: Blocks
    source: tuple[int, ...]

    @property
    def is_folded(self) -> bool:
        return len(self.source) > len(self.blocks.instances)


def fold(program: Program, blocks: Blocks) -> Folded:
    """Copy ``program`` with three blocks of each row of equal ones; with all blocks if that is not exact."""
    rows = [list(row) for _, row in groupby(blocks.instances, key=lambda block: block.kind)]
    rows = [row for row in rows if len(row) > _LEFT and _is_foldable(program, blocks, row)]
    whole = _whole(program, blocks)
    if not rows:
        return whole
    dropped = {block.index for row in rows for block in row[2:-1]}
    names = {name for block in blocks.instances if block.index in dropped for name in block.nodes}
    folded = _without(program, names, _instead(blocks, rows))
    if folded is None:
        return whole
    kept = [block for block in blocks.instances if block.index not in dropped]
    source = tuple(_stands_for(block.index, kept, rows) for block in blocks.instances)
    there = {node.name for node in folded.graph.graph.nodes}
    times = Counter(source)
    return Folded(
        folded,
        Blocks(
            tuple(replace(block, index=index) for index, block in enumerate(kept)),
            {name: same for name, same in blocks.representative.items() if name in there},
            tuple(times[index] for index in range(len(kept))),
        ),
        source,
    )


def _is_foldable(program: Program, blocks: Blocks, row: list[Block]) -> bool:
    """Whether each of those that go is read by the next block alone, all read the same masks and tables, and no call
    outside of blocks belongs to them, or to a block before them though it comes later."""
    block_of, going = blocks.block_of(), {block.index for block in row[2:-1]}
    homes = _homes_outside(program, block_of)
    if going & set(homes.values()):
        return False
    order = {node.name: at for at, node in enumerate(program.graph.graph.nodes)}
    start = min(order[name] for name in row[2].nodes)
    if any(order[name] > start and home < row[2].index for name, home in homes.items()):
        return False
    for block in row[2:-1]:
        for name in block.nodes:
            readers = {block_of.get(user.name) for user in program.node(name).users}
            if readers - {block.index, block.index + 1}:
                return False
    shared = _read_of_all(program, blocks, row[1])
    if any(_read_of_all(program, blocks, block) != shared for block in row[2:-1]):
        return False
    inverse = {blocks.representative[name] for name in row[1].nodes}
    return all(blocks.representative[name] in inverse for name in row[-2].nodes)


def _homes_outside(program: Program, block_of: Mapping[str, int]) -> dict[str, int]:
    """Return call outside all blocks → the first block of its stage."""
    anchor = needed_anchors(program, block_of, recomputed_nodes(program))
    homes = {node.name: home for node, home in anchor.items()}
    for node, units in stages_of_copies(program, anchor).items():
        if node.op == "call_function" and units:
            homes.setdefault(node.name, units[0])
    return {name: home for name, home in homes.items() if name not in block_of}


def _read_of_all(program: Program, blocks: Blocks, block: Block) -> set[str]:
    """Return operands of ``block`` that are in no block: a mask of some layers is not read by the others."""
    operands = {n.name for name in block.nodes for n in program.node(name).all_input_nodes}
    block_of = blocks.block_of()
    return {name for name in operands if name not in block_of and blocks.representative.get(name, name) == name}


def _instead(blocks: Blocks, rows: list[list[Block]]) -> dict[str, str]:
    """Map each node of the last dropped block to the node of the kept one between, which repeats it."""
    instead: dict[str, str] = {}
    for row in rows:
        own = {blocks.representative[name]: name for name in row[1].nodes}
        instead.update((name, own[blocks.representative[name]]) for name in row[-2].nodes)
    return instead


def _without(program: Program, dropped: set[str], instead: dict[str, str]) -> Program | None:
    """Return the program without these nodes, with other nodes as inputs of their readers; None if a node would lose
    all readers.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    for node in program.graph.graph.nodes:
        is_read_there = node.users and {n.name for n in node.users} <= dropped
        if node.name in dropped or (node.op == "placeholder" and is_read_there):
            continue
        env[node.name] = graph.node_copy(node, lambda n: env[instead.get(n.name, n.name)])
        env[node.name].name = node.name
    idle = [name for name, node in env.items() if node.op == "call_function" and not node.users]
    if any(program.node(name).users for name in idle):
        return None
    return program_of(program, graph)


def _stands_for(index: int, kept: list[Block], rows: list[list[Block]]) -> int:
    """Return the place among ``kept`` of the block that represents the block ``index``."""
    row = next((row for row in rows if row[2].index <= index < row[-1].index), None)
    own = index if row is None else row[1].index
    return next(place for place, block in enumerate(kept) if block.index == own)


class Cuts:
    """Owns the folded model, its variants and the work of each cut. The captured program does not change."""

    def __init__(self, prepared: Prepared, spec: Spec, kinds: Sequence[str], cluster: Cluster | None = None) -> None:
        """``kinds``: the kinds of recompute to compare."""
        self.prepared, self.spec, self.cluster = prepared, spec, cluster
        program = prepared.program
        self.blocks = blocks_of(program, spec)
        self.folded = _whole(program, self.blocks) if spec.tensor_parallel.overrides else fold(program, self.blocks)
        self.kinds = tuple(kinds) if self.blocks.instances else (NONE,)
        self.ends = bool(self.blocks.instances) and may_be_alone(spec.pipeline.split)
        self._variants: dict[tuple[int, ...], _Variant] = {}
        self._sizes: dict[tuple[tuple[int, ...], int, int], list[int]] = {}

    @property
    def facts(self) -> Facts:
        layers = find_experts(self.folded.program).layers
        return Facts(
            len(self.blocks.instances),
            tuple(layer.num_experts for layer in layers),
            longest_sequence(self.prepared.program),
        )

    def works(self, cut: Cut) -> dict[str, CutWork]:
        """Return the cost of the cut under each kind of recompute, for all blocks of the model.

        Raises PlanError if the model does not admit it.
        """
        variant, mesh = self._variant(cut), mesh_of(cut)
        asked = self.spec.tensor_parallel.model_copy(update={"sequence_parallel": cut.sequence_parallel})
        one = self.spec.optimizer.model_copy(update={"zero": 1})  # of a cut the other values are arithmetic
        together = self.spec.pipeline.model_copy(update={"split": AUTO})
        of_cut = {"tensor_parallel": asked, "pipeline": together}
        of_cut |= {"optimizer": one} if self.spec.optimizer.zero == AUTO else {}
        of_cut |= {"recompute": NONE} if self.spec.recompute == AUTO else {}
        spec = self.spec.model_copy(update=of_cut)
        decisions, _ = decide_cut(variant.opened, variant.blocks, self.prepared, spec, mesh)
        return self._unfolded(decisions, spec, variant)

    def stages(self, cut: Cut, pp: int, vpp: int) -> list[int]:
        """Return blocks of each stage, as in a plan."""
        key = _key(cut), pp, vpp
        if key not in self._sizes:
            variant = self._variant(cut)
            self._sizes[key] = balanced_sizes(variant.costs.of_copies(variant.source), pp, vpp)
        return self._sizes[key]

    def _unfolded(self, decisions: Decisions, spec: Spec, variant: _Variant) -> dict[str, CutWork]:
        """Return works by kind: without recompute more values may be gathered again over cp, in a separate work."""
        shards, found = decide_shards(spec, decisions), dict[str, CutWork]()
        parts = [(decisions, self.kinds)]
        if decisions.lowering.options.own_tokens:
            others = tuple(kind for kind in self.kinds if kind != NONE)
            parts = [(decisions, (NONE,)), (decisions.without_own_tokens(), others)]
        for decided, kinds in parts:
            if not kinds:
                continue
            work = cut_work(decided, shards, spec, kinds, ends=self.ends)
            if len(variant.source) > len(variant.blocks.instances):
                work = replace(work.repeated(variant.source), num_noted=_num_noted(decisions))
            found |= dict.fromkeys(kinds, work)
        return found

    def _variant(self, cut: Cut) -> _Variant:
        key = _key(cut)
        if key not in self._variants:
            folded = self.folded
            found = self._cut(folded, cut)
            if found is None:  # other blocks were found in it
                found = self._cut(_whole(self.prepared.program, self.blocks), cut)
            assert found is not None, "the blocks of a whole program are its own"
            self._variants[key] = found
        return self._variants[key]

    def _cut(self, folded: Folded, cut: Cut) -> _Variant | None:
        of, blocks = opened(copied(folded.program), self.spec, mesh_of(cut), self.cluster), folded.blocks
        if of.is_changed:
            seen = blocks_of(of.program, self.spec)
            if folded.is_folded and _pattern(seen) != _pattern(blocks):
                return None
            blocks = replace(seen, times=blocks.times)
        source = folded.source if folded.is_folded else tuple(range(len(blocks.instances)))
        return _Variant(of, blocks, source, block_costs(of.program, blocks))


def mesh_of(cut: Cut) -> Mesh:
    """Return the smallest mesh of one pipeline rank that has these axes."""
    ranks = lcm(cut.tp * cut.cp, cut.etp * cut.ep)
    return Mesh(tp=cut.tp, cp=cut.cp, ep=cut.ep, etp=cut.etp, dp=ranks // (cut.tp * cut.cp))


def _num_noted(decisions: Decisions) -> int:
    """Return figures of experts that a step of the whole model sums."""
    block_of, times = decisions.blocks.block_of(), decisions.blocks.times
    load = decisions.load()
    noted = zip(decisions.experts.layers, load.sizes, load.limits, strict=False)
    rows = [(layer.combined, experts + (limit > 0)) for layer, experts, limit in noted]
    rows += [(asked.chosen[0], asked.size) for asked in decisions.lowering.asked]
    return sum((times[block_of[name]] if name in block_of else 1) * size for name, size in rows)


def _whole(program: Program, blocks: Blocks) -> Folded:
    return Folded(copied(program), blocks, tuple(range(len(blocks.instances))))


def _key(cut: Cut) -> tuple[int, ...]:
    """Return the choices on which the program of a cut depends; over cp it depends on tp too."""
    return cut.cp, cut.ep, cut.etp if cut.has_expert_axes else 0, cut.tp if cut.cp > 1 else 0


def _pattern(blocks: Blocks) -> list[tuple[int, str]]:
    """Return kinds, numbered by their first occurrence, and paths."""
    numbers: dict[int, int] = {}
    return [(numbers.setdefault(block.kind, len(numbers)), block.path) for block in blocks.instances]

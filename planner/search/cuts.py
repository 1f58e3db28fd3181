"""The sharding of the captured model under one cut: decided once per tp, cp and so on, on the folded program.

    captured → folded         three blocks of each row of equal ones
    cp, ep, etp → variant     the sequence cut, the experts opened
    + tp, sequence parallel   placements, stages of one pipeline rank, shards → CutWork, unfolded

An unsupported cut raises the same error as in a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from passes.blocks.blocks import Blocks
from passes.moe.find import find_experts
from passes.partition.sequence.inner_sequences import longest_sequence
from passes.program.copied import copied
from passes.program.program import Program
from planner.captured import Prepared
from planner.cluster.cluster import Cluster
from planner.cost.cut.units import CutWork
from planner.cost.work import cut_work
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.pipeline.split import may_be_alone
from planner.pipeline.stages import BlockCosts, balanced_sizes, block_costs
from planner.recipe import Opened, blocks_of, decide_cut, opened
from planner.recompute.asked import NONE
from planner.search.choice import Cut
from planner.search.fold import Folded, fold
from planner.search.space import Facts
from planner.sharding.shards import decide_shards
from planner.spec.fields import AUTO
from planner.spec.spec import Spec
from planner.updates.rules import decide_rules


@dataclass(frozen=True, slots=True)
class _Variant:
    """The program of some cp, ep and etp. ``source``: for each block of the model, which of ``blocks`` it is here."""

    opened: Opened
    blocks: Blocks
    source: tuple[int, ...]
    costs: BlockCosts


class Cuts:
    """Owns the folded model, its variants and the work of each cut. The captured program does not change."""

    def __init__(self, prepared: Prepared, spec: Spec, kinds: Sequence[str], cluster: Cluster | None = None) -> None:
        """``kinds``: the kinds of recompute to compare."""
        self.prepared, self.spec, self.cluster = prepared, spec, cluster
        program = prepared.program
        self.blocks = blocks_of(program, spec)
        self.folded = _whole(program, self.blocks) if spec.tensor_parallel.overrides else fold(program, self.blocks)
        self.rules = decide_rules(spec.optimizer, program)
        self.kinds = tuple(kinds) if self.blocks.instances else (NONE,)
        self.ends = bool(self.blocks.instances) and may_be_alone(spec.pipeline.split)
        self._variants: dict[tuple[int, ...], _Variant] = {}
        self._sizes: dict[tuple[tuple[int, ...], int, int], list[int]] = {}

    @property
    def facts(self) -> Facts:
        """The facts of the model that bound the search space."""
        layers = find_experts(self.folded.program).layers
        return Facts(
            len(self.blocks.instances),
            tuple(layer.num_experts for layer in layers),
            longest_sequence(self.prepared.program),
        )

    def works(self, cut: Cut) -> dict[str, CutWork]:
        """The cost of the cut under each kind of recompute, for all blocks of the model.

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
        decisions, _ = decide_cut(
            variant.opened, variant.blocks, self.prepared, spec, mesh, rules=self.rules, cluster=self.cluster
        )
        return self._unfolded(decisions, spec, variant)

    def stages(self, cut: Cut, pp: int, vpp: int) -> list[int]:
        """Blocks of each stage, as in a plan."""
        key = _key(cut), pp, vpp
        if key not in self._sizes:
            variant = self._variant(cut)
            self._sizes[key] = balanced_sizes(variant.costs.of_copies(variant.source), pp, vpp)
        return self._sizes[key]

    def _unfolded(self, decisions: Decisions, spec: Spec, variant: _Variant) -> dict[str, CutWork]:
        """Without recompute more values may be gathered again over cp: then it is a work of its own."""
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
    """The smallest mesh of one pipeline rank that has these axes."""
    ranks = lcm(cut.tp * cut.cp, cut.etp * cut.ep)
    return Mesh(tp=cut.tp, cp=cut.cp, ep=cut.ep, etp=cut.etp, dp=ranks // (cut.tp * cut.cp))


def _num_noted(decisions: Decisions) -> int:
    """Figures of experts that a step of the whole model sums."""
    block_of, times = decisions.blocks.block_of(), decisions.blocks.times
    noted = zip(decisions.experts.layers, decisions.noted_experts, decisions.noted_limits, strict=False)
    rows = [(layer.combined, experts + (limit > 0)) for layer, experts, limit in noted]
    rows += [(asked.chosen[0], asked.size) for asked in decisions.lowering.asked]
    return sum((times[block_of[name]] if name in block_of else 1) * size for name, size in rows)


def _whole(program: Program, blocks: Blocks) -> Folded:
    return Folded(copied(program), blocks, tuple(range(len(blocks.instances))))


def _key(cut: Cut) -> tuple[int, ...]:
    """The choices on which the program of a cut depends; over cp it depends on tp too."""
    return cut.cp, cut.ep, cut.etp if cut.has_expert_axes else 0, cut.tp if cut.cp > 1 else 0


def _pattern(blocks: Blocks) -> list[tuple[int, str]]:
    """Kinds counted in the order in which they come, and paths."""
    numbers: dict[int, int] = {}
    return [(numbers.setdefault(block.kind, len(numbers)), block.path) for block in blocks.instances]

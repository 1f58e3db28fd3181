"""From a canonical program and the sizes of a mesh to Decisions, for a plan and for each cut that a search tries.

opened       shards the sequence over cp, and prepares expert layers for ep and etp
decide_cut   decides types over tp, stages, and all other facts that passes read
"""

from typing import NamedTuple

from passes.blocks.blocks import Blocks, find_blocks
from passes.lowering import Lowering
from passes.moe.find import find_experts
from passes.moe.layers import Experts
from passes.moe.open import open_experts
from passes.partition.sequence.cut import cut_sequence
from passes.partition.sequence.facts import Context
from passes.partition.sequence.own_keys import keep_own_keys
from passes.program.program import Program
from planner.captured import Prepared
from planner.cluster.cluster import Cluster
from planner.cluster.links import nodes_of_experts
from planner.decisions import Decisions
from planner.lengths import KeptDecisions
from planner.mesh import Mesh
from planner.pipeline.stages import assign_stages
from planner.placement.attention import AttentionSite, attention_sites, check_attention, check_something_is_cut
from planner.placement.candidates import Cutting
from planner.placement.decide import typing_problem
from planner.placement.overrides import kinds_by_override
from planner.progress import shown_if_slow
from planner.spec.spec import Spec


class Opened(NamedTuple):
    """A program rewritten for cp, ep and etp. ``is_changed``: whether its calls differ from the model's."""

    program: Program
    context: Context
    experts: Experts
    is_changed: bool
    cluster: Cluster | None


def opened(program: Program, spec: Spec, mesh: Mesh, cluster: Cluster | None) -> Opened:
    """Rewrite ``program``, in place, for the cp, ep and etp of ``mesh``. Raises PlanError at ops that forbid it."""
    layers = find_experts(program)  # before cp is cut: its exchanges hide which tokens chose an expert
    with shown_if_slow(f"sharding the sequence over cp {mesh.cp}"):
        context = cut_sequence(program, mesh.cp, layers)
        keep_own_keys(program, context, mesh.tp)
    nodes, dense = nodes_of_experts(mesh, cluster), "" if spec.cuda_graphs.impl == "none" else "cuda_graphs"
    experts = open_experts(program, layers, mesh, nodes=nodes, dense=dense)
    return Opened(program, context, experts, mesh.cp > 1 or mesh.has_expert_axes or experts != layers, cluster)


def blocks_of(program: Program, spec: Spec) -> Blocks:
    """Return the repeated blocks; blocks that overrides treat differently are of different kinds."""
    with shown_if_slow("finding the repeated blocks"):
        return kinds_by_override(program, find_blocks(program), spec.tensor_parallel.overrides)


def decide_cut(
    of: Opened,
    blocks: Blocks,
    prepared: Prepared,
    spec: Spec,
    mesh: Mesh,
    held: KeptDecisions | None = None,
) -> tuple[Decisions, tuple[AttentionSite, ...]]:
    """Decide one cut. ``held``: decisions for another length. Raises PlanError, also if tp shards nothing."""
    program, cluster, asked = of.program, of.cluster, spec.tensor_parallel
    with shown_if_slow(f"deciding the sharding of {blocks.num_kinds} kinds of blocks over tp {mesh.tp}"):
        cutting, types = Cutting(mesh.tp, mesh.etp, **asked.typing()), None if held is None else held.placements
        placements = typing_problem(program, blocks, cutting, held=types).decided()
    sites = attention_sites(program, blocks, placements)
    check_attention(program, placements, sites)
    check_something_is_cut(program, blocks, placements, sites, asked.vocabulary_multiple)
    sizes = () if held is None else held.sizes
    lowering = Lowering(
        program,
        placements,
        assign_stages(program, blocks, mesh, spec.pipeline.split, sizes),
        mesh,
        experts=of.experts,
        documents=prepared.documents,
        denominators=tuple(prepared.terms.denominators),
        options=spec.options(cp=mesh.cp),
    )
    decisions = Decisions(
        lowering,
        blocks,
        prepared.terms,
        mesh,
        seed=spec.seed,
        context=of.context,
        rules=prepared.rules,
        on_gpu=cluster is not None and cluster.device.is_gpu,
        cudnn=cluster is not None and cluster.device.cudnn_attention,
        imbalance=spec.experts.imbalance or 1.0,
    )
    return decisions, sites

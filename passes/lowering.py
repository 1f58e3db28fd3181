"""All that lowering reads of a model, once it is decided: the same for every rank.

A key of the spec that changes how passes lower is one field of ``Options``, which the pass reads.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from passes.moe.layers import Asked, Experts, asked_of
from passes.ops.flash import FLASH
from passes.partition.type_changes import Placements, TypeChange
from passes.program.ops.aten import aten, is_random, named, shape_of
from passes.program.program import Program, StageAssignment
from passes.program.walks import readers, walk
from passes.types.types import Sizes


@dataclass(frozen=True)
class Options:
    """The choices among lowerings of one program. ``regather``: products with weights save this rank's part of a
    gathered input, and gather it again in the backward; ``own_tokens``: other products along the sequence do.
    ``attention``: the kernel of attention over cp.
    """

    regather: bool = False
    own_tokens: bool = False
    attention: str = FLASH


@dataclass(frozen=True, slots=True)
class Documents:
    """``attentions``: by name. ``mean``: tokens of a document, on average."""

    attentions: frozenset[str] = frozenset()
    mean: int = 0


NO_DOCUMENTS = Documents()


def find_documents(program: Program, inputs: Collection[str], mean: int | None) -> Documents:
    """Return attentions without dropout, with a mask made of one of ``inputs`` (keys of the batch), by no weight.

    ``mean``: None for as long as the sequence.
    """
    told = [n for n in program.graph.graph.find_nodes(op="placeholder") if program.inputs.get(n.name) in inputs]
    below = set(walk(told, readers))
    found = [n for n in program.graph.graph.nodes if _keeps_apart(n, below)]
    longest = max((shape_of(n)[2] for n in found), default=0)
    return Documents(frozenset(n.name for n in found), min(mean or longest, longest))


def _keeps_apart(node: fx.Node, below: Collection[fx.Node]) -> bool:
    if node.target is not aten.scaled_dot_product_attention.default or is_random(node):
        return False
    mask = named(node)["attn_mask"]
    is_told = isinstance(mask, fx.Node) and mask in below and not mask.meta.get("grad")
    return is_told and len(shape_of(node)) == 4


@dataclass(frozen=True)
class Lowering:
    """The captured program with its types and stages. ``documents``: attentions that run within documents.
    ``denominators``: placeholders for the counts that the loss is divided by. ``changes``: of type, by stage; they are
    decided last, and a plan keeps them with its shards.
    """

    program: Program
    placements: Placements
    stages: StageAssignment
    sizes: Sizes
    experts: Experts = field(default_factory=Experts)
    documents: Documents = NO_DOCUMENTS
    denominators: tuple[str, ...] = ()
    options: Options = Options()
    changes: tuple[tuple[TypeChange, ...], ...] = ()

    @cached_property
    def asked(self) -> tuple[Asked, ...]:
        """The layers of experts for which a step counts choices: weights that no token chose are not updated."""
        return asked_of(self.program, self.experts)

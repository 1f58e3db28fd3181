"""All that lowering reads of a model, once it is decided: the same for every rank.

A key of the spec that changes how passes lower is one field of ``Options``, which the pass reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from passes.moe.layers import Asked, Experts
from passes.moe.parts import asked_of
from passes.ops.gathered_attention import FLASH
from passes.partition.placements import Placements
from passes.partition.type_changes import TypeChange
from passes.program.documents import NO_DOCUMENTS, Documents
from passes.program.program import Program
from passes.program.stages import StageAssignment
from passes.types.sizes import Sizes


@dataclass(frozen=True)
class Options:
    """The choices among lowerings of one program. ``regather``: products with weights save this rank's part of a
    gathered input, and gather it again in the backward; ``own_tokens``: other products along the sequence do.
    ``attention``: the kernel of attention over cp.
    """

    regather: bool = False
    own_tokens: bool = False
    attention: str = FLASH


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

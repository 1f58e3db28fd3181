"""Which role each input of the spec has: its name says it, or the spec's ``data.inputs``.

input_ids, tokens, idx, x                      the window [length]
labels                                         the same window (models that shift it inside)
targets, y                                     the window one token later (models that do not)
attention_mask                                 1, and 0 on padding
token_type_ids, segment_ids                    which of two texts
position_ids                                   0 to length - 1; with packing: documents, from 0 in each
document_ids, doc_ids                          the number of each token's document in the sequence
document_mask [1, length, length]              which tokens a token reads: those of its document up to itself
cu_seqlens [n]                                 0, then the end of each document in the sequence, then its length
next_sentence_label, sentence_order_label      whether two texts are in their order: one integer a sequence
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from passes.errors import PlanError
from planner.spec.data import ROLES
from planner.spec.roles import NAMES
from planner.spec.sections import InputSpec

SHAPES = {"sentence_order": "[]", "document_mask": "[1, length, length]", "cu_seqlens": "[n]"}  # of others [length]
OF_IDS = ("tokens", "next_tokens", "labels")  # hold ids of the vocabulary


def roles_of(inputs: Collection[str], given: Mapping[str, str]) -> dict[str, str]:
    """Input -> role. ``given``: the spec's ``data.inputs``. Raises PlanError for an input without a known role."""
    for name in given:
        if name not in inputs:
            what = f"data.inputs has {name!r}, which is not an input"
            raise PlanError(what, where=f"data.inputs.{name}", fix=f"name one of: {', '.join(inputs)}")
    for name in inputs:
        if name not in given and name not in NAMES:
            raise PlanError(
                f"a text cannot feed the input {name!r}: its role is unknown",
                where=f"inputs.{name}",
                fix=f"set it with data: {{inputs: {{{name}: ROLE}}}}, ROLE one of {', '.join(ROLES)}; or call "
                "runtime.Engine with batches of your own",
            )
    return {name: given.get(name) or NAMES[name] for name in inputs}


def length_of(inputs: Mapping[str, InputSpec], roles: Mapping[str, str]) -> int:
    """Tokens of one sequence. Raises PlanError if inputs differ in it, or have not this one dim."""
    lengths: dict[str, int] = {}
    for name, spec in inputs.items():
        shape = SHAPES.get(roles[name], "[length]")
        wanted = shape.count(",") + (shape != "[]")
        if len(spec.shape) != wanted or (wanted == 3 and len({1, *spec.sizes}) > 2):
            what = f"inputs.{name} has the shape {list(spec.shape)}; as {roles[name]} of a text it needs {shape}"
            raise PlanError(what, where=f"inputs.{name}.shape", fix=f"give it the shape {shape}")
        if wanted and roles[name] != "cu_seqlens":
            lengths[name] = spec.sizes[-1]
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no input is a sequence"
        raise PlanError(
            f"sequences of a text have one length, but the inputs differ: {told}" if lengths else told,
            where="inputs",
            fix="give all of them the same length",
        )
    return next(iter(lengths.values()))

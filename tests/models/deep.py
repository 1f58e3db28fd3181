"""Small models of six layers and more, captured once: where rows of equal blocks are long enough to be shortened."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from planner.api import _captured
from planner.search.cuts import Captured
from planner.spec.spec import Spec
from tests.models import hugging_face
from tests.models.hugging_face import ZOO, batch, made

DEPTHS = {"num_hidden_layers": 6, "n_layer": 6, "num_layers": 5, "num_decoder_layers": 4}
GLOBAL = 8


@cache
def captured(name: str, num_layers: int = 0) -> Captured:
    """A family of tests.models.hugging_face with more layers, and microbatches of two sequences."""
    member = ZOO[name]
    depths = {key: num_layers or DEPTHS[key] for key in (*member.sizes, "num_decoder_layers") if key in DEPTHS}
    if "num_layers" not in member.sizes:
        depths.pop("num_decoder_layers", None)
    model = made(replace(member, sizes=member.sizes | depths))
    spec = Spec.load({"mesh": {}, "batch": {"global": GLOBAL, "micro": hugging_face.BATCH}})
    program, terms = _captured(model, spec, batch(name))
    return Captured(program, terms, model, hugging_face.BATCH)


def spec_of(name: str, **keys: Any) -> Spec:
    """Of a search over ``name``; ``keys`` of the spec in place of those here."""
    inputs = {
        key: {"shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
        for key, value in batch(name).items()
    }
    return Spec.load(
        {
            "mesh": "auto",
            "batch": {"global": GLOBAL},
            "inputs": inputs,
            "tensor_parallel": {"vocabulary_multiple": 8},
            "cluster": "cpu-local",
            **keys,
        }
    )

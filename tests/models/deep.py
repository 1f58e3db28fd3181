"""Small models of six layers and more, captured once: where rows of equal blocks are long enough to be shortened."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from planner.captured import Prepared, prepare
from planner.spec.spec import Spec
from tests.models import hugging_face
from tests.models.hugging_face import ZOO, batch, made
from tests.tools.captures import captured_again

DEPTHS = {"num_hidden_layers": 6, "n_layer": 6, "num_layers": 5, "num_decoder_layers": 4}
GLOBAL = 8


@cache
def captured(name: str, num_layers: int = 0) -> Prepared:
    """A family of tests.models.hugging_face with more layers, and microbatches of two sequences."""
    member = ZOO[name]
    depths = {key: num_layers or DEPTHS[key] for key in (*member.sizes, "num_decoder_layers") if key in DEPTHS}
    if "num_layers" not in member.sizes:
        depths.pop("num_decoder_layers", None)
    model = made(replace(member, sizes=member.sizes | depths))
    sizes = {"global": GLOBAL, "micro": hugging_face.BATCH}
    spec = Spec.load({"mesh": {}, "batch": sizes, "inputs": inputs_of(name)})
    return prepare(captured_again(model, spec), spec)


def inputs_of(name: str) -> dict[str, Any]:
    return {
        key: {"shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
        for key, value in batch(name).items()
    }


def spec_of(name: str, **keys: Any) -> Spec:
    """Of a search over ``name``; ``keys`` of the spec in place of those here."""
    return Spec.load(
        {
            "mesh": "auto",
            "batch": {"global": GLOBAL},
            "inputs": inputs_of(name),
            "tensor_parallel": {"vocabulary_multiple": 8},
            "cluster": "cpu-local",
            **keys,
        }
    )

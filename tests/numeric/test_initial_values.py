"""Weights of a model on the meta device are the same, to the last bit, for every layout and by either method."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import meta_parameters, plan
from runtime import Engine
from tests.tools.laboratory import Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

LAYERS, WIDTH, VOCABULARY = 4, 32, 97
LAYOUTS: tuple[dict[str, int], ...] = (
    {"tp": 2, "pp": 2},
    {"tp": 4},
    {"pp": 4},
    {"dp": 2, "tp": 2},
    {"pp": 2, "vpp": 2, "dp": 2},
    {"cp": 2, "tp": 2},
)


def build() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "n_positions": 16}
    with meta_parameters():
        return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None))


def spec_of(mesh: dict[str, int], method: str) -> dict[str, Any]:
    ids = {"shape": [16], "dtype": "int64", "high": VOCABULARY}
    interleaved = {"pipeline": {"schedule": "interleaved_1f1b"}} if "vpp" in mesh else {}
    return {
        "mesh": mesh,
        "batch": {"global": 8, "micro": 2},
        "inputs": {"input_ids": ids, "labels": ids},
        "initialization": {"method": method},
        **interleaved,
    }


def first_parameters(decided: Any) -> dict[str, Tensor]:
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        return engine.gather_parameters()


def of_layouts(host: Any, method: str) -> list[dict[str, Tensor]]:
    """Of one process, then of each layout."""
    alone = Ranks(plan(build(), spec_of({}, method)), "forks", host).run(first_parameters)[0]
    plans = (plan(build(), spec_of(mesh, method)) for mesh in LAYOUTS)
    return [alone, *(Ranks(made, "forks", host).run(first_parameters)[0] for made in plans)]


def std(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("method", ["normal", "model"])
def test_six_layouts_begin_as_one_process_does(lab: Lab, method: str) -> None:
    alone, *others = lab.call(of_layouts, method)
    assert alone.keys() == dict(build().named_parameters(remove_duplicate=False)).keys()
    for layout, found in zip(LAYOUTS, others, strict=True):
        assert found.keys() == alone.keys()
        assert [name for name, value in alone.items() if not torch.equal(found[name], value)] == [], layout
    block = "transformer.h.2."
    assert std(alone[f"{block}mlp.c_fc.weight"]) == pytest.approx(0.02, rel=0.05)
    # both of the model's methods and ours divide what is written into the residual by sqrt(2 · layers)
    assert std(alone[f"{block}mlp.c_proj.weight"]) == pytest.approx(0.02 / math.sqrt(2 * LAYERS), rel=0.05)
    assert alone[f"{block}ln_1.weight"].eq(1).all()
    assert alone[f"{block}ln_1.bias"].eq(0).all()

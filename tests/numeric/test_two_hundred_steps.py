"""Two hundred steps on real text, of a GPT-2 and a BERT: the loss falls as in one process, on two layouts and in two
precisions.

One process is plain torch on the whole batch: AdamW over float32 weights, of which the model has a copy in its own
precision. With dropout, whose masks plain torch does not have, it is an engine alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.bert import BERT
from planner import plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.audit.own_module import loss_of
from runtime.data.reading import read_tokens
from runtime.data.token_batches import Batches, token_batches
from runtime.optimizer.scalars import LearningRate
from tests.tools.laboratory import Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

NUM_STEPS, LENGTH = 200, 32
LAYOUTS: dict[str, dict[str, int]] = {"tp2 pp2": {"tp": 2, "pp": 2}, "dp2 tp2": {"dp": 2, "tp": 2}}
OPTIMIZER = {"lr": 2e-3, "schedule": {"kind": "cosine", "warmup": 20, "steps": NUM_STEPS, "min_lr": 2e-4}}


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, **rates}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=LENGTH, vocab_size=256, bos_token_id=0, eos_token_id=0))


def bert(dropout: float) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"length": LENGTH, "width": 32, "num_layers": 2}
    return BERT(normalize_first=True, **sizes, dropout=dropout)


IDS = {"shape": [LENGTH], "dtype": "int64", "high": 256}
OF_GPT2 = {"inputs": {"input_ids": IDS, "labels": IDS}}
OF_BERT = {
    "data": {"objective": "masked"},
    "inputs": {
        **OF_GPT2["inputs"],
        "token_type_ids": {**IDS, "high": 2},
        "attention_mask": {**IDS, "high": 2},
        "sentence_order_label": {**IDS, "shape": [], "high": 2},
    },
}
MODELS: dict[str, tuple[Callable[[float], nn.Module], dict[str, Any]]] = {
    "gpt2": (gpt2, OF_GPT2),
    "bert": (bert, OF_BERT),
}


def spec_of(name: str, mesh: dict[str, int], precision: str, dropout: float) -> dict[str, Any]:
    return {
        **MODELS[name][1],
        "mesh": mesh,
        "batch": {"global": 8, "micro": 4},
        "precision": {"parameters": precision},
        "optimizer": OPTIMIZER,
        **({"dropout": "layout_invariant"} if dropout else {}),
    }


def losses(decided: Any, steps: Batches) -> list[float]:
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        return [engine.train_step(steps.batch(step)).loss for step in range(NUM_STEPS)]


def plain_losses(model: nn.Module, spec: Spec, steps: Batches) -> list[float]:
    """Master weights in float32, written out: what mixed precision is."""
    masters = [p.detach().clone().float() for p in model.parameters()]
    model.to(getattr(torch, spec.precision.parameters or "float32"))
    o = spec.optimizer
    adamw = torch.optim.AdamW(masters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    found = []
    for step in range(NUM_STEPS):
        loss = loss_of(model(**steps.batch(step)), "auto")
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = _gradient(parameter).float()
        nn.utils.clip_grad_norm_(masters, o.clip_grad_norm or float("inf"))
        adamw.param_groups[0]["lr"] = LearningRate(o).at(step)
        adamw.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        found.append(loss.item())
    return found


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def runs(host: Any, name: str, precision: str, dropout: float) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The losses of one process, by precision, and those of each layout."""
    build, _ = MODELS[name]
    alone = {dtype: Spec.load(spec_of(name, {}, dtype, dropout)) for dtype in dict.fromkeys(("float32", precision))}
    steps = token_batches(read_tokens("stdlib"), alone["float32"])
    if dropout:
        truths = {precision: Ranks(plan(build(dropout).train(), alone[precision]), "forks", host).run(losses, steps)[0]}
    else:
        truths = {t: Ranks(1, "forks", host).run(plain_losses, build(0.0), spec, steps)[0] for t, spec in alone.items()}
    found = {}
    for layout, mesh in LAYOUTS.items():
        decided = plan(build(dropout).train(bool(dropout)), spec_of(name, mesh, precision, dropout))
        found[layout] = Ranks(decided, "forks", host).run(losses, steps)[0]
    return truths, found


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_each_loss_in_float32_is_that_of_one_process(lab: Lab, name: str, dropout: float) -> None:
    truths, found = lab.call(runs, name, "float32", dropout)
    check_each(truths["float32"], found, 1e-4)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_each_loss_in_bfloat16_is_near_that_of_float32_and_in_the_mean_that_of_bfloat16(lab: Lab, name: str) -> None:
    """Plain bfloat16 rounds each loss to one part in 256, which its means over steps do not show."""
    truths, found = lab.call(runs, name, "bfloat16", 0.0)
    check_each(truths["float32"], found, 0.02, is_share=True)
    check_each(means(truths["bfloat16"]), {n: means(own) for n, own in found.items()}, 0.02, is_share=True)


def check_each(truth: list[float], found: dict[str, list[float]], limit: float, *, is_share: bool = False) -> None:
    assert sum(truth[-len(truth) // 10 :]) < 0.75 * sum(truth[: len(truth) // 10])
    far = {
        layout: max(abs(a - b) / (b if is_share else 1.0) for a, b in zip(own, truth, strict=True))
        for layout, own in found.items()
    }
    assert far.keys() == LAYOUTS.keys()
    assert max(far.values()) < limit, far


def means(values: list[float]) -> list[float]:
    """Of ten steps each."""
    return [sum(values[i : i + 10]) / 10 for i in range(0, len(values), 10)]

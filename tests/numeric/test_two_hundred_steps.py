"""Two hundred steps on real text, of a GPT-2 and a BERT: the loss falls as in one process, on two layouts and in two
precisions.

One process is plain torch on the whole batch: AdamW over float32 weights, of which the model has a copy in its own
precision. With dropout, whose masks plain torch does not have, it is an engine alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.bert import BERT
from planner import plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.data.reading import read_tokens
from runtime.data.token_batches import Batches, token_batches
from runtime.optimizer.lr import learning_rate
from runtime.verify.reference import loss_of
from tests.tools.laboratory import Lab

NUM_STEPS, LENGTH = 200, 32
LAYOUTS: dict[str, dict[str, int]] = {"tp2 pp2": {"tp": 2, "pp": 2}, "dp2 tp2": {"dp": 2, "tp": 2}}
OPTIMIZER = {"lr": 2e-3, "schedule": {"kind": "cosine", "warmup": 20, "steps": NUM_STEPS, "min_lr": 2e-4}}


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, **rates}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=LENGTH, vocab_size=256, bos_token_id=0, eos_token_id=0))


def bert(dropout: float, *, normalize_first: bool) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"length": LENGTH, "width": 32, "num_layers": 2}
    return BERT(normalize_first=normalize_first, **sizes, dropout=dropout)


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
    "bert pre": (partial(bert, normalize_first=True), OF_BERT),
    "bert post": (partial(bert, normalize_first=False), OF_BERT),
}
EXACT, WITH_DROPOUT, LOW = ("float32", 0.0, 1e-4), ("float32", 0.1, 1e-4), ("bfloat16", 0.0, 0.02)
CASES = [("gpt2", *EXACT), ("gpt2", *WITH_DROPOUT), ("gpt2", *LOW)]
CASES += [("bert pre", *EXACT), ("bert pre", *WITH_DROPOUT), ("bert pre", *LOW), ("bert post", *EXACT)]


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
    with Engine(decided, timeout_seconds=100) as engine:
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
        adamw.param_groups[0]["lr"] = learning_rate(step, o.lr, **o.schedule.model_dump())
        adamw.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        found.append(loss.item())
    return found


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def runs(host: Any, name: str, precision: str, dropout: float) -> tuple[list[float], dict[str, list[float]]]:
    """The losses of one process, and of each layout."""
    build, _ = MODELS[name]
    alone = Spec.load(spec_of(name, {}, precision, dropout))
    steps = token_batches(read_tokens("stdlib"), alone)
    if dropout:
        truth = host.run_ranks(1, losses, plan(build(dropout).train(), alone), steps)[0]
    else:
        truth = host.run_ranks(1, plain_losses, build(dropout), alone, steps)[0]
    found = {}
    for layout, mesh in LAYOUTS.items():
        decided = plan(build(dropout).train(bool(dropout)), spec_of(name, mesh, precision, dropout))
        found[layout] = host.run_ranks(4, losses, decided, steps)[0]
    return truth, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "dropout", "limit"), CASES)
def test_the_loss_falls_as_in_one_process(lab: Lab, name: str, precision: str, dropout: float, limit: float) -> None:
    truth, found = lab.call(runs, name, precision, dropout)
    assert sum(truth[-10:]) < 0.75 * sum(truth[:10])
    for layout, own in found.items():
        far = max(abs(a - b) / (b if precision == "bfloat16" else 1.0) for a, b in zip(own, truth, strict=True))
        assert far < limit, (layout, far)

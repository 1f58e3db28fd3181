"""Muon trains as torch's does on whole matrices: fused ones part by part, experts one by one, on every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.laboratory import session_lab
from tests.tools.training import spec_of, trained_on

STEPS = 3
RULE = {"name": "muon", "lr": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "clip_grad_norm": 1.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "tp2, sequence parallel": {
        "mesh": {"tp": 2},
        "tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8},
    },
    "dp2": {"mesh": {"dp": 2}},
    "tp2·dp2": {"mesh": {"tp": 2, "dp": 2}},
    "tp2·dp2, zero 0": {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"zero": 0}},
    "tp2·dp2, small buckets": {"mesh": {"tp": 2, "dp": 2}, "optimizer": {"bucket_size": 3000}},
    "pp2·dp2": {"mesh": {"pp": 2, "dp": 2}},
    "cp2·tp2": {"mesh": {"cp": 2, "tp": 2}},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "ep2·dp2": {"mesh": {"ep": 2, "dp": 2}},
    "ep2·dp2·tp2, etp 1": {"mesh": {"ep": 2, "dp": 2, "tp": 2, "etp": 1}},
    "ep2·dp2·tp2, etp 2": {"mesh": {"ep": 2, "dp": 2, "tp": 2, "etp": 2}},
}


def parts(name: str, fqn: str, shape: tuple[int, ...]) -> list[tuple[Any, ...]] | None:
    """The boxes of a weight's matrices, as its model means them; None for one that is no hidden matrix."""
    if len(shape) < 2 or any(
        word in fqn for word in ("wte", "wpe", "embed", "tokens", "positions", "lm_head", "head.")
    ):
        return None
    rows: list[tuple[Any, ...]] = [(slice(None),)]
    if fqn.endswith(("qkv.weight", "gate_up_proj.weight")):
        count = 3 if "qkv" in fqn else 2
        rows = [(slice(i * shape[0] // count, (i + 1) * shape[0] // count),) for i in range(count)]
    elif fqn.endswith("c_attn.weight"):
        rows = [(slice(None), slice(i * shape[1] // 3, (i + 1) * shape[1] // 3)) for i in range(3)]
    elif fqn.endswith("query_key_value.weight"):  # head by head
        per_head = torch.arange(shape[0]).view(4, 3, -1)
        rows = [(per_head[:, i].flatten(),) for i in range(3)]
    elif len(shape) == 3:
        halves = [slice(0, shape[1] // 2), slice(shape[1] // 2, None)] if "gate_up" in fqn else [slice(None)]
        rows = [(expert, half) for expert in range(shape[0]) for half in halves]
    return rows


HEAD = 8  # elements of a head, of each model here


def heads(fqn: str, shape: tuple[int, ...]) -> list[tuple[Any, ...]] | None:
    """Those of ``parts`` with each head by itself."""
    if not fqn.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return parts("", fqn, shape)
    return [(slice(start, start + HEAD),) for start in range(0, shape[0], HEAD)]


def alone(
    name: str, adjust_lr: str, dtype: torch.dtype, device: str = "cpu", *, split: str = "parts"
) -> tuple[list[float], dict[str, Tensor]]:
    """torch's Muon over copies of the matrices, torch's AdamW over all else."""
    entry = families.build(name)
    model, losses = entry.model.to(device, dtype), []
    given = {n: p for n, p in model.named_parameters() if p.requires_grad}
    boxes = {
        n: heads(n, tuple(p.shape)) if split == "heads" else parts(name, n, tuple(p.shape)) for n, p in given.items()
    }
    copies = {
        (n, i): nn.Parameter(p.detach()[b].clone()) for n, p in given.items() for i, b in enumerate(boxes[n] or ())
    }
    keys = {"lr": RULE["lr"], "weight_decay": RULE["weight_decay"]}
    muon = torch.optim.Muon(copies.values(), **keys, momentum=0.95, nesterov=True, adjust_lr_fn=adjust_lr)
    adamw = torch.optim.AdamW([p for n, p in given.items() if boxes[n] is None], **keys, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        model.zero_grad()
        loss = entry.loss(model(**{k: x.to(device) for k, x in entry.batch(8, step).items()}))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for (n, i), copy in copies.items():
            copy.grad = given[n].grad[boxes[n][i]].clone()
        muon.step()
        adamw.step()
        with torch.no_grad():
            for (n, i), copy in copies.items():
                given[n][boxes[n][i]] = copy
    return losses, {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}


def both(host: Any, name: str, layout: dict[str, Any], adjust_lr: str, dtype: str) -> Any:
    rule, split = RULE | {"adjust_lr": adjust_lr}, layout.get("optimizer", {}).get("split", "parts")
    entry = families.build(name)
    spec = spec_of(entry, dtype=dtype, **{**layout, "optimizer": rule | layout.get("optimizer", {})})
    decided = plan_again(entry.model, spec)
    found = trained_on(host, decided, [entry.batch(8, step) for step in range(STEPS)])
    return found, alone(name, adjust_lr, getattr(torch, dtype), split=split), decided.memory[0].optimizer


def check(name: str, layout: dict[str, Any], adjust_lr: str = "match_rms_adamw", dtype: str = "float64") -> None:
    """An update is computed in bfloat16: where a value lies between two of these, rounding decides which. The losses of
    Hugging Face are float32, so that this happens more often; a matrix cut otherwise is wrong by 0.01.
    """
    ran, (wanted, truth), planned = session_lab().call(both, name, layout, adjust_lr, dtype)
    limit = {"gpt": 1e-6, "mixtral": 4e-3}.get(name, 1e-3)
    assert ran.losses == pytest.approx(wanted, rel=limit)
    for fqn, value in ran.parameters.items():
        assert (value - truth[fqn]).norm() <= limit * truth[fqn].norm(), fqn
    assert ran.measured["optimizer"] == planned


@pytest.mark.thorough
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt", "gpt2", "gpt_neox", "llama"])
def test_muon_is_that_of_torch_on_whole_matrices(name: str, layout: str) -> None:
    check(name, LAYOUTS[layout])


@pytest.mark.thorough
def test_the_original_rate() -> None:
    check("gpt", {"mesh": {"tp": 2}}, "original")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("layout", ["tp2·dp2", "pp2·dp2"])
def test_heads_are_updated_one_by_one(name: str, layout: str) -> None:
    check(name, {**LAYOUTS[layout], "optimizer": {"split": "heads"}})


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_are_updated_one_by_one(layout: str) -> None:
    check("mixtral", EXPERTS[layout], dtype="float32")

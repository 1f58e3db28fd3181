"""Plans, lowered code and searches do not depend on how Python hashes strings, nor on where objects lie in memory."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from planner import Plan, plan
from planner.cluster.cluster import read_cluster
from planner.lower import lower
from planner.search.search import search
from planner.search.winner import result_sections
from tests.models import deep, families, hugging_face
from tests.tools.commands import python
from tests.tools.simulated_mesh import spec_of

SEEDS = ("0", "1", "2")


def digests(seed: str, *names: str) -> dict[str, str]:
    found = python("-m", "tests.test_hash_seeds", *names, PYTHONHASHSEED=seed)
    assert not found.returncode, found.stderr
    return json.loads(found.stdout)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1800)  # plans of fifty models, three times
def test_many_models_and_a_search_are_decided_alike_under_three_hash_seeds():
    first, *others = map(digests, SEEDS)
    assert len(first) > 50
    for other in others:
        assert {name for name in first if other[name] != first[name]} == set()


@pytest.mark.thorough
@pytest.mark.slow
def test_three_models_are_decided_alike_under_two_hash_seeds():
    first, other = (digests(seed, "bert", "mixtral", "slots") for seed in SEEDS[:2])
    assert len(first) >= 3
    assert first == other


GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}}
SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
TP = {"tp": 2}
EXPERTS = {"dp": 2, "ep": 2}
# of each: the mesh, and what the spec says beside
HUGGING_FACE: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "modernbert": (TP, GRAPHS),
    "bert": (TP, GRAPHS | {"recompute": "selective"}),
    "gemma3": ({"tp": 2, "pp": 2}, {"recompute": "full"}),
    "gpt2": ({"tp": 2, "pp": 2}, {"compile": True}),
    "llama": ({"tp": 2}, SEQUENCE_PARALLEL | {"recompute": "selective"}),
    "qwen3": ({"cp": 2}, {}),
    "falcon_alibi": (TP, GRAPHS),
    "bloom": (TP, {"recompute": "full"}),
    "mpt": ({"pp": 2}, GRAPHS),
    "opt_350m": (TP, {"compile": True}),
    "gptj": (TP, {}),
    "electra": (TP, {"dropout": "layout_invariant"}),
    "deberta_v2": (TP, GRAPHS),
    "t5": ({"tp": 2, "pp": 2}, GRAPHS),
    "bart": (TP, {"recompute": "selective"}),
    "vit": (TP, GRAPHS),
    "beit": ({"tp": 2}, {}),
    "mixtral": (EXPERTS, GRAPHS),
    "qwen2_moe": (EXPERTS, {"recompute": "full"}),
    "deepseek_v3": ({"tp": 2, "ep": 2, "etp": 1}, {"recompute": "selective"}),
    "gpt_oss": (EXPERTS, {}),
    "mamba": (TP, {}),
}
OWN: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "slots": (EXPERTS, {}),
    "gpt-dropout": ({"tp": 2, "pp": 2, "vpp": 2}, INTERLEAVED),
    "bert-post": ({"tp": 2}, {}),
}


def main() -> None:
    print(json.dumps(dict(_digests(sys.argv[1:]))))


def _digests(only: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name, (mesh, more) in (HUGGING_FACE | OWN).items():
        if only and name not in only:
            continue
        made = _planned(name, mesh, more)
        yield f"{name} plan", _digest(made.describe(full=True), json.dumps(made.to_dict()))
        yield f"{name} code", _digest(*(text for pp in range(made.mesh.pp) for text in _code(made, pp)))
    if not only or "search" in only:
        yield "search", _digest(_searched())


def _planned(name: str, mesh: dict[str, int], more: dict[str, Any]) -> Plan:
    rows = 4 * mesh.get("pp", 1) * mesh.get("dp", 1)
    if name in HUGGING_FACE:
        found = hugging_face.batch(name)
        model, batch = hugging_face.build(name), {k: torch.cat([x] * rows)[:rows] for k, x in found.items()}
    else:
        entry = families.build(name)
        model, batch = entry.model.train(), entry.batch(rows, 0)
    return plan(model, spec_of(batch, mesh) | {"batch": {"global": rows, "micro": 2}} | more)


def _code(made: Plan, pp: int) -> Iterator[str]:
    """What the first rank of a pp rank runs."""
    for stage in lower(made, made.mesh.rank_of(pp=pp)).stages:
        for path, module in stage.module.named_modules():
            if isinstance(module, fx.GraphModule):
                yield f"{path}\n{module.code}"
        yield repr([*dict(stage.module.named_parameters()), *dict(stage.module.named_buffers())])
        yield repr(stage.parameters)


def _searched() -> str:
    """The table of a search, without the seconds that it took."""
    cluster = read_cluster("dgx-a100")
    asked = {"batch": {"global": 16}, "devices": 16, "mesh": {"pp": "auto", "tp": "auto", "dp": "auto"}}
    result = search(deep.captured("gpt2"), deep.spec_of("gpt2", **asked), cluster, top=3)
    sections = result_sections(replace(result, seconds={}))
    return repr([(section.title, section.columns, section.rows, section.note) for section in sections])


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()

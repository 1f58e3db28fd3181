"""Milliseconds of layers by kind of kernel at the shapes of one rank, and of the pieces that may make them faster.

layers      two of Llama 8B at the local shapes of tp 1, 2, 4 and 8, and one of DeepSeek-V3 at those of ep 8; forward
            and backward, eager and compiled; exchanges return at once
float8      products of scaled float8 by tensor, row and block, beside bfloat16 and float64
copies      between host and GPU, both ways, beside products; AdamW on the host's cores

idle        ms of a call, not profiled, without those in which kernels run
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.on_gpu.layers_copies import adamw_on_host, copies
from benchmarks.on_gpu.layers_float8 import float8
from benchmarks.on_gpu.models import batch, from_config
from benchmarks.on_gpu.plain import timed
from benchmarks.on_gpu.profile import cluster, kernels_in, release
from benchmarks.on_gpu.table import Table
from planner import Plan, plan
from runtime import Engine
from runtime.data.batches import BatchChecks
from runtime.distributed.groups import Groups
from runtime.distributed.opening import communicators, make

LENGTH, VOCABULARY, WARM, TIMED = 4096, 1024, 2, 5
BACKEND = "cpu:fake,cuda:fake"
KINDS = {  # by parts of a kernel's name, or of an op's on a CPU; the first that fits; all others are elementwise
    "elementwise": ("triton",),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitk", "::mm", "addmm", "bmm", "grouped_mm"),
    "moves": ("copy", "memcpy", "memset", "cat", "index", "gather", "scatter", "fill", "sort", "embedding", "zero_"),
}
WAYS = {
    "eager": {"compile": False},
    "compiled": {"compile": True},
    "compiled, casts skipped": {"compile": True, "emulate_precision_casts": False},
}
ORDER = ("products", "attention", "elementwise", "moves")
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "use_cache": False}
LLAMA |= {"vocab_size": VOCABULARY, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "max_position_embeddings": LENGTH}
# 32 of 256 experts: with 8 of them a token, as many rows as a rank of ep 8 has on average
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 1}
DEEPSEEK |= {"vocab_size": VOCABULARY, "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 32}
DEEPSEEK |= {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "use_cache": False}
DEEPSEEK |= {"num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": LENGTH}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "max_position_embeddings": 32}
TINY_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16}
TINY_EXPERTS |= {"kv_lora_rank": 16, "num_key_value_heads": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}


def run(device: torch.device, *, tiny: bool = False) -> Iterator[Table]:
    yield layers(device, tiny=tiny)
    yield float8(device, tiny=tiny)
    yield copies(device, tiny=tiny)
    yield adamw_on_host(tiny=tiny)


def layers(device: torch.device, *, tiny: bool) -> Table:
    columns = ("layers", "way", *(f"{kind} ms" for kind in ORDER), "idle ms", "ms", "launches")
    table = Table("layers: by kind of kernel", columns)
    llama = LLAMA | (TINY if tiny else {})
    shapes = {f"Llama 8B, tp {tp}": (llama, tp) for tp in ((2,) if tiny else (1, 2, 4, 8))}
    shapes["DeepSeek-V3, ep 8"] = (DEEPSEEK | (TINY | TINY_EXPERTS if tiny else {}), 1)
    for name, (config, tp) in shapes.items():
        for way, keys in list(WAYS.items())[: 1 if tiny else None]:
            try:
                row = figures(planned(config, tp, keys), config, device, 1 if tiny else TIMED)
            except Exception as broken:  # the other shapes still run
                told = " ".join(str(broken).replace("|", "/").split())[:200]
                table.add(name, f"{way}: {told}", *("-",) * (len(columns) - 2))
                table.failed.append(f"{name}, {way}: {told}")
                continue
            table.add(name, way, *row)
            torch.compiler.reset()
            release(device)
    return table


def planned(config: dict[str, Any], tp: int, keys: dict[str, Any]) -> Plan:
    """One microbatch of one sequence, with sequence parallelism over tp."""
    model: nn.Module = from_config(config).train()
    tokens = {"shape": [config["max_position_embeddings"]], "dtype": "int64", "high": VOCABULARY}
    spec = {
        "mesh": {"tp": tp},
        "batch": {"global": 1, "micro": 1},
        "inputs": {"input_ids": tokens, "labels": tokens},
        "tensor_parallel": {"sequence_parallel": tp > 1},
        "precision": {"parameters": "bfloat16"},
        "cluster": cluster(),
        **keys,
    }
    return plan(model, spec)


def figures(decided: Plan, config: dict[str, Any], device: torch.device, count: int) -> list[Any]:
    given = batch(0, 1, config["max_position_embeddings"], VOCABULARY)
    with alone(decided, device) as engine:
        call = partial(engine.forward_backward, given)
        milliseconds = min([timed(call, 1, device) for _ in range(WARM + count)][WARM:]) * 1e3
        found = seen(call, device)
    by_kind = Counter[str]()
    for name, start, end in found:
        by_kind[kind_of(name)] += end - start  # pyright: ignore[reportArgumentType]
    busy = [by_kind[kind] / 1e3 for kind in ORDER]
    return [*busy, max(0.0, milliseconds - sum(busy)), milliseconds, len(found)]


def kind_of(kernel: str) -> str:
    """One of ``ORDER``."""
    name = kernel.lower()
    return next((kind for kind, signs in KINDS.items() if any(sign in name for sign in signs)), "elementwise")


def seen(call: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """The kernels of a call; on a CPU its ops, each with the time of its own."""
    if device.type == "cuda":
        return kernels_in(call, device)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    events = [event for event in profiled.events() or [] if event.name.startswith("aten::")]
    return [(event.name, 0.0, event.self_cpu_time_total) for event in events]


@contextmanager
def alone(decided: Plan, device: torch.device) -> Iterator[Engine]:
    """The engine of rank 0 without its peers: exchanges return at once, and their results are of no meaning."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = decided.mesh
    groups = Groups(mesh, 0, device, timedelta(seconds=60))
    if mesh.world_size > 1:
        dist.init_process_group(BACKEND, store=FakeStore(), rank=0, world_size=mesh.world_size)
        groups.world = groups.host = dist.group.WORLD
        groups.owns_default, groups.backend = True, BACKEND
        make(groups, (each for each in communicators(mesh, []) if each.name == "tp"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("runtime.engine.engine.open_rank", lambda *_: groups)
            patch.setattr(BatchChecks, "check", lambda _, layout, batch, *, local: layout.check(batch, local=local))
            patch.setattr("runtime.engine.build.differing", lambda *_: [])  # no peers to compare weights and code with
            patch.setattr("runtime.engine.build.require_same_code", lambda *_, **__: None)
            yield Engine(decided, device=device)
    finally:
        if groups.world is not None:
            groups.destroy()

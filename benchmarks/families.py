"""Seconds of planning beside those of one export, for small models of many families: `python -m benchmarks.families`.

    export       CPU seconds of torch.export.export
    plan         of plan() on tp 2·pp 2, for the same model and microbatch
    of 2e + 2    the second as a share of what is allowed: twice the first, and 2 s
    exports      how often planning called torch.export.export, failed calls among them
    nodes        of the export: where it unrolls loops, they are many

One process for all, after one family that is not measured; four layers each. Quote figures of one sitting only.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes.errors import PlanError
from planner import meta_parameters, plan
from tests.models.hugging_face import EXPERTS, LLAMA, MOE, SIZES, ZOO, Member

HEAD = "family", "export, s", "plan, s", "of 2e + 2", "exports", "nodes"
LAYERS, LENGTH = 4, 16
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers")
_DEPTHS += ("decoder_layers",)
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_ROUTED = {"num_local_experts": 4, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def _of(stem: str, *sizes: dict[str, Any], config: str = "", **more: Any) -> Member:
    joined = {key: value for each in ({"pad_token_id": 0}, *sizes, more) for key, value in each.items()}
    return Member(f"{stem}ForCausalLM", f"{config or stem}Config", joined, settings={"eval": stem == "Gemma3n"})


HYBRIDS: dict[str, Member] = {
    "mamba2": _of("Mamba2", SIZES, state_size=8, num_heads=4, head_dim=16, n_groups=2, chunk_size=8),
    "bamba": _of("Bamba", LLAMA, _MAMBA, attn_layer_indices=[1, 3]),
    "falcon_h1": _of("FalconH1", LLAMA, _MAMBA, mamba_d_ssm=32, mamba_d_head=8, head_dim=8),
    "lfm2": _of("Lfm2", LLAMA, layer_types=["conv", "full_attention"]),
    "qwen3_5": _of("Qwen3_5", LLAMA, _LINEAR, config="Qwen3_5Text"),
    "recurrent_gemma": _of(
        "RecurrentGemma", LLAMA, lru_width=32, block_types=["recurrent", "attention"], attention_window_size=8
    ),
    "kimi_linear": _of(
        "KimiLinear", EXPERTS, _LATENT, _ROUTED, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "bailing_hybrid": _of(
        "BailingHybrid", EXPERTS, _LATENT, _ROUTED, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=8,
        layer_group_size=2,
    ),
    "deepseek_v4": _of("DeepseekV4", EXPERTS, n_routed_experts=4, moe_intermediate_size=32, head_dim=16),
    "gemma3n": _of(
        "Gemma3n", LLAMA, config="Gemma3nText", head_dim=8, sliding_window=5, vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=8, laurel_rank=8, num_kv_shared_layers=0,
    ),
}  # fmt: skip
FAMILIES = ZOO | MOE | HYBRIDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[*FAMILIES])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    row(ZOO["gpt2"])
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name in asked.families:
        print(f"| {name} | {' | '.join(row(FAMILIES[name]))} |", flush=True)


def row(member: Member) -> tuple[str, ...]:
    given = _inputs(member.batch)
    batch = {name: torch.zeros(2, *one["shape"], dtype=getattr(torch, one["dtype"])) for name, one in given.items()}
    whole = _built(member)
    exported, export_seconds = _timed(lambda: torch.export.export(whole, (), batch, strict=False))
    nodes, count, original = len(exported.graph.nodes), list[int](), torch.export.export
    with meta_parameters():
        model = _built(member)
    torch.export.export = _counted(original, count)
    try:
        spec = {"mesh": {"tp": 2, "pp": 2}, "batch": {"global": 4, "micro": 2}, "inputs": given}
        _, plan_seconds = _timed(lambda: plan(model, spec))
    except PlanError as error:
        return f"{export_seconds:.2f}", f"refused: {error.what[:80]}", "", str(len(count)), str(nodes)
    finally:
        torch.export.export = original
    share = plan_seconds / (2 * export_seconds + 2)
    return f"{export_seconds:.2f}", f"{plan_seconds:.2f}", f"{share:.2f}", str(len(count)), str(nodes)


def _inputs(kind: str) -> dict[str, dict[str, Any]]:
    if kind == "image":
        images = {"shape": [3, 16, 16], "dtype": "float32"}
        return {"pixel_values": images, "labels": {"shape": [], "dtype": "int64", "high": 8}}
    ids = {"shape": [LENGTH], "dtype": "int64", "high": SIZES["vocab_size"]}
    masks = {"attention_mask": ids | {"high": 2}} if kind in ("masked", "classes") else {}
    return {
        "input_ids": ids,
        "labels": {"shape": [], "dtype": "int64", "high": 3} if kind == "classes" else ids,
    } | masks


def _built(member: Member) -> nn.Module:
    """Without dropout, with four layers."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = member.sizes | {key: LAYERS for key in _DEPTHS if key in member.sizes}
    sizes |= {k: (v * LAYERS)[:LAYERS] for k, v in sizes.items() if k == "layer_types" and isinstance(v, list)}
    of_two: Any = sizes.get("attention_types")
    sizes |= {} if of_two is None else {"attention_types": of_two * (LAYERS // 2)}
    config = getattr(transformers, member.config)(**sizes)
    for key, value in vars(config).items():
        if key.endswith(("dropout", "drop", "pdrop", "drop_path_rate", "dropout_rate", "dropout_prob")):
            setattr(config, key, 0.0 if isinstance(value, float) else value)
    config.use_cache = False
    model = getattr(transformers, member.model)._from_config(config)
    return model.train(not member.settings.get("eval"))


def _timed(act: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    start = time.process_time()
    return act(), time.process_time() - start


def _counted(original: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    def export(*args: Any, **kwargs: Any) -> Any:
        count.append(1)
        return original(*args, **kwargs)

    return export


if __name__ == "__main__":
    main()

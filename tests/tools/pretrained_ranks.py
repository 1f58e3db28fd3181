"""What the ranks of test_pretrained run: small Hugging Face models, in and out of directories."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner import PlanError
from planner.capture.model.reference import load_model
from planner.frozen_plan import Plan
from planner.sharding.boxes import Box
from planner.spec.spec import Spec
from runtime.checkpoint.safetensors_files import SafetensorsFiles
from runtime.engine.engine import Engine
from runtime.fuzz.forks import StoreHost
from tests.tools.captures import plan_again
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

VOCABULARY, LENGTH = 42, 6
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8, **_IDS}),
    "bert": ("BertForMaskedLM", {**_SMALL, "max_position_embeddings": 8}),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    }),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_SMALL, "max_position_embeddings": 8, **_IDS}),
}  # fmt: skip


def save_random(family: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A random model of a family, saved by transformers itself."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name).config_class(**{"vocab_size": VOCABULARY, **sizes, **changes})
    model = getattr(transformers, name)(config).eval().to(dtype)
    model.save_pretrained(directory)
    return model


def spec_of(tp: int = 1, pp: int = 1, dp: int = 1, **sections: Any) -> dict[str, Any]:
    return {
        "mesh": {"tp": tp, "pp": pp, "dp": dp},
        "batch": {"global": 8, "micro": 2},
        "inputs": {
            "input_ids": {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY},
            "labels": {"like": "input_ids"},
        },
        # a large eps: where a gradient is tiny, Adam's first step would otherwise be the sign of a rounding error
        "optimizer": {"lr": 1.0e-2, "eps": 1.0e-2},
        **sections,
    }


PLANNED: dict[str, Plan] = {}  # by directory and layout: what a process planned before its ranks were forked


def plan_of(directory: Path, **layout: Any) -> Plan:
    made = PLANNED.get(str((directory, layout)))
    return made or plan_again(load_model(f"hf:{directory}").eval(), Spec.load(spec_of(**layout)))


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randint(3, VOCABULARY, (8, LENGTH), generator=generator) for n in ("input_ids", "labels")}


def run_cases(host: StoreHost, cases: list[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
    """Run (name of a function here, its arguments) one after another on four ranks; per rank a list of results."""
    results = []
    for name, arguments in cases:
        source, layout = arguments.get("source") or arguments["good"], arguments["layout"]
        PLANNED[str((source, layout))] = plan_of(source, **layout)
        results.append(Ranks(4, "forks", host).run(run_case, name, arguments))
    return [list(of_rank) for of_rank in zip(*results, strict=True)]


def run_case(name: str, arguments: dict[str, Any]) -> Any:
    return globals()[name](**arguments)


def step(source: Path, target: Path, layout: dict[str, int]) -> float:
    """load_pretrained → 1 step → save_pretrained."""
    with Engine(plan_of(source, **layout), timeout_seconds=HANG_SECONDS) as engine:
        engine.load_pretrained(source)
        report = engine.train_step(batch())
        engine.save_pretrained(target)
    return report.loss


def copy(source: Path, target: Path, layout: dict[str, int], max_shard_bytes: int = 10**9) -> None:
    """load_pretrained → save_pretrained."""
    with Engine(plan_of(source, **layout), timeout_seconds=HANG_SECONDS) as engine:
        engine.load_pretrained(source)
        engine.save_pretrained(target, max_shard_bytes=max_shard_bytes)


def load_on_one_rank_broken(good: Path, broken: Path, layout: dict[str, int]) -> tuple[str, bool]:
    """Rank 1 alone sees a broken directory: (the error here, whether the weights are still those before)."""
    with Engine(plan_of(good, **layout), timeout_seconds=HANG_SECONDS) as engine:
        engine.load_pretrained(good)
        before = engine.gather_parameters()
        try:
            engine.load_pretrained(broken if os.environ["RANK"] == "1" else good)
            told = ""
        except PlanError as error:
            told = str(error)
        after = engine.gather_parameters()
    return told, all(torch.equal(before[name], after[name]) for name in before)


def save_where_it_cannot(source: Path, target: Path, layout: dict[str, int]) -> str:
    with Engine(plan_of(source, **layout), timeout_seconds=HANG_SECONDS) as engine:
        engine.load_pretrained(source)
        try:
            engine.save_pretrained(target)
        except PlanError as error:
            return str(error)
    return ""


def stored(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory as they lie in its files."""
    with SafetensorsFiles(directory) as files:
        values = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in files.tensors.items()}
        for name, value in values.items():
            files.read(name, Box.whole(value.shape), value)
    return values

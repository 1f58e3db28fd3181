"""Packed documents and several lengths beside padding, on one CPU core: `python benchmarks/documents.py`.

documents   tokens that count, for each second of CPU: padded, packed with one mask for all, packed within documents
lengths     CPU seconds to plan one length and three; seconds of the steps of a length, the first one lowers its stages
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from passes.ops import documents
from planner import plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime import Engine
from runtime.data.token_batches import token_batches
from runtime.data.tokens import Tokenization, Tokens

VOCABULARY, STEPS = 257, 6
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "use_cache": False,
}
WAYS = {"padded": (False, 0), "one mask": ("documents", float("inf")), "within": ("documents", documents.CALL)}


def text_of(length: int) -> Tokens:
    """4,000 documents with a mean of a third of ``length``."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(2, 2 * length // 3, 4000)
    ids = draw.integers(0, VOCABULARY, int(sizes.sum()))
    how = Tokenization("drawn", VOCABULARY, {"padding": 0})
    return Tokens(ids, np.cumsum(sizes), np.ones(len(ids), np.uint8), sizes, how, "drawn", "drawn")


def rate(config: str, length: int, packing: Any, text: Tokens) -> float:
    inputs = {name: {"shape": [length], "dtype": "int64", "high": VOCABULARY} for name in ("input_ids", "labels")}
    if packing == "documents":
        inputs["position_ids"] = {"shape": [length], "dtype": "int64"}
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, "data": {"packing": packing}}
    batches = token_batches(text, Spec.load(spec))
    with Engine(plan(load_model(config, materialize=True), spec)) as engine:
        engine.train_step(batches.batch(0))
        begun, count = time.process_time(), 0
        for step in range(1, STEPS + 1):
            batch = batches.batch(step)
            count += int((batch["labels"] != -100).sum())
            engine.train_step(batch)
        return count / (time.process_time() - begun)


def show_documents() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA))
        for length in (256, 1024):
            text = text_of(length)
            for turn in range(2):
                found = {}
                for name, (packing, call) in WAYS.items():
                    documents.CALL = call  # pyright: ignore[reportAttributeAccessIssue]
                    found[name] = rate(f"hf:{folder}", length, packing, text)
                told = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
                ratios = [found["within"] / found[name] for name in ("padded", "one mask")]
                print(f"length {length}, turn {turn}: {told}; {ratios[0]:.2f} × padded, {ratios[1]:.2f} × one mask")


def spec_of(length: Any) -> dict[str, Any]:
    tokens = {"shape": [length], "dtype": "int64", "high": 50257}
    return {"mesh": {}, "batch": {"global": 1, "micro": 1}, "inputs": {"input_ids": tokens, "labels": tokens}}


def show_lengths() -> None:
    model: nn.Module = GPT2LMHeadModel(GPT2Config())
    plan(model, spec_of(256))
    seconds = []
    for length in (256, [64, 128, 256]):
        begun = time.process_time()
        made = plan(model, spec_of(length))
        seconds.append(time.process_time() - begun)
    print(
        f"GPT-2 124M, planning: one length {seconds[0]:.2f} s, three {seconds[1]:.2f} s: {seconds[1] / seconds[0]:.2f}"
    )
    with Engine(made) as engine:
        engine.train_step(batch_of(256))
        for length in (64, 64, 128, 128, 256):
            begun = time.perf_counter()
            engine.train_step(batch_of(length))
            print(f"  a step of length {length}: {time.perf_counter() - begun:.3f} s")


def batch_of(length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 50257, (1, length))
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    torch.set_num_threads(1)
    show_documents()
    show_lengths()

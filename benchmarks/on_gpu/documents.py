"""A Llama of 1.1 billion parameters in bfloat16 on packed documents: tokens/s of labels that count, in several ways.

padded          a sequence for each document
one mask        packed, attention of whole sequences with their mask
one kernel      packed, within documents, one call of the variable-length kernel
a window, …     the same of a Mistral of that shape, in which a token reads the 256 keys up to its own
"""

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.on_gpu.models import llama
from benchmarks.on_gpu.profile import MICRO, MICROBATCHES, TIMED, WARM, cluster, gib, release, wait
from benchmarks.on_gpu.table import Table
from passes.ops import documents
from planner import plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.data.token_batches import token_batches
from runtime.data.tokens import Tokenization, Tokens

WAYS: dict[str, tuple[Any, bool]] = {
    "padded": (False, False),
    "one mask": ("documents", False),
    "one kernel": ("documents", True),
    "a window, one mask": ("documents", False),
    "a window, one kernel": ("documents", True),
}
WINDOW = 256


def run(device: torch.device, *, tiny: bool = False) -> Table:
    table = Table("documents", ("way", "tokens/s", "times padded", "ms a step", "peak GiB"))
    found = {way: figures(device, way, tiny=tiny) for way in WAYS}
    for way, (rate, seconds, peak) in found.items():
        table.add(way, rate, rate / found["padded"][0], seconds * 1e3, gib(peak))
    if device.type == "cuda":
        table.expect("padded in packed tokens/s", found["padded"][0] / found["one kernel"][0], 1 / 1.8)
    return table


def figures(device: torch.device, way: str, *, tiny: bool) -> tuple[float, float, int | None]:
    """Tokens that count a second, seconds a step, bytes at the peak."""
    packing, has_kernel = WAYS[way]
    model, sizes = llama(tiny=tiny, attention_dropout=0.0, window=WINDOW if "window" in way else None)
    model.config.use_cache = False  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    length, vocabulary = sizes["max_position_embeddings"], sizes["vocab_size"]
    spec = spec_of(length, vocabulary, packing)
    batches = token_batches(text_of(length, vocabulary), Spec.load(spec))
    rows = [batches.batch(step) for step in range(2 if tiny else WARM + TIMED)]
    with pytest.MonkeyPatch.context() as patch, Engine(plan(model, spec), device=device) as engine:
        if not has_kernel:
            patch.setattr(documents, "has_kernel", lambda *_: False)
        found = timed(engine, rows, 1 if tiny else WARM, device)
    del engine, model
    release(device)
    return found


def timed(
    engine: Engine, rows: list[dict[str, Tensor]], warm: int, device: torch.device
) -> tuple[float, float, int | None]:
    for row in rows[:warm]:
        engine.train_step(row)
    wait(device)
    begun = time.perf_counter()
    for row in rows[warm:]:
        engine.train_step(row)
    wait(device)
    seconds = time.perf_counter() - begun
    count = sum(int((row["labels"] != -100).sum()) for row in rows[warm:])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return count / seconds, seconds / len(rows[warm:]), peak


def spec_of(length: int, vocabulary: int, packing: Any) -> dict[str, Any]:
    inputs = {name: {"shape": [length], "dtype": "int64", "high": vocabulary} for name in ("input_ids", "labels")}
    if packing:
        inputs["position_ids"] = {"shape": [length], "dtype": "int64"}
    return {
        "mesh": {},
        "batch": {"global": MICRO * MICROBATCHES, "micro": MICRO},
        "inputs": inputs,
        "data": {"packing": packing},
        "precision": {"parameters": "bfloat16"},
        "cluster": cluster(),
        "compile": False,
    }


def text_of(length: int, vocabulary: int) -> Tokens:
    """2,000 documents with a mean of a third of ``length``."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(2, 2 * length // 3, 2000)
    ids = draw.integers(0, vocabulary, int(sizes.sum()))
    how = Tokenization("drawn", vocabulary, {"padding": 0})
    return Tokens(ids, np.cumsum(sizes), np.ones(len(ids), np.uint8), sizes, how, "drawn", "drawn")

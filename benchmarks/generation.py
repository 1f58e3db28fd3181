"""The time of token 20 and of token 200, with kept keys and values and without: `python benchmarks/generation.py`.

GPT-2's 124M shape with random weights in float32, one process, one thread, one prompt. The time of a token is the
median of those around it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from planner import plan  # noqa: E402
from runtime import Engine  # noqa: E402
from runtime.engine.next_tokens import NextRows  # noqa: E402

PLACES, AROUND = (20, 200), 5
REACH = 1.3  # of the time of token 200 with kept rows, over that of token 20


@contextmanager
def stamped() -> Iterator[list[float]]:
    """Inside, the CPU time at which each token is chosen: one thread computes, so another program does not count."""
    stamps, chosen = list[float](), NextRows.tokens

    def noted(self: NextRows, *args: Any) -> list[int]:
        found = chosen(self, *args)
        stamps.append(time.process_time())
        return found

    NextRows.tokens = noted
    try:
        yield stamps
    finally:
        NextRows.tokens = chosen


def with_kept_rows(engine: Engine) -> list[float]:
    """Milliseconds of the tokens at ``PLACES``, of one text."""
    with stamped() as stamps:
        found = engine.generate([[5]], PLACES[-1] + AROUND)
    assert found.is_cached, found.uncached_because
    times = [1000 * (b - a) for a, b in pairwise(stamps)]
    return [statistics.median(times[place - AROUND : place + AROUND]) for place in PLACES]


def without(engine: Engine) -> list[float]:
    """The same, of a few tokens behind prompts that end there: each costs a whole forward."""
    found = []
    for place in PLACES:
        with stamped() as stamps:
            engine.generate([[5] * (place - 1)], 4, cache=False)
        found.append(1000 * statistics.median(b - a for a, b in pairwise(stamps)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=512, help="planned tokens of a sequence")
    parser.add_argument("--layers", type=int, default=12)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=asked.layers, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)).eval()
    inputs = {name: {"shape": [asked.length], "dtype": "int64", "high": 50257} for name in ("input_ids", "labels")}
    spec = {"mesh": {}, "batch": {"global": 1, "micro": 1}, "inputs": inputs, "optimizer": {"name": "adamw"}}
    with Engine(plan(model, spec), mode="evaluate") as engine:
        kept, whole = with_kept_rows(engine), without(engine)
    print(f"planned length {asked.length}, {asked.layers} layers, torch {torch.__version__}, 1 thread")
    print("| | token 20, ms | token 200, ms | ratio |\n|---|---|---|---|")
    for name, (early, late) in (("kept keys and values", kept), ("whole forwards", whole)):
        print(f"| {name} | {early:.1f} | {late:.1f} | {late / early:.2f} |")
    print(f"reach: a ratio of at most {REACH} with kept keys and values")


if __name__ == "__main__":
    main()

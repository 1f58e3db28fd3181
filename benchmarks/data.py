"""The cost of batches beside a step of the small GPT-2: `python benchmarks/data.py [STEPS]`.

Prepares the Python library as a token file, trains on it in one process, and prints, of a step: its seconds, those to
make its batch, and those that the loop waits for it when a thread makes it ahead.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from planner import plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime import Engine
from runtime.data.reading import read_tokens
from runtime.data.text.documents import STDLIB, files_of
from runtime.data.text.encoders import ByteEncoder
from runtime.data.token_batches import Prefetched, token_batches
from runtime.data.token_writer import prepare

ROOT = Path(__file__).resolve().parent.parent
TOKENS = {"shape": [64], "dtype": "int64", "high": 257}
SPEC = {
    "mesh": {},
    "batch": {"global": 16, "micro": 4},
    "inputs": {"input_ids": TOKENS, "labels": {"like": "input_ids"}},
}


def main(num_steps: int) -> None:
    spec = Spec.load(SPEC)
    with tempfile.TemporaryDirectory() as folder:
        path, begun = Path(folder) / "stdlib.tokens", time.perf_counter()
        header = prepare(files_of(STDLIB), path, ByteEncoder())
        seconds = time.perf_counter() - begun
        print(
            f"prepare: {header.bytes / 1e6:.1f} MB of text in {seconds:.2f} s, {header.bytes / 1e6 / seconds:.0f} MB/s"
        )
        batches = token_batches(read_tokens(str(path)), spec)
        making, steps, waits = [], [], []
        for step in range(num_steps):
            making.append(seconds_of(lambda step=step: batches.batch(num_steps + step)))
        with Engine(plan(load_model(f"hf:{ROOT / 'examples' / 'gpt2_small.json'}"), spec)) as engine:
            engine.train_step(batches.batch(0))
            with Prefetched(batches, 1, num_steps) as ahead:
                for step in range(1, num_steps):
                    begun = time.perf_counter()
                    batch = ahead.batch(step)
                    waits.append(time.perf_counter() - begun)
                    steps.append(seconds_of(lambda batch=batch: engine.train_step(batch).loss))
    a_step, a_batch, a_wait = median(steps), median(making), median(waits)
    print(f"a step {a_step * 1e3:.2f} ms; its batch {a_batch * 1e3:.3f} ms, {100 * a_batch / a_step:.2f} % of it")
    print(f"made ahead: {a_wait * 1e3:.3f} ms waited, {100 * a_wait / (a_wait + a_step):.3f} % of the time")
    print(f"of all {len(steps)} steps together: {100 * sum(waits) / (sum(waits) + sum(steps)):.3f} %")


def seconds_of(call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)

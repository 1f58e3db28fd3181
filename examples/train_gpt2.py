r"""The main job: an unmodified Hugging Face GPT-2 on 4 processes, tensor parallel 2 times pipeline 2.

Prints the plan, then trains on the bytes of the Python standard library with the loss of one process beside.
It is the command

    meshwright train hf:examples/gpt2_small.json specs/tp2_pp2.yaml \
        --data stdlib --steps 30 --compare --show-plan

With --auto the layout of the 4 processes is searched (specs/auto_local.yaml).
"""

from __future__ import annotations

import sys
from pathlib import Path

from runtime.cli import app

HERE = Path(__file__).resolve().parent


def main() -> None:
    name = "auto_local.yaml" if "--auto" in sys.argv else "tp2_pp2.yaml"
    model, spec = f"hf:{HERE / 'gpt2_small.json'}", str(HERE.parent / "specs" / name)
    given = [argument for argument in sys.argv[1:] if argument != "--auto"]
    app(["train", model, spec, "--data", "stdlib", "--steps", "30", "--compare", "--show-plan", *given])


if __name__ == "__main__":
    main()

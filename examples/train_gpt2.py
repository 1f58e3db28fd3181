r"""The main job: an unmodified Hugging Face GPT-2 on 4 processes, tensor parallel 2 times pipeline 2.

Prints the plan, then trains on the bytes of the Python standard library with the loss of one process beside.
It is the command

    meshwright train hf:examples/gpt2_small.json specs/tp2_pp2.yaml \
        --data stdlib --steps 30 --compare --show-plan

With --auto the layout of the 4 processes is searched (specs/auto_local.yaml). At its end the losses are drawn in
train_gpt2_loss.svg, where matplotlib is installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from runtime.cli import app

HERE = Path(__file__).resolve().parent


def main() -> None:
    name = "auto_local.yaml" if "--auto" in sys.argv else "tp2_pp2.yaml"
    model, spec = f"hf:{HERE / 'gpt2_small.json'}", str(HERE.parent / "specs" / name)
    given = [argument for argument in sys.argv[1:] if argument != "--auto"]
    given = [*_curve(), *given]
    app(["train", model, spec, "--data", "stdlib", "--steps", "30", "--compare", "--show-plan", *given])


def _curve() -> list[str]:
    """Where the losses are drawn, if they can be."""
    if find_spec("matplotlib") is None:
        print("no curve of the loss is drawn without matplotlib: pip install 'meshwright[plot]'", file=sys.stderr)
        return []
    return ["--plot", "train_gpt2_loss.svg"]


if __name__ == "__main__":
    main()

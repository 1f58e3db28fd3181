r"""The main job: an unmodified Hugging Face GPT-2 on 4 processes, tensor parallel 2 times pipeline 2.

Cuts the source of Python's standard library into tokens, prints the plan, then trains with the loss of one process
beside. It is the commands

    meshwright prepare stdlib -o runs/train_gpt2/text.tokens
    meshwright train hf:examples/gpt2_small.json specs/tp2_pp2.yaml \
        --data runs/train_gpt2/text.tokens --steps 30 --compare --show-plan --plot runs/train_gpt2/loss.svg

With --auto the layout of the 4 processes is searched (specs/auto_local.yaml). Without matplotlib no losses are drawn.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from runtime.cli import app

HERE = Path(__file__).resolve().parent
RUN = Path("runs/train_gpt2")


def main() -> None:
    name = "auto_local.yaml" if "--auto" in sys.argv else "tp2_pp2.yaml"
    model, spec = f"hf:{HERE / 'gpt2_small.json'}", str(HERE.parent / "specs" / name)
    given = [argument for argument in sys.argv[1:] if argument != "--auto"]
    RUN.mkdir(parents=True, exist_ok=True)
    text = str(RUN / "text.tokens")
    app(["prepare", "stdlib", "-o", text], standalone_mode=False)
    app(["train", model, spec, "--data", text, "--steps", "30", "--compare", "--show-plan", *_curve(), *given])


def _curve() -> list[str]:
    """The options that draw the losses, if matplotlib is there."""
    if find_spec("matplotlib") is None:
        print("no curve of the loss is drawn without matplotlib: pip install 'meshwright[plot]'", file=sys.stderr)
        return []
    return ["--plot", str(RUN / "loss.svg")]


if __name__ == "__main__":
    main()

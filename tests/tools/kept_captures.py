"""Fresh processes that load a model and plan it, and say how often they exported.

They are forked from one that has imported PyTorch and us.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

PARENT = """
import json, logging, os, sys
import torch
from torch import nn
from planner import PlanError, plan
from planner.capture.model.reference import load_model


def planned(change):
    exports, told = [], []
    export = torch.export.export

    def counted(*args, **kwargs):
        exports.append(1)
        return export(*args, **kwargs)

    torch.export.export = counted
    logging.getLogger("meshwright.captures").addHandler(handler := logging.Handler())
    logging.getLogger("meshwright.captures").setLevel(logging.DEBUG)
    handler.emit = lambda record: told.append(record.getMessage())
    for name, text in change.get("files", {}).items():
        with open(name, "w") as file:
            file.write(text)
    os.environ.update(change.get("environment", {}))
    model = load_model(change.get("model", "model.py:build"), **change.get("load", {}))
    if "before" in change:
        exec(change["before"])
    try:
        made = plan(model, {**json.loads(sys.argv[1]), **change.get("spec", {})})
    except PlanError as error:
        return {"error": str(error), "told": told, "exports": len(exports)}
    return {"exports": len(exports), "told": told, "hash": made.hash(), "text": made.describe(full=True)}


class Warm(nn.Module):  # modules that torch imports when it exports are imported once
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x).sum()


inputs = {"x": {"shape": [4], "dtype": "float32"}}
plan(Warm(), {"mesh": {"tp": 1}, "batch": {"global": 1, "micro": 1}, "inputs": inputs})
if "transformers" in sys.argv[2:]:
    import transformers.models.gpt2.modeling_gpt2

for line in sys.stdin:
    here, there = os.pipe()
    if os.fork() == 0:
        try:
            os.write(there, json.dumps(planned(json.loads(line))).encode())
        finally:
            os._exit(0)
    os.close(there)
    with open(here) as answer:
        print(answer.read(), flush=True)
    os.wait()
"""


class Processes:
    """Plans models in ``directory`` by ``spec``, one process a plan. Captures are kept in ``directory``/cache."""

    def __init__(self, directory: Path, spec: dict[str, Any], *libraries: str) -> None:
        self.directory = directory
        program = directory / "site-packages" / "parent.py"  # as if installed: it is no file of the user
        program.parent.mkdir(exist_ok=True)
        program.write_text(PARENT)
        environment = {
            "PATH": "/usr/bin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "MESHWRIGHT_CACHE": str(directory / "cache"),
        }
        command = [sys.executable, str(program), json.dumps(spec), *libraries]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=directory, text=True, env=environment, **pipes)

    def plan(self, **change: Any) -> Answer:
        """``files`` to write before, ``environment``, ``model``, ``load`` (arguments), ``before`` (code), ``spec``."""
        self.ask(**change)
        return self.answer()

    def ask(self, **change: Any) -> None:
        """Begin to plan."""
        print(json.dumps(change), file=self._process.stdin, flush=True)

    def answer(self) -> Answer:
        """Of what was asked."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, self.end()
        return Answer(json.loads(line))

    def end(self) -> str:
        """All that was written to stderr."""
        return self._process.communicate(timeout=HANG_SECONDS)[1]


class Answer:
    """Of one process. ``is_read``: nothing was exported; ``is_kept``: the next one reads it."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.plan, self.error = (found.get("hash", ""), found.get("text", "")), found.get("error", "")
        self.told: list[str] = found["told"]
        words = [line.partition(":")[0] for line in self.told]
        self.is_read, self.is_kept = words == ["read"] and not found["exports"], words[-1:] == ["kept"]
        self.is_captured = "captured" in words and found["exports"] > 0

"""A graph that is read and rewritten, and seldom run: no Python code is written for it.

fx writes and compiles the code of a GraphModule whenever its graph is set or rewritten. For a captured model that is a
twentieth of its capture, and that code seldom runs.
"""

from __future__ import annotations

from typing import Any

from torch import fx


class Unwritten(fx.GraphModule):
    """Runs op by op."""

    def recompile(self) -> Any:
        return None

    def forward(self, *args: Any) -> Any:
        return fx.Interpreter(self).run(*args)

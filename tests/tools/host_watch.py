"""What the host must not do while a step's work is queued on a device: wait for it, hand it values, compute beside it.

    stop     the value of a tensor is asked for: .item(), .tolist(), bool(t), a mask as an index
    copy     host memory goes up, by a tensor of the host or by a number made to one
    host     an op whose result lies on the host, among ops of a device

It looks below Python, where torch dispatches: under which name something was called does not matter. What reads memory
of the CPU without an op, and of a GPU by one, is seen where Python calls it.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes.base import RankProgram
from tests.tools.paths import ROOT

STOPS = ("_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_static", "equal", "masked_select", "unique_dim")
STOPS += ("_unique2", "unique_consecutive", "allclose", "repeat_interleave.Tensor")
COPIES = ("lift_fresh", "lift_fresh_copy")
READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__)


class Sight(NamedTuple):
    """``where``: the innermost line of ours, as file:line."""

    kind: str
    op: str
    where: str


class HostWatch(TorchDispatchMode):
    """Sees what the host does from the first forward of ``program`` on, until it is left.

    ``on_device``: tensors are to lie on a device, so that any on the host is a sight.
    Owns: ``sights``, and the hooks on the stage modules.
    """

    def __init__(self, program: RankProgram, *, on_device: bool = False) -> None:
        super().__init__()
        self.sights: list[Sight] = []
        self.num_ops = 0
        self._on_device, self._program, self.has_begun = on_device, program, False

    def __enter__(self) -> HostWatch:
        self._hooks = [stage.module.register_forward_pre_hook(self._begin) for stage in self._program.stages]
        self._reads = _Reads(self)
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.has_begun:
            return func(*args, **(kwargs or {}))
        self.num_ops += 1
        name = func._schema.name.rpartition("::")[2]
        knows_size = (kwargs or {}).get("output_size") is not None
        if name in STOPS or (f"{name}.{func._overloadname}" in STOPS and not knows_size):
            self.see("stop", func)
        elif name in COPIES:
            self.see("copy", func)
        result = func(*args, **(kwargs or {}))
        if self._on_device:
            self._look(func, (args, kwargs), result)
        return result

    def _begin(self, *_: Any) -> None:
        self.has_begun = True

    def _look(self, func: Any, given: Any, result: Any) -> None:
        devices = {t.device.type for t in tree_leaves(result) if isinstance(t, Tensor)}
        from_host = any(isinstance(t, Tensor) and t.device.type == "cpu" for t in tree_leaves(given))
        if "cpu" in devices:
            self.see("host", func)
        elif from_host and func.namespace != "c10d":
            self.see("copy", func)

    def see(self, kind: str, func: Any) -> None:
        self.sights.append(Sight(kind, str(func), _where()))


class _Reads(TorchFunctionMode):
    """Tells a watch of what reads a tensor's memory from Python."""

    def __init__(self, watch: HostWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._watch.has_begun and func in READS:
            self._watch.see("stop", func.__name__)
        return func(*args, **(kwargs or {}))


def _where() -> str:
    own = Path(__file__).name
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.name != own and ".venv" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "the graph"

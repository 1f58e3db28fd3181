"""The calls of one forward, recorded as torch.export would record them, without its graph: a fifth of its time.

The modes that export enters around a forward are entered here too, with another recorder in the place of its proxies.
Whether both record the same is not assumed: a recording is compared with a real export before it is used
(capture.again.first_export).

The calls of a recording as a graph, made when a branch of the forward asks for the value of a tensor.

    if (positions == 0).all(): …        passes.program.known_values reads the calls that made the tensor, as of export

Takes the place of export's tracer: ``graph``, ``root`` and ``tensor_tracker`` are the parts of it that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_pre_dispatch, enable_python_dispatcher
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export._trace import _ignore_backend_decomps
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from passes.program.known_values import known_result
from planner.capture.again.operands import Operand, Recorded, Recording, batch_tensor, constant, is_constant, parameter
from planner.capture.gradients.autocast import autocast_now


class FurtherCall:
    """One more forward without export, within ``running``: in the modes of export on which results and strides depend.

    ``has_ended``: whether the forward came to its end.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.has_ended = False
        self._mode = mode

    @contextmanager
    def running(self) -> Iterator[Callable[[Any], None]]:
        """Around the forward; the result is to be called with its output."""
        with _ignore_backend_decomps(), self._mode, enable_python_dispatcher():
            yield self._end

    def _end(self, output: Any) -> None:
        self.has_ended = True


class CallRecorder(FurtherCall):
    """Records the forward of ``model`` on ``kwargs``, too. ``found``: its recording, if it has ended."""

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Tensor], mode: FakeTensorMode) -> None:
        super().__init__(mode)
        self.found: Recording | None = None
        held = {parameter(name): t for name, t in model.named_parameters(remove_duplicate=False)}
        held |= {parameter(name): t for name, t in model.named_buffers(remove_duplicate=False)}
        held |= {batch_tensor(key): t for key, t in kwargs.items()}
        self._recorder = _Mode(Recording(mode, held))

    @contextmanager
    def running(self) -> Iterator[Callable[[Any], None]]:
        with ExitStack() as stack:
            modes = _ignore_backend_decomps(), self._mode, _NonStrictTorchFunctionHandler()
            for mode in (*modes, enable_python_dispatcher(), enable_pre_dispatch(), self._recorder):
                stack.enter_context(mode)
            stack.enter_context(proxy_tensor.disable_autocast_cache())
            yield self._end

    def _end(self, output: Any) -> None:
        recorder = self._recorder
        recorder.recording.output = [recorder.operand(leaf) for leaf in pytree.tree_leaves(output)]
        self.found, self.has_ended = recorder.recording, True


class _Mode(proxy_tensor.ProxyTorchDispatchMode):
    """Takes the place of export's proxies in the stack of modes."""

    def __init__(self, recording: Recording) -> None:
        tracer: Any = LateGraph(recording, lambda tensor: self._known.get(tensor))
        super().__init__(tracer, "real", pre_dispatch=True)
        self.recording = recording
        # weak, since PyTorch gives a factory's result another object if anything else holds it
        self._known: MutableMapping[Tensor, Operand] = WeakTensorKeyDictionary()
        for name, tensor in reversed(recording.held.items()):  # by the first of its names
            self._known[tensor] = Operand(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if (found := known_result(self, func, args, kwargs)) is not None:
            return found
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.lift_fresh_copy.default
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_now()
        call = Recorded(func, self.operand(args), self.operand(kwargs), state)
        result = func(*args, **kwargs)
        self._note(result, len(self.recording.calls))
        self.recording.calls.append(call)
        self.recording.values.append(proxy_tensor.extract_val(result))
        return result

    def _note(self, result: Any, number: int) -> None:
        if isinstance(result, Tensor):
            self._known[result] = Operand(number)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._known[item] = Operand(number, i)

    def operand(self, value: Any) -> Any:
        """``value`` with an Operand for each tensor. Raises ValueError for a tensor that is not of this forward."""
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.operand, value))
        if isinstance(value, dict):
            return {key: self.operand(inner) for key, inner in value.items()}
        return value

    def _of_tensor(self, tensor: Tensor) -> Operand:
        if (known := self._known.get(tensor)) is not None:
            return known
        if isinstance(tensor, FakeTensor):
            raise ValueError("made elsewhere")
        name = constant(len(self.recording.held))
        self.recording.held[name], self._known[tensor] = tensor, Operand(name)
        return self._known[tensor]


# ---- the calls of a recording as a graph, made when a branch of the forward asks for the value of a tensor


class LateGraph:
    """Owns the graph of ``recording`` up to the last question. ``known``: the operand of a tensor, if it has one."""

    def __init__(self, recording: Recording, known: Callable[[Tensor], Operand | None]) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.tensor_tracker = _Tracker(self._node_of, known)
        self._recording = recording
        self._nodes: dict[Operand, fx.Node] = {}
        self._made = 0

    def _node_of(self, operand: Operand) -> fx.Node:
        for number in range(self._made, len(self._recording.calls)):
            call = self._recording.calls[number]
            args, kwargs = pytree.tree_map_only(Operand, self._node, (call.args, call.kwargs))
            node = self._nodes[Operand(number)] = self.graph.call_function(call.target, args, kwargs)
            node.meta["val"] = self._recording.values[number]
        self._made = len(self._recording.calls)
        return self._node(operand)

    def _node(self, operand: Operand) -> fx.Node:
        if operand not in self._nodes:
            self._nodes[operand] = self._new(operand)
        return self._nodes[operand]

    def _new(self, operand: Operand) -> fx.Node:
        if operand.item is not None:
            raise ValueError("one of several results")
        name = str(operand.origin)
        if not is_constant(name):
            return self.graph.placeholder(name.replace(".", "_").replace(" ", "_"))
        setattr(self.root, name.replace(" ", "_"), self._recording.held[name])
        return self.graph.create_node("get_attr", name.replace(" ", "_"))


class _Tracker:
    """Of a tensor the node, where torch's ``get_proxy_slot`` looks for it."""

    def __init__(self, node_of: Callable[[Operand], fx.Node], known: Callable[[Tensor], Operand | None]) -> None:
        self._node_of, self._known = node_of, known

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        operand = self._known(tensor)
        return default if operand is None else SimpleNamespace(proxy=SimpleNamespace(node=self._node_of(operand)))

    def __contains__(self, tensor: Tensor) -> bool:
        return self._known(tensor) is not None

    def __getitem__(self, tensor: Tensor) -> Any:
        return self.get(tensor)

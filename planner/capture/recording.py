"""Record the calls of one forward as a graph, as torch.export does, in a fifth of its time.

The modes that export enters around a forward are entered here too, with another recorder in place of its proxies.
A recording is compared with a real export before it is used (planner.capture.resized).
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from operator import getitem
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_pre_dispatch, enable_python_dispatcher
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export._trace import _ignore_backend_decomps
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from passes.program.known_values import known_result
from planner.capture.gradients.regions import autocast_now


class Recording:
    """The calls of one forward as a graph. ``parameters``, ``inputs``: placeholders by name; ``results``: leaves.

    While a branch of the forward asks for the value of a tensor (passes.program.known_values), it replaces export's
    tracer: ``graph``, ``root`` and ``tensor_tracker`` are the attributes that are read then.
    """

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Tensor]) -> None:
        self.graph, self.root, self.results = fx.Graph(), SimpleNamespace(), list[Any]()
        # weak, since PyTorch gives a factory's result another object if anything else holds it
        self.tensor_tracker: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()
        held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.parameters = {name: self._placeholder(f"parameter {name}", tensor) for name, tensor in held}
        self.inputs = {key: self._placeholder(f"input {key}", tensor) for key, tensor in kwargs.items()}
        for key, node in self.inputs.items():
            node.meta["val"] = proxy_tensor.extract_val(kwargs[key])

    @property
    def constants(self) -> dict[str, Tensor]:
        """Return the tensors that were not made in this forward."""
        return vars(self.root)

    def _placeholder(self, name: str, tensor: Tensor) -> fx.Node:
        """Return the placeholder of a tensor, under the first of its names."""
        if tensor not in self.tensor_tracker:
            self._track(tensor, self.graph.placeholder(name))
        return self._node(tensor)

    def _track(self, tensor: Tensor, node: fx.Node) -> None:
        self.tensor_tracker[tensor] = SimpleNamespace(proxy=SimpleNamespace(node=node))

    def _node(self, tensor: Tensor) -> fx.Node:
        if tensor not in self.tensor_tracker:
            if isinstance(tensor, FakeTensor):
                raise ValueError("made elsewhere")
            name = f"constant_{len(self.constants)}"
            setattr(self.root, name, tensor)
            self._track(tensor, self.graph.create_node("get_attr", name))
        return self.tensor_tracker[tensor].proxy.node

    def nodes(self, value: Any) -> Any:
        """Replace each tensor in ``value`` by its node. Raises ValueError for a tensor of another forward."""
        return pytree.tree_map_only(Tensor, self._node, value)

    def note(self, target: Any, given: tuple[Any, Any], result: Any, state: tuple[Any, ...]) -> None:
        """Add one call, with nodes among its arguments ``given``. ``state``: the modes in which it ran."""
        node = self.graph.call_function(target, *given)
        node.meta = {"state": state, "val": proxy_tensor.extract_val(result)}
        if isinstance(result, Tensor):
            self._track(result, node)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    part = self.graph.call_function(getitem, (node, i))
                    part.meta["val"] = node.meta["val"][i]
                    self._track(item, part)

    def forget_values(self) -> None:
        """Forget the values of nodes; calls and constants remain."""
        for node in self.graph.nodes:
            node.meta.pop("val", None)


class FurtherCall:
    """One more forward without export, within ``running``: in the modes of export that affect results and strides.

    ``has_ended``: whether the forward came to its end.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.has_ended = False
        self._mode = mode

    @contextmanager
    def running(self) -> Iterator[Callable[[Any], None]]:
        """Enter the modes around the forward; the yielded function receives its output."""
        with _ignore_backend_decomps(), _compiling_state_context(), self._mode, enable_python_dispatcher():
            yield self._end

    def _end(self, output: Any) -> None:
        self.has_ended = True


class CallRecorder(FurtherCall):
    """One more forward that is recorded too. ``found``: its recording, once it has ended."""

    def __init__(self, model: nn.Module, kwargs: Mapping[str, Tensor], mode: FakeTensorMode) -> None:
        super().__init__(mode)
        self.found: Recording | None = None
        self._recording = Recording(model, kwargs)

    @contextmanager
    def running(self) -> Iterator[Callable[[Any], None]]:
        with ExitStack() as stack:
            modes = _ignore_backend_decomps(), _compiling_state_context(), self._mode, _NonStrictTorchFunctionHandler()
            for mode in (*modes, enable_python_dispatcher(), enable_pre_dispatch(), _Mode(self._recording)):
                stack.enter_context(mode)
            stack.enter_context(proxy_tensor.disable_autocast_cache())
            yield self._end

    def _end(self, output: Any) -> None:
        self._recording.results = self._recording.nodes(pytree.tree_leaves(output))
        self.found, self.has_ended = self._recording, True


class _Mode(proxy_tensor.ProxyTorchDispatchMode):
    """Replaces export's proxies in the stack of modes."""

    def __init__(self, recording: Any) -> None:
        super().__init__(recording, "real", pre_dispatch=True)
        self._recording: Recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if (found := known_result(self, func, args, kwargs)) is not None:
            return found
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.lift_fresh_copy.default
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_now()
        given = self._recording.nodes((args, kwargs))  # before the call: it may write into them
        result = func(*args, **kwargs)
        self._recording.note(func, given, result, state)
        return result

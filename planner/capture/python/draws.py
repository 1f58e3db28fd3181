"""Python's own random numbers and clocks in a forward: export runs it once, and their values would be frozen.

    random.random() < 0.0        certain for every draw: layer drop that is switched off
    0.1 * random.random()        PlanError with the user's line
    np.random.normal(size=4)     PlanError
    time.time()                  a doubt: does the forward's result depend on it? (planner.capture.python.state)
    f"axis {uuid.uuid4().int}"   the same doubt; a number that is computed from it, or compared: PlanError

Seeds and generators of PyTorch in a forward: an op has new draws in each step of a plan, whatever they say.

    torch.manual_seed(3); x + torch.randn_like(x)      PlanError: one process repeats the noise
    with torch.random.fork_rng(): …                    PlanError: so does what is drawn after it
    torch.rand(4, generator=self.generator)            PlanError: a generator of the model's own

While a forward is watched, PyTorch's generator has a seed of ours; any other seed was set by the forward.

Layer drop asks at each layer ``if torch.rand([]) < probability: continue``. A draw from [0, 1) is never below 0 and
always below 1: at probability 0 (or 1) the answer is known, and so is the branch. That a draw is not 0
(``torch.rand(1) > 0.0``) is true of all but one in 2^24: an assumption of the plan.
"""

import functools
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from passes.errors import Where
from passes.interceptors import by_identity, installed
from passes.program.known_values import known_answer
from planner.capture.model.exchange import python_generators_kept
from planner.capture.python.modules import own_modules
from planner.capture.user_lines import CallSites, called_by_user, is_of_python

FIX = "use torch.rand(()) or F.dropout, which draw new numbers in each step; or draw outside the forward"
CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
TIME = "the time"
UNIT = ("random", "rand", "random_sample", "ranf", "sample", "uniform")  # give a number from [0, 1) if asked for one
SEED_FIX = (
    "use F.dropout or torch.randn_like without a seed, which draw new numbers in each step; create noise that must "
    "repeat outside the forward, as a buffer or an input"
)
SETTERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "fork_rng")
_SEED = 0x5EED_0F_0C5  # of no user's
_REPEATED = "one process repeats the noise, but a plan would draw new noise"


class PythonDraws:
    """Watches one forward. ``doubts``: clocks and identifiers that it reads, which change, with the lines."""

    def __init__(self, model: nn.Module) -> None:
        self.doubts: list[tuple[str, Where]] = []
        self._sites, self._modules, self._is_running = CallSites(model), own_modules(model), False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch inside; afterwards all generators are restored: planning draws nothing from them."""
        replaced = {id(original): (original, watch) for original, watch in self._watches()}
        owners = random, np.random, time, os, uuid, secrets, *_of_torch(), *self._modules
        generator = torch.default_generator
        with _untraced():
            state, self._own_seed = generator.get_state(), generator.initial_seed()
            generator.manual_seed(_SEED)
        running = self, "_is_running", True
        try:
            with python_generators_kept(), installed(*by_identity(owners, replaced), running):
                yield
        finally:
            with _untraced():
                generator.set_state(state)

    def check(self, kwargs: Mapping[str, Any] | None) -> None:
        """Check the arguments of a torch function, and whether a method of the generator set the seed."""
        if not self._is_running:
            return
        if isinstance((kwargs or {}).get("generator"), torch.Generator):
            self._refuse_seed("draws from its own torch.Generator", "a plan cannot save its state")
        if torch.default_generator.initial_seed() != _SEED:
            self._refuse_seed("sets the seed of PyTorch", _REPEATED)

    def _watches(self) -> Iterator[tuple[Any, Any]]:
        for module, owner in ((random, random._inst), (np.random, np.random.mtrand._rand)):  # pyright: ignore
            for name, function in vars(module).items():
                if getattr(function, "__self__", None) is owner and not name.startswith(("_", "get", "set", "seed")):
                    yield function, self._draw(name, function)
        for function in (os.urandom, secrets.token_bytes, secrets.token_hex, secrets.randbits):
            yield function, self._draw(function.__name__, function)
        for function in (uuid.uuid1, uuid.uuid4):
            yield function, self._doubted(f"an identifier ({function.__name__})", function)
        for name in CLOCKS:
            yield getattr(time, name), self._doubted(TIME, getattr(time, name))
        for module in _of_torch():
            for name in SETTERS:
                if hasattr(module, name):
                    yield getattr(module, name), self._setter(name, getattr(module, name))
        yield torch.random.initial_seed, lambda: self._own_seed

    def _draw(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if not called_by_user() or is_of_python(sys._getframe(1)):
                return value
            is_unit = name in UNIT and isinstance(value, float) and not kwargs and args in ((), (0, 1), (0.0, 1.0))
            if not is_unit:
                self._refuse(name)
            return Draw(value, lambda: self._refuse(name))

        return draw

    def _refuse(self, name: str) -> None:
        self._sites.refuse(
            f"the forward draws a random number in Python ({name}): a plan would freeze that of the capture", FIX
        )

    def _doubted(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def asked(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if called_by_user() and not is_of_python(sys._getframe(1)):
                self.doubts.append((what, self._sites.here()))
                if isinstance(value, uuid.UUID):
                    object.__setattr__(value, "int", Identifier(value.int, lambda: self._refuse(original.__name__)))
            return value

        return asked

    def _setter(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setter(*args: Any, **kwargs: Any) -> Any:
            is_off = name == "fork_rng" and kwargs.get("enabled") is False
            if self._is_running and called_by_user() and not is_off:
                self._refuse_seed(f"sets the state of PyTorch's random numbers ({name})", _REPEATED)
            return original(*args, **kwargs)

        return setter

    def _refuse_seed(self, does: str, why: str) -> None:
        self._is_running = False  # calls on the error's way out are not checked
        self._sites.refuse(f"the forward {does}: {why}", SEED_FIX)


class _Refused:
    """A number with which nothing may compute."""

    refuse: Callable[[], None]

    def __new__(cls, value: Any, refuse: Callable[[], None]) -> Any:
        made: Any = super().__new__(cls, value)  # pyright: ignore[reportCallIssue]
        made.refuse = refuse
        return made

    def _used(self, *_: Any, **__: Any) -> Any:
        self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __float__ = _used


_USED: Any = _Refused._used


ASKS = ("__bool__", "item", "tolist", "numpy", "__int__", "__float__", "__index__")
COMPARES = ("lt", "le", "gt", "ge")


class CertainDraws(TorchFunctionMode):
    """While active, a certain comparison of one drawn number is a constant tensor, on which a branch may depend.

    ``check`` gets the arguments of every torch function; ``assume`` is called when a draw is assumed not to be 0.
    """

    def __init__(self, check: Callable[..., None] | None = None, assume: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._check, self._assume = check, assume

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._check is not None:
            self._check(args, kwargs)
        if getattr(func, "__name__", "") in ASKS and len(args) == 1 and not kwargs:
            answer = known_answer(args[0], func.__name__)
            if answer is not None:
                return answer
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        draws = name in ("rand", "rand_like") or (name == "uniform_" and len(args) == 1 and not kwargs)
        if draws and isinstance(result, Tensor) and result.numel() == 1:
            result._drawn_at_version = result._version  # pyright: ignore[reportAttributeAccessIssue]
        elif name in COMPARES and len(args) == 2 and _is_drawn(args[0]) and isinstance(args[1], (int, float)):
            answer = certain_answer(name, args[1])
            if answer is None and self._assume is not None and args[1] == 0:
                self._assume()
                answer = name == "gt"
            if answer is not None:
                return torch.tensor(answer, device=args[0].device).reshape(result.shape)
        return result


def _is_drawn(x: Any) -> bool:
    """Return whether the tensor was not written to since it was drawn."""
    return isinstance(x, Tensor) and getattr(x, "_drawn_at_version", None) == x._version


def certain_answer(name: str, bound: float) -> bool | None:
    """Return ``draw < bound`` (or <=, >, >=) for every draw from [0, 1); None if it depends on the draw."""
    if bound >= 1 or bound < 0:
        return (name in ("lt", "le")) == (bound >= 1)
    return {"lt": False, "ge": True}.get(name) if bound == 0 else None


class Draw(_Refused, float):
    """A number drawn from [0, 1): only comparisons with a certain answer are allowed."""

    def _compare(self, name: str, bound: Any) -> bool:
        answer = certain_answer(name, bound) if isinstance(bound, (int, float)) else None
        if answer is None:
            self.refuse()
        return bool(answer)

    __lt__: Any = functools.partialmethod(_compare, "lt")
    __le__: Any = functools.partialmethod(_compare, "le")
    __gt__: Any = functools.partialmethod(_compare, "gt")
    __ge__: Any = functools.partialmethod(_compare, "ge")
    __round__ = __int__ = __trunc__ = __bool__ = _USED


class Identifier(_Refused, int):
    """The number of a UUID: it may name a thing, but nothing is computed from it."""

    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = __invert__ = _USED
    __lt__ = __le__ = __gt__ = __ge__ = __divmod__ = to_bytes = bit_length = bit_count = _USED


def _of_torch() -> tuple[ModuleType, ...]:
    """Return the modules with functions that set seeds; importing torch._dynamo adds another torch.manual_seed."""
    return torch, torch.random, sys.modules["torch.cuda"]


@contextmanager
def _untraced() -> Iterator[None]:
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield

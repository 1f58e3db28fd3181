"""Python's own random numbers and clocks in a forward: export runs it once, and their values would be frozen.

    random.random() < 0.0        certain for every draw: layer drop that is switched off
    0.1 * random.random()        PlanError with the user's line
    np.random.normal(size=4)     PlanError
    time.time()                  a doubt: does the forward's result depend on it? (planner.capture.python.state)
    f"axis {uuid.uuid4().int}"   the same doubt; a number that is computed from it, or compared: PlanError

The functions are replaced in their modules, and in the user's modules that imported them by name, for one forward.

Seeds and generators of PyTorch in a forward: an op has new draws in each step of a plan, whatever they say.

    torch.manual_seed(3); x + torch.randn_like(x)      PlanError: one process repeats the noise
    with torch.random.fork_rng(): …                    PlanError: so does what is drawn after it
    torch.rand(4, generator=self.generator)            PlanError: a generator of the model's own

While a forward is watched, PyTorch's generator has a seed of ours; any other seed was set by the forward.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from passes.canonical.certain_draws import certain_answer
from passes.errors import PlanError, Where
from planner.capture.gradients.call_sites import CallSites, called_by_user
from planner.capture.python.modules import names_replaced, own_modules

FIX = "use torch.rand(()) or F.dropout, which draw new numbers in each step; or draw outside the forward"
_LIBRARY = os.path.dirname(os.__file__) + os.sep
CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
TIME = "the time"
UNIT = ("random", "rand", "random_sample", "ranf", "sample", "uniform")  # give a number from [0, 1) if asked for one


class PythonDraws:
    """Watches one forward. ``doubts``: what lines of the user read that is another in each call, and these lines."""

    def __init__(self, model: nn.Module) -> None:
        self.doubts: list[tuple[str, Where]] = []
        self._sites = CallSites(model)
        self._modules = own_modules(model)
        self.seeds = TorchSeeds(self._sites)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Afterwards Python's and NumPy's generators are restored: planning draws nothing from them."""
        states = random.getstate(), np.random.get_state()
        replaced = {id(original): (original, watch) for original, watch in self._watches()}
        try:
            owners = [
                random,
                np.random,
                time,
                os,
                uuid,
                secrets,
                torch,
                torch.random,
                sys.modules["torch.cuda"],
                *self._modules,
            ]
            with names_replaced(owners, replaced), self.seeds.watched():
                yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def _watches(self) -> Iterator[tuple[Any, Any]]:
        for module, owner in ((random, random._inst), (np.random, np.random.mtrand._rand)):  # pyright: ignore
            for name, function in vars(module).items():
                if getattr(function, "__self__", None) is owner and not name.startswith(("_", "get", "set", "seed")):
                    yield function, self._draw(name, function)
        for function in (os.urandom, secrets.token_bytes, secrets.token_hex, secrets.randbits):
            yield function, self._draw(function.__name__, function)
        for function in (uuid.uuid1, uuid.uuid4):
            yield function, self._identifier(function)
        for name in CLOCKS:
            yield getattr(time, name), self._clock(getattr(time, name))
        yield from self.seeds.replacements()

    def _draw(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if not called_by_user() or _is_of_python(sys._getframe(1)):
                return value
            is_unit = name in UNIT and isinstance(value, float) and not kwargs and args in ((), (0, 1), (0.0, 1.0))
            if not is_unit:
                self._refuse(name)
            return Draw(value, lambda: self._refuse(name))

        return draw

    def _refuse(self, name: str) -> None:
        raise PlanError(
            f"the forward draws a random number in Python ({name}): a plan would freeze that of the capture",
            where=self._sites.here(),
            fix=FIX,
        )

    def _clock(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clock() -> Any:
            if called_by_user() and not _is_of_python(sys._getframe(1)):
                self.doubts.append((TIME, self._sites.here()))
            return original()

        return clock

    def _identifier(self, original: Callable[..., uuid.UUID]) -> Callable[..., uuid.UUID]:
        @functools.wraps(original)
        def identifier(*args: Any, **kwargs: Any) -> uuid.UUID:
            value = original(*args, **kwargs)
            if called_by_user() and not _is_of_python(sys._getframe(1)):
                self.doubts.append((f"an identifier ({original.__name__})", self._sites.here()))
                object.__setattr__(value, "int", Identifier(value.int, lambda: self._refuse(original.__name__)))
            return value

        return identifier


class Draw(float):
    """A number drawn from [0, 1): only comparisons with a certain answer are allowed."""

    refuse: Callable[[], None]

    def __new__(cls, value: float, refuse: Callable[[], None]) -> Draw:
        made = super().__new__(cls, value)
        made.refuse = refuse
        return made

    def _compare(self, name: str, bound: Any) -> bool:
        answer = certain_answer(name, bound) if isinstance(bound, (int, float)) else None
        if answer is None:
            self.refuse()
        return bool(answer)

    def __lt__(self, bound: Any) -> bool:
        return self._compare("lt", bound)

    def __le__(self, bound: Any) -> bool:
        return self._compare("le", bound)

    def __gt__(self, bound: Any) -> bool:
        return self._compare("gt", bound)

    def __ge__(self, bound: Any) -> bool:
        return self._compare("ge", bound)

    def _used(self, *_: Any) -> Any:
        self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _used
    __int__ = __trunc__ = __float__ = __bool__ = _used


class Identifier(int):
    """The number of a UUID: it may name a thing, but nothing is computed of it."""

    refuse: Callable[[], None]

    def __new__(cls, value: int, refuse: Callable[[], None]) -> Identifier:
        made = super().__new__(cls, value)
        made.refuse = refuse
        return made

    def _used(self, *_: Any, **__: Any) -> Any:
        self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _used
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = __invert__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __divmod__ = _used
    to_bytes = bit_length = bit_count = _used


def _is_of_python(frame: FrameType) -> bool:
    """Whether a frame is in Python's own library: a log record has a time, which is unrelated to the forward."""
    return frame.f_code.co_filename.startswith(_LIBRARY) and "site-packages" not in frame.f_code.co_filename


# ---- seeds and generators of PyTorch in a forward: an op has new draws in each step of a plan, whatever they say


SEED_FIX = (
    "use F.dropout or torch.randn_like without a seed, which draw new numbers in each step; create noise that must "
    "repeat outside the forward, as a buffer or an input"
)
SETTERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "fork_rng")
_SEED = 0x5EED_0F_0C5  # of no user's


class TorchSeeds:
    """Watches one forward."""

    def __init__(self, sites: CallSites) -> None:
        self._sites, self._is_running = sites, False

    def replacements(self) -> Iterator[tuple[Any, Any]]:
        """Functions of PyTorch that set a seed, and their replacements meanwhile."""
        for module in (
            torch,
            torch.random,
            sys.modules["torch.cuda"],
        ):  # importing torch._dynamo puts another torch.manual_seed there
            for name in SETTERS:
                if hasattr(module, name):
                    yield getattr(module, name), self._setter(name, getattr(module, name))
        yield torch.random.initial_seed, lambda: self._own_seed

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Afterwards PyTorch's generator is restored."""
        generator = torch.default_generator
        with _untraced():
            state, self._own_seed = generator.get_state(), generator.initial_seed()
            generator.manual_seed(_SEED)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            with _untraced():
                generator.set_state(state)

    def check(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Check the arguments of each torch function, and whether a method of the generator set the seed."""
        if not self._is_running:
            return
        if isinstance((kwargs or {}).get("generator"), torch.Generator):
            self._refuse("draws from its own torch.Generator", "a plan cannot save its state")
        if torch.default_generator.initial_seed() != _SEED:
            self._refuse("sets the seed of PyTorch", _REPEATED)

    def _setter(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setter(*args: Any, **kwargs: Any) -> Any:
            is_off = name == "fork_rng" and kwargs.get("enabled") is False
            if self._is_running and called_by_user() and not is_off:
                self._refuse(f"sets the state of PyTorch's random numbers ({name})", _REPEATED)
            return original(*args, **kwargs)

        return setter

    def _refuse(self, does: str, why: str) -> None:
        self._is_running = False  # calls on the error's way out are not checked
        raise PlanError(f"the forward {does}: {why}", where=self._sites.here(), fix=SEED_FIX)


_REPEATED = "one process repeats the noise, but a plan would draw new noise"


@contextmanager
def _untraced() -> Iterator[None]:
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield

"""Seeds and generators of PyTorch in a forward: an op has new draws in each step of a plan, whatever they say.

    torch.manual_seed(3); x + torch.randn_like(x)      PlanError: one process repeats the noise
    with torch.random.fork_rng(): …                    PlanError: so does what is drawn after it
    torch.rand(4, generator=self.generator)            PlanError: a generator of the model's own

While a forward is watched, PyTorch's generator has a seed of ours; any other seed was set by the forward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from passes.errors import PlanError
from planner.capture.gradients.call_sites import CallSites, called_by_user

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

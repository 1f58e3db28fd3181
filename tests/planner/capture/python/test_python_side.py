"""What a forward keeps in Python and reads again: frozen by a capture, so refused by line, or shown not to matter."""

import itertools
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from planner import PlanError, plan
from tests.models.one_body import SPEC
from tests.models.with_state import Middle, Model, assert_planned_and_left_alone

COUNT = 0


def counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x / m.calls


def counter_in_a_tensor(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x / torch.tensor([float(m.calls), 1.0] * 4)


def late_counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * 2 if m.calls > 1000 else x


def nested_counter(m: Any, x: Tensor) -> Tensor:
    m.state.seen += 1
    return x * m.state.seen


def global_counter(m: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def log_length(m: Any, x: Tensor) -> Tensor:
    m.log.append(1)
    return x * len(m.log)


def first_call(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.ready = True
        return x * 3
    return x


def recurrent(m: Any, x: Tensor) -> Tensor:
    y = x if m.memory is None else x + m.memory
    m.memory = x.detach()
    return y


def average_read(m: Any, x: Tensor) -> Tensor:
    y = x - m.average
    with torch.no_grad():
        m.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return y


def plain_counter(m: Any, x: Tensor) -> Tensor:
    m.plain.add_(1)
    return x * m.plain


COUNTER, SWITCH = itertools.count(1), itertools.cycle([1.0, 2.0])
SECOND, THIRD = (itertools.chain([1.0] * n, [2.0], itertools.repeat(1.0)) for n in (1, 2))
NUMBERS, BYTES, ARRAY = iter([1.0, 2.0, 3.0] * 9), bytearray(1), np.zeros(1)
KEPT_ELSEWHERE: dict[str, Any] = {"tau": 1.0, "n": 0}
CONTEXT: ContextVar[int] = ContextVar("calls", default=0)


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


SLOTTED = Slotted()


def bytes_counted(m: Any, x: Tensor) -> Tensor:
    BYTES[0] += 1
    return x * BYTES[0]


def array_counted(m: Any, x: Tensor) -> Tensor:
    ARRAY[0] += 1
    return x * torch.from_numpy(ARRAY.repeat(8)).float()


def slot(m: Any, x: Tensor) -> Tensor:
    SLOTTED.n += 1
    return x if SLOTTED.n % 2 else x * 2


def default_argument(m: Any, x: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return x / calls[0]


def function_attribute(m: Any, x: Tensor) -> Tensor:
    f: Any = function_attribute
    f.calls = getattr(f, "calls", 0) + 1
    return x + f.calls


def context_variable(m: Any, x: Tensor) -> Tensor:
    CONTEXT.set(CONTEXT.get() + 1)
    return x * CONTEXT.get()


def number_in_a_dict(m: Any, x: Tensor) -> Tensor:
    KEPT_ELSEWHERE["tau"] *= 0.9
    return x * KEPT_ELSEWHERE["tau"]


def annealed(m: Any, x: Tensor) -> Tensor:
    m.plain = m.plain * 0.9
    return x * m.plain


def annealed_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.cache["tau"] = m.cache.get("tau", m.plain) * 0.9
    return x * m.cache["tau"]


def every_tenth(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * 2 if m.calls % 10 == 0 else x


def between(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * 2 if 2 <= m.calls < 1000 else x


def once(m: Any, x: Tensor, call: int) -> Tensor:
    m.calls += 1
    return x * 2 if m.calls == call else x


def every_third_length(m: Any, x: Tensor) -> Tensor:
    m.log.append(1)
    return x * 2 if len(m.log) % 3 == 0 else x


def without_gradient_later(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    with torch.set_grad_enabled(m.calls <= 1):
        return x * m.up.bias


def rounded_later(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=m.calls > 1):
        return m.up(x).float()


def written_later(m: Any, x: Tensor) -> Tensor:
    """Through another name of the memory, so that no later call has other operands."""
    m.calls += 1
    y = x * 3
    alias = y.view(-1)
    return y if m.calls <= 1 else (alias.mul_(2), y)[1]


def dropped_later(m: Any, x: Tensor) -> Tensor:
    m.memory, m.calls = x.detach(), m.calls + 1
    return F.dropout(x, 0.5, training=m.calls > 1)


REFUSED: dict[str, Middle] = {f.__name__: f for f in (
    without_gradient_later, rounded_later, written_later, dropped_later, every_tenth, between, every_third_length,
    bytes_counted, array_counted, slot, default_argument, function_attribute, context_variable, number_in_a_dict,
    annealed, annealed_in_a_dict, counter, counter_in_a_tensor, late_counter, nested_counter, global_counter,
    log_length, first_call, recurrent, average_read, plain_counter,
)}  # fmt: skip
REFUSED |= {
    "iterator": lambda m, x: x * next(COUNTER),
    "cycle": lambda m, x: x * next(SWITCH),
    "list_iterator": lambda m, x: x * next(NUMBERS),
    "second of an iterator": lambda m, x: x * next(SECOND),
    "third of an iterator": lambda m, x: x * next(THIRD),
    **{f"once, call {call}": lambda m, x, call=call: once(m, x, call) for call in range(1, 7)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("middle", REFUSED.values(), ids=REFUSED)
def test_what_changes_from_call_to_call_is_refused_with_a_line(middle: Middle) -> None:
    with pytest.raises(PlanError) as error:
        plan(Model(middle), SPEC)
    assert any(file in str(error.value) for file in ("test_python_side.py", "with_state.py"))
    assert error.value.fix
    if "state of earlier calls" in str(error.value):  # then the line that keeps it is known
        assert error.value.where.file == __file__
        assert any(kept in error.value.where.code for kept in (" = ", " += ", " *= ", "append"))


def counted_only(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    m.log.append(m.calls)
    return x


def kept_for_later(m: Any, x: Tensor) -> Tensor:
    m.memory = x.softmax(-1)
    return x


def cached_mask(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in m.cache:
        m.cache[x.shape[1]] = torch.ones(x.shape[1], 8).tril()
    return x * m.cache[x.shape[1]]


def bias_of(m: Any, length: int) -> Tensor:
    """Kept in a buffer that has no value before; a later call reads a part of it."""
    if getattr(m, "bias", None) is not None and len(m.bias) >= length:
        return m.bias[-length:]
    m.register_buffer("bias", torch.arange(length)[:, None] * m.average, persistent=False)
    return m.bias


def cached_in_an_empty_buffer(m: Any, x: Tensor) -> Tensor:
    m.empty = m.empty[: x.shape[1]] if m.empty is not None else torch.ones(x.shape[1], 8).cumsum(0)
    return x * m.empty


def mask_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.average.copy_(torch.linspace(0, 1, 8))
    return x * m.average


def branch_on_constants(m: Any, x: Tensor) -> Tensor:
    mask = torch.full((5, 5), float("-inf")).triu(1)
    return x * 2 if bool((mask == torch.full((5, 5), float("-inf")).triu(1)).all()) else x


KEPT: dict[str, Middle] = {f.__name__: f for f in (
    counted_only, kept_for_later, cached_mask, cached_in_an_empty_buffer, mask_in_a_buffer,
    branch_on_constants,
)}  # fmt: skip
KEPT |= {
    "cached_in_a_new_buffer": lambda m, x: x * bias_of(m, x.shape[1]),
    "running_statistics": lambda m, x: m.norm(x.flatten(0, 1)).view(x.shape),
}


@pytest.mark.thorough
@pytest.mark.parametrize("middle", KEPT.values(), ids=KEPT)
def test_what_does_not_matter_is_planned_and_leaves_the_model_alone(middle: Middle) -> None:
    assert_planned_and_left_alone(Model(middle))

"""Seeded mutants of a text file: bytes torn out, doubled and exchanged, and values put where others stood.

The same seed gives the same mutants, whatever Python does with hashes.
"""

import copy
import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from passes.errors import PlanError
from tests.tools.limits import HANG_SECONDS

TOKENS = (
    "[", "]", "{", "}", ": ", "- ", "? ", "| ", "> ", "&a ", "*a", "<<: *a", "<<: &a {<<: *a}", "!!int ", "!!float x",
    "!!binary =", "!!python/object/apply:os.system [true]", "!!timestamp 2024", "2024-13-45", "%YAML 1.99999", "---\n",
    "...\n", "\t", "\r\n", "\ufeff", "\u2028", "\x85", "\x00", "\x1b[31m", "\\ud800", '"\\ud800"', '"\\UFFFFFFFF"', "'",
    '"', "#", ",", "~", "=", "on", ".inf", "-.nan", "NaN", "Infinity", "1e999", "-1", "0", "012", "0x1F", "1:30", "2.0",
    "9" * 400, "9" * 5000, "-" + "9" * 30, "1" + "0" * 18, "[" * 900, "{a: " * 300, "a" * 5000, "é", "\U0001d54f",
    "\u202e", "\udcff",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 2.0, 2.5, 1e30, 1 << 31, 1 << 62, 1 << 63, 10**18, 10**30, 10**400, float("nan"),
    float("inf"), float("-inf"), "", "2", "auto", "none", "x" * 5000, "tp-tp", "Et*9999999999|L", "(" * 500, "t*3", "*",
    "[", "int64", "\x00", "\ud800", [], [[]], [1], [1, 2], [[1, 2], [3]], [0] * 1000, {}, {"like": "input_ids"},
    {"": ""}, {"a": {"b": {"c": {}}}}, "F", ["F", 0, 0],
)  # fmt: skip


def mutants(text: str, count: int, seed: int, read: Callable[[str], Any], write: Callable[[Any], str]) -> Iterator[str]:
    """``count`` mutants of ``text``: half of its bytes, half of the values that ``read`` finds and ``write`` writes."""
    random_, whole = random.Random(seed), read(text)
    for index in range(count):
        if index % 2:
            yield torn(text, random_)
        else:
            yield write(exchanged(copy.deepcopy(whole), random_))


def torn(text: str, random_: random.Random) -> str:
    """One to four edits of characters."""
    for _ in range(random_.randint(1, 4)):
        start = random_.randrange(len(text) + 1)
        stop = min(len(text), start + int(random_.expovariate(0.1)))
        part = text[start:stop]
        edit = random_.choice(["", part * 2, part * random_.randint(2, 50), part[::-1], "token", "token", "token"])
        if edit == "token":
            edit = random_.choice(TOKENS) + part * random_.randint(0, 1)
        text = text[:start] + edit + text[stop:] if random_.random() > 0.02 else text[:start]
    return text


def exchanged(value: Any, random_: random.Random) -> Any:
    """One to three values put in the place of others, keys renamed, entries removed or doubled."""
    for _ in range(random_.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(random_.choice(VALUES))
        owner, key = random_.choice(places)
        edit = random_.randrange(13)
        if edit > 9:
            alike = [v for v in (*VALUES, *(o[k] for o, k in places)) if type(v) is type(owner[key])]
            owner[key] = copy.deepcopy(random_.choice(alike))
        elif edit < 6:
            owner[key] = copy.deepcopy(random_.choice(VALUES))
        elif edit == 6:
            del owner[key]
        elif edit == 7:
            other, name = random_.choice(places)
            owner[key] = copy.deepcopy(other[name])
        elif edit == 8 and isinstance(owner, list):
            owner.extend(owner[:50])
        elif isinstance(owner, dict):
            owner[random_.choice(["", "x", "tpp", f"{key}s", "\u202e", "1"])] = owner.pop(key)
        else:
            owner[key] = [owner[key]]
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


class TooSlow(BaseException):
    """No PlanError and no Exception: nothing that is tried catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooSlow after so long, wherever the block is."""

    def ring(number: int, frame: Any) -> None:
        raise TooSlow(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def survivors(given: Sequence[str], attempt: Callable[[str], Any]) -> tuple[list[Any], list[str]]:
    """What ``attempt`` made of each text, and its failures: whatever is neither a value nor a PlanError."""
    good, bad = [], []
    for index, text in enumerate(given):
        try:
            with at_most(HANG_SECONDS):
                good.append(attempt(text))
        except PlanError as error:
            if not str(error):
                bad.append(f"mutant {index}: an error without words")
        except (TooSlow, Exception) as error:
            bad.append(f"mutant {index}: {type(error).__name__}: {error}\n{text[:2000]}"[:4000])
    return good, bad


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

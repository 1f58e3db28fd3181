"""Which tp sizes a dim admits, in words for reasons and errors."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, isqrt


def divisors(size: int) -> list[int]:
    """Every divisor of ``size`` in rising order."""
    small = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})


def valid_tp(sizes: Iterable[int]) -> list[int]:
    """The tp that divide all of ``sizes``."""
    return divisors(gcd(*sizes))


def nearest_tp(sizes: Iterable[int], tp: int) -> list[int]:
    """The nearest valid tp below and above ``tp`` (itself if it is valid); 1 is always valid."""
    valid = valid_tp(sizes)
    if tp in valid:
        return [tp]
    return [max(n for n in valid if n < tp), *[n for n in valid if n > tp][:1]]


def nearest_words(sizes: Iterable[int], tp: int) -> str:
    """``nearest valid tp: 1, 3``."""
    return f"nearest valid tp: {', '.join(map(str, nearest_tp(sizes, tp)))}"

"""A pytest plugin: three tiers of tests, chosen by ``--tier``.

    check   tests marked ``check``; files without one are not imported
    test    every test but those marked ``thorough``; of tests marked ``covering`` or ``sampled``, a part of their cases
    all     every case of every test

Drawn examples (tests/tools/examples.py) are fewer in the first two. Without the option, pytest runs everything.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.tools.covering import cover, sample

EXAMPLES = {"check": 10, "test": 30, "all": 100}  # of a property that names no number; others in proportion
TIERS = tuple(EXAMPLES)
MARKS = (
    "check: also runs in `make check`",
    "thorough: runs in `make all` alone",
    "covering(strength): in `make test`, a covering array: any so many values of its parameters meet in a case",
    "sampled(most): in `make test`, at most so many of its cases",
)
LEFT_OUT = pytest.StashKey[list[pytest.Item]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="which tests run; all of them without this option")


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    for tier, examples in EXAMPLES.items():
        # A busy machine is no fault of what is tested.
        settings.register_profile(tier, max_examples=examples, deadline=None)
    settings.load_profile(config.getoption("tier"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing all files takes longer than the tests of the tier ``check``."""
    is_test_file = collection_path.suffix == ".py" and collection_path.is_file()
    without_mark = is_test_file and "mark.check" not in collection_path.read_text()
    return True if config.getoption("tier") == "check" and without_mark else None


@pytest.hookimpl(tryfirst=True)  # before -k and -m, on which the choice does not depend
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("tier")
    kept = set(items) if tier == "all" else {item for cases in _by_function(items) for item in _chosen(cases, tier)}
    left_out = [item for item in items if item not in kept]
    config.stash[LEFT_OUT] = left_out
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def _by_function(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    groups = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        groups[function_of(item)].append(item)
    yield from groups.values()


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _chosen(cases: list[pytest.Item], tier: str) -> list[pytest.Item]:
    """The cases of one test function that a tier runs."""
    cases = [case for case in cases if not case.get_closest_marker("thorough")]
    if tier == "check":
        cases = [case for case in cases if case.get_closest_marker("check")]
    by_id = {_id_of(case): case for case in cases}
    kept = set(by_id)
    for mark in (mark for case in cases[:1] for mark in case.iter_markers()):
        if mark.name == "covering":
            kept &= cover(dict(zip(by_id, _values(cases), strict=True)), *mark.args)
        elif mark.name == "sampled":
            kept &= sample(by_id, *mark.args)
    return [by_id[name] for name in by_id if name in kept]


def _id_of(case: pytest.Item) -> str:
    """The id of its parameters, without its function: tests over one list choose the same ones of it."""
    return case.nodeid.partition("[")[2]


def _values(cases: list[pytest.Item]) -> list[list[str]]:
    """The parameters of each case, as name and value; values whose text says too little are numbered as they come."""
    numbers: dict[int, int] = {}

    def named(name: str, value: Any) -> str:
        text = _text(value)
        is_anonymous = re.search(r"<lambda>| at 0x", text)
        return f"{name} {numbers.setdefault(id(value), len(numbers)) if is_anonymous else text}"

    params = [case.callspec.params if hasattr(case, "callspec") else {} for case in cases]
    return [[named(name, value) for name, value in of_case.items()] for of_case in params]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return str({key: _text(part) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return str([_text(part) for part in value])
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)

"""A pytest plugin: tiers of tests, chosen by ``--tier``, each a part of the next.

    check   tests marked ``check``; files without one are not imported
    test    every test but those marked ``thorough``; of tests marked ``covering`` or ``sampled``, a part of their cases
    pairs   every test; of those marked ``covering(pairs=…)``, a covering array of their cases
    all     every case of every test

In a covering array each value of a parameter stands in a case, and any so many parts of values that meet at all meet in
one. The parts of a layout are its sizes of axes: cp 2 · tp 2 has cp 2 and tp 2; of a dict, its items.

Drawn examples (tests/tools/examples.py) are fewer in the first two. Without the option, pytest runs every case.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

# Examples of a property that names no number; others in proportion.
EXAMPLES = {"check": 10, "test": 30, "pairs": 100, "all": 100}
TIERS = tuple(EXAMPLES)
MARKS = (
    "check: also runs in `make check`",
    "thorough: runs in `make pairs` and `make all` alone",
    "covering(strength, pairs=strength): in `make test`, in `make pairs`, a covering array; none: all cases",
    "sampled(most): in `make test`, at most so many of its cases",
)
LEFT_OUT = pytest.StashKey[list[pytest.Item]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="which tests run; every case without this option")


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
    cases = _covered(cases, [mark.kwargs.get("pairs") for mark in cases[0].iter_markers("covering")])
    if tier == "pairs":
        return cases
    cases = [case for case in cases if not case.get_closest_marker("thorough")]
    if tier == "check":
        cases = [case for case in cases if case.get_closest_marker("check")]
    if not cases:
        return []
    cases = _covered(cases, [strength for mark in cases[0].iter_markers("covering") for strength in mark.args])
    kept = {_id_of(case) for case in cases}
    for mark in cases[0].iter_markers("sampled"):
        kept &= sample(kept, *mark.args)
    return [case for case in cases if _id_of(case) in kept]


def _covered(cases: list[pytest.Item], strengths: list[int | None]) -> list[pytest.Item]:
    for strength in filter(None, strengths):
        wholes, parts = _values(cases)
        kept = cover(dict(zip(map(_id_of, cases), parts, strict=True)), strength, wholes)
        cases = [case for case in cases if _id_of(case) in kept]
    return cases


def _id_of(case: pytest.Item) -> str:
    """The id of its parameters, without its function: tests over one list choose the same ones of it."""
    return case.nodeid.partition("[")[2]


def _values(cases: list[pytest.Item]) -> tuple[list[list[str]], list[list[str]]]:
    """The parameters of each case and their parts, by name; values whose text says too little are numbered."""
    numbers: dict[int, int] = {}

    def named(name: str, value: Any) -> str:
        text = _text(value)
        is_anonymous = re.search(r"<lambda>| at 0x", text)
        return f"{name} {numbers.setdefault(id(value), len(numbers)) if is_anonymous else text}"

    params = [list(case.callspec.params.items()) if hasattr(case, "callspec") else [] for case in cases]
    wholes = [[named(*param) for param in of_case] for of_case in params]
    parts = [[named(name, part) for name, value in of_case for part in _parts(value)] for of_case in params]
    return wholes, parts


def _parts(value: Any) -> list[Any]:
    """Of a dict, or of a layout's name as "tp2·dp2, etp 1"; any other value is a part by itself."""
    if isinstance(value, dict) and value:
        return [f"{key}: {_text(part)}" for key, part in value.items()]
    pieces = re.split(r"·|, ", value) if isinstance(value, str) else []
    is_layout = any(re.fullmatch(r"(tp|cp|pp|vpp|dp|ep|etp) ?\d", piece) for piece in pieces)
    return [piece.replace(" ", "") for piece in pieces] if is_layout else [value]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return str({key: _text(part) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return str([_text(part) for part in value])
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def cover(cases: Mapping[str, Iterable[str]], strength: int, wholes: Iterable[Iterable[str]] | None = None) -> set[str]:
    """The ids of a covering array, found greedily: any ``strength`` values that meet in a case meet in a chosen one.

    ``cases``: id -> values, each with the name of its parameter. A case of fewer values counts as what it has.
    ``wholes``: of each case, more that stands in a chosen one, by itself.
    """
    singles = ([] for _ in cases) if wholes is None else wholes
    open_tuples = {
        case: _tuples(sorted(values), strength) | _tuples(sorted(single), 1)
        for (case, values), single in zip(cases.items(), singles, strict=True)
    }
    chosen: set[str] = set()
    while any(open_tuples.values()):
        best = min(open_tuples, key=lambda case: (-len(open_tuples[case]), _shuffled(case)))
        chosen.add(best)
        met = open_tuples.pop(best)
        open_tuples = {case: left - met for case, left in open_tuples.items()}
    return chosen


def sample(ids: Collection[str], most: int) -> set[str]:
    """``most`` of the ids, spread over them; all where there are no more. Other ids change few of those chosen."""
    return set(sorted(ids, key=_shuffled)[:most])


def _tuples(values: list[str], strength: int) -> set[tuple[str, ...]]:
    return set(combinations(values, min(strength, len(values)))) - {()}


def _shuffled(case: str) -> tuple[int, str]:
    """An order that is the same everywhere, in which neighbours of a list do not stand together."""
    return crc32(case.encode()), case


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Values of the parameter ``name`` of all tests in the fixture's file that this session runs, each once.

    A fixture that runs every case for all tests of a file would run those that a tier leaves out too.
    """
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(of_case[name] for of_case in params if name in of_case))

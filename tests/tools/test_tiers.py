"""The tests that a tier leaves out: cases, and in `make test` of functions those marked `thorough` alone."""

from pathlib import Path

import pytest

from tests.tools.commands import python
from tests.tools.tiers import LEFT_OUT, TIERS, function_of

FILE = """
import pytest
from tests.tools.examples import examples

@pytest.mark.check
def test_quick(): pass

def test_plain(): pass

@pytest.mark.thorough
def test_long(): pass

@pytest.mark.parametrize("x", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_one_long_case(x): pass

@pytest.mark.covering(1)
@pytest.mark.parametrize("way", [lambda: 1, lambda: 2])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_product(way, mesh): pass

@pytest.mark.covering(1, pairs=2)
@pytest.mark.parametrize("dtype", ["half", "full"])
@pytest.mark.parametrize("way", "abcd")
@pytest.mark.parametrize("layout", ["tp2", "tp2·dp2", "dp2·ep2", "tp 2, dp 2, ep 2"])
def test_layouts(way, dtype, layout): pass

@pytest.mark.thorough
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize("way", "abcd")
def test_long_product(way, mesh): pass

@pytest.mark.check
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", "abcdefgh")
def test_many(name): pass

def test_examples():
    assert [examples(most).max_examples for most in (200, 3)] == [EXAMPLES, 3]
"""
ALL = {"quick": 1, "plain": 1, "long": 1, "one_long_case": 3, "product": 6, "many": 8, "examples": 1}
KEPT = {
    "all": ALL | {"layouts": 32, "long_product": 8},
    "pairs": ALL | {"layouts": 8, "long_product": 4},
    "test": {"quick": 1, "plain": 1, "one_long_case": 2, "product": 3, "layouts": 4, "many": 2, "examples": 1},
    "check": {"quick": 1, "many": 2},
}


def run(folder: Path, *options: str) -> tuple[list[str], str]:
    """The tests that passed, and all output."""
    ran = python("-m", "pytest", "-p", "tests.tools.tiers", "-p", "no:cacheprovider", "-v", *options, folder)
    passed = [line.split()[0].partition("::")[2] for line in ran.stdout.splitlines() if " PASSED" in line]
    return passed, ran.stdout + ran.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_runs_what_its_marks_say(tmp_path: Path, tier: str) -> None:
    (tmp_path / "test_marked.py").write_text(FILE.replace("EXAMPLES", {"check": "0", "test": "60"}.get(tier, "200")))
    (tmp_path / "test_without.py").write_text("raise SystemExit\n" if tier == "check" else "")
    passed, output = run(tmp_path, "--tier", tier)
    counts = {name: 0 for name in KEPT[tier]}
    for test in passed:
        counts[test.removeprefix("test_").partition("[")[0]] += 1
    assert counts == KEPT[tier], output
    assert run(tmp_path, "--tier", tier, "-k", "many")[0] == [test for test in passed if "many" in test]


def test_no_test_is_lost(request: pytest.FixtureRequest) -> None:
    """Of those that this run has collected. A tier leaves out cases, and whole functions only by their mark."""
    tier, left_out = request.config.getoption("tier"), request.config.stash[LEFT_OUT]
    kept = {function_of(item) for item in request.session.items}
    marks = () if tier in ("pairs", "all") else ("thorough",)
    lost = {function_of(item) for item in left_out if not any(map(item.get_closest_marker, marks))} - kept
    assert lost == set()

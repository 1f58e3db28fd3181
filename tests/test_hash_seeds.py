"""Plans, lowered code and searches do not depend on how Python hashes strings, nor on where objects lie in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.tools.paths import ROOT

SEEDS = ("0", "1", "2")


def digests(seed: str, *names: str) -> dict[str, str]:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "tests.tools.plan_digests", *names]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert not found.returncode, found.stderr
    return json.loads(found.stdout)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1800)  # plans of fifty models, three times
def test_many_models_and_a_search_are_decided_alike_under_three_hash_seeds():
    first, *others = map(digests, SEEDS)
    assert len(first) > 50
    for other in others:
        assert {name for name in first if other[name] != first[name]} == set()


@pytest.mark.thorough
@pytest.mark.slow
def test_three_models_are_decided_alike_under_two_hash_seeds():
    first, other = (digests(seed, "bert", "mixtral", "slots") for seed in SEEDS[:2])
    assert len(first) >= 3
    assert first == other

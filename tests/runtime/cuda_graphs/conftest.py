from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.transformer_engine_source import VARIABLE, NotThere, fetched_source, local_source


@pytest.fixture(scope="session")
def te_facts() -> dict[str, Any]:
    """What is known of make_graphed_callables: parameters, and what each of its checks compares."""
    return json.loads(Path(__file__).with_name("transformer_engine.json").read_text())


@pytest.fixture(
    scope="session",
    params=["here", pytest.param("oldest", marks=pytest.mark.slow), pytest.param("newest", marks=pytest.mark.slow)],
)
def te_source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, te_facts: dict[str, Any]
) -> str:
    """The real source, of an installed package or a path that is given, and as pip fetches it."""
    if request.param == "here":
        source = local_source()
        return source if source is not None else pytest.skip(f"Transformer Engine is not installed, nor {VARIABLE} set")
    try:
        version = te_facts["oldest"] if request.param == "oldest" else ""
        return fetched_source(tmp_path_factory.mktemp("te"), version)
    except NotThere as reason:
        pytest.skip(str(reason))

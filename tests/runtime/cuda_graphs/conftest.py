import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.recorded_graphs import Device, on_a_cpu
from tests.tools.transformer_engine_source import VARIABLE, NotThere, Source, fetched_source, local_source


@pytest.fixture(scope="session")
def te_facts() -> dict[str, Any]:
    """What is known of make_graphed_callables: parameters, and what each of its checks compares."""
    return json.loads(Path(__file__).with_name("transformer_engine.json").read_text())


@pytest.fixture(scope="session")
def te_fetched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """The source of a version, or of the newest, as pip fetches it; skips where it does not, and then asks no more."""
    found: dict[str, Source] = {}
    failed: list[NotThere] = []

    def fetched(version: str) -> Source:
        if version not in found and not failed:
            try:
                found[version] = fetched_source(tmp_path_factory.mktemp("te"), version)
            except NotThere as reason:
                failed.append(reason)
        return found[version] if version in found else pytest.skip(str(failed[0]))

    return fetched


@pytest.fixture(
    scope="session",
    params=["here", pytest.param("oldest", marks=pytest.mark.slow), pytest.param("newest", marks=pytest.mark.slow)],
)
def te_source(request: pytest.FixtureRequest, te_fetched: Callable[[str], Source], te_facts: dict[str, Any]) -> Source:
    """The real source, of an installed package or a path that is given, and as pip fetches it."""
    if request.param == "here":
        source = local_source()
        return source if source is not None else pytest.skip(f"Transformer Engine is not installed, nor {VARIABLE} set")
    return te_fetched(te_facts["oldest"] if request.param == "oldest" else "")


@pytest.fixture
def te_running(te_fetched: Callable[[str], Source]) -> Source:
    """The source whose code is run: of what is installed or given, else of the newest version."""
    return local_source() or te_fetched("")


@pytest.fixture
def te_device(te_running: Source, tmp_path: Path) -> Iterator[Device]:
    """A CPU on which that code captures."""
    with on_a_cpu(te_running, tmp_path) as device:
        yield device

"""Which cases of a list a fixture must run: those that tests of this session compare."""

from __future__ import annotations

from typing import Any

import pytest


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Values of the parameter ``name`` of all tests in the fixture's file that this session runs, each once.

    A fixture that runs every case for all tests of a file would run those that a tier leaves out too.
    """
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(of_case[name] for of_case in params if name in of_case))

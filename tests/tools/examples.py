"""How many examples a property draws: as many as it says in `make all`, a part of them in the quicker tiers."""

from typing import Any

from hypothesis import settings

from tests.tools.tiers import EXAMPLES

FEWEST = 5


def examples(most: int, **options: Any) -> settings:
    """A decorator, as hypothesis.settings: ``most`` examples in `make all`."""
    few = most * settings().max_examples // EXAMPLES["all"]
    return settings(max_examples=min(most, max(FEWEST, few)), **options)

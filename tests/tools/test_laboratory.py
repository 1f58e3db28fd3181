"""A laboratory ends by itself: a session that waited for it would end by a time limit."""

import pytest

from runtime.fuzz.forks import ForkError
from tests.tools.laboratory import Case, Lab


def _failing(plan: object, batches: object) -> None:
    raise ForkError("on purpose")


@pytest.mark.thorough
def test_a_laboratory_ends_after_an_error() -> None:
    laboratory = Lab()
    with pytest.raises(ForkError, match="on purpose"):
        laboratory.run(Case("gpt2", {"tp": 2}, job=_failing))
    laboratory.close()
    assert laboratory._process.exitcode == 0  # not terminated after a wait

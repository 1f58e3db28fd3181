"""Every op of captured models, in every typing that the solver may choose, against the op on whole tensors."""

from typing import Any

import pytest

from tests.models.hugging_face import ZOO, batch, build
from tests.tools.captured_ops import check_model

pytest.importorskip("transformers")

QUICK = ["gpt2", "llama", "falcon_new", "bert", "t5", "vit"]
SEEN: set[Any] = set()  # what one family had, another need not show again


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ZOO])
def test_every_admitted_typing_of_every_op_is_right(name):
    assert not check_model(build(name), batch(name), 2, 4, seen=SEEN)

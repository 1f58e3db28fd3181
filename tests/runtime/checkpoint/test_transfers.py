"""Long transfers of weights show their bytes a second."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from planner import progress
from planner.progress import shown_if_slow
from runtime.checkpoint import conversion, pretrained_load, pretrained_save
from runtime.checkpoint.conversion import import_weights
from runtime.commands import export
from tests.tools.checkpoints import Own, own_checkpoint, own_engine, write
from tests.tools.limits import HANG_SECONDS


@contextmanager
def told_at_once(what: str) -> Iterator[None]:
    with shown_if_slow(what, after_seconds=0.0):
        step = progress._step.get()
        assert step is not None
        assert step.is_told.wait(HANG_SECONDS)
        yield


def test_loading_importing_checking_and_writing_tell_their_bytes_a_second(tmp_path, capsys, monkeypatch):
    for module in (conversion, pretrained_load, pretrained_save, export):
        monkeypatch.setattr(module, "shown_if_slow", told_at_once)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    weights = write(tmp_path / "in", own_checkpoint())
    own_engine(Own()).load_pretrained(weights)
    (tmp_path / "own.py").write_text("from tests.tools.checkpoints import Own\n")
    import_weights(weights, tmp_path / "run", f"{tmp_path / 'own.py'}:Own")
    export.export_save(tmp_path / "run", tmp_path / "out", ema=False)
    told = capsys.readouterr().err
    for what in ("loading .*in", "importing .*in", "verifying step-00000000", "writing .*out"):
        assert re.search(rf"^{what}: \d+\.\d\d GB, \d+\.\d\d GB/s, \d+\.\d s$", told, re.MULTILINE), (what, told)

"""Epochs in place of steps, and a schedule that follows the number of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.commands.train import Given, job_of
from runtime.data.text.encoders import ByteEncoder
from runtime.optimizer.scalars import LearningRate
from runtime.training.job import spec_of
from runtime.training.options import TrainOptions

SPEC = """
mesh: {}
batch: {global: 4, micro: 2}
inputs: {input_ids: {shape: [8], dtype: int64, high: 256}, targets: {like: input_ids}}
optimizer: {schedule: {kind: cosine, steps: auto, warmup: 0.2}}
"""


def job(folder: Path, **running: object) -> object:
    (folder / "spec.yaml").write_text(SPEC)
    (folder / "text").write_text("x" * 81)  # 10 windows of 8 and their next byte
    given = Given(data=[str(folder / "text")], **running)  # pyright: ignore
    return job_of("m.py:build", folder / "spec.yaml", given, TrainOptions())


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 5), (3.0, 8), (0.1, 1)])
def test_epochs_are_steps_in_which_every_sample_has_come(tmp_path: Path, epochs: float, steps: int) -> None:
    found = job(tmp_path, epochs=epochs)
    assert found.num_steps == steps  # pyright: ignore
    schedule = spec_of(found).optimizer.schedule  # pyright: ignore
    assert (schedule.steps, schedule.warmup) == (steps, round(0.2 * steps))


def test_steps_without_epochs_are_as_given(tmp_path: Path) -> None:
    assert job(tmp_path).num_steps == 100  # pyright: ignore
    assert spec_of(job(tmp_path, steps=50)).optimizer.schedule.warmup == 10  # pyright: ignore
    for wrong in ({"steps": 5, "epochs": 1.0}, {"epochs": 0.0}, {"epochs": float("nan")}):
        with pytest.raises(PlanError, match="--epochs"):
            job(tmp_path, **wrong)


def test_a_schedule_without_a_run_or_a_share_of_nothing_is_refused(tmp_path: Path) -> None:
    job(tmp_path)
    with pytest.raises(PlanError, match="is the last step of"):
        LearningRate(Spec.load(str(tmp_path / "spec.yaml")).optimizer).at(0)
    with pytest.raises(PlanError, match="is a share of steps, which are missing"):
        Spec.load({"mesh": {}, "batch": {"global": 2, "micro": 2}, "optimizer": {"schedule": {"warmup": 0.1}}})
    rate = LearningRate(Spec.load({"mesh": {}, "batch": {"global": 2, "micro": 2}, "optimizer": {
        "lr": 1.0, "schedule": {"kind": "linear", "warmup": 0.5, "steps": 4}}}).optimizer)  # fmt: skip
    assert [rate.at(step) for step in range(4)] == [0.5, 1.0, 1.0, 0.5]


def test_bytes_end_at_zero_and_a_directory_has_all_of_its_ends(tmp_path: Path) -> None:
    from tests.tools.chat_tokenizers import chat_directory

    pytest.importorskip("transformers")
    from runtime.data.text.encoders import TokenizerFile
    from runtime.engine.prompts import codec_of

    assert ByteEncoder.ends == (0,)
    model = chat_directory(tmp_path / "model", "chatml", ends=["<|im_end|>", "<|end|>"])
    found = TokenizerFile(str(model))
    ids = [found.ids(text)[0] for text in ("<|im_end|>", "<|end|>", "<|endoftext|>")]
    assert list(codec_of(str(model)).ends) == ids
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(PlanError, match="and not ids of tokens"):
        TokenizerFile(str(model))

"""Texts that a model continues while it trains (``--sample-every``), with its most probable tokens: a look at how it
writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.data.text.byte_tokens import BYTES
from runtime.data.text.sources import STDLIB
from runtime.data.token_file import files_in, is_token_file, open_token_file
from runtime.engine import Engine
from runtime.next_tokens.texts import codec_of, fitted, tokens_of
from runtime.training.job import Job


class Samples:
    """``leads``: this rank prints. Raises PlanError for prompts that the plan does not take."""

    def __init__(self, job: Job, spec: Spec, decided: Plan, *, leads: bool) -> None:
        self._every, self._texts, self._leads = job.sample_every, job.sample_prompt, leads
        check_samples(job, spec)
        if self._texts:
            self._codec = codec_of(_tokenizer_of(job))
            self._tokens, self._count = tokens_of(self._texts, self._codec, spec, decided)

    def after_step(self, engine: Engine) -> None:
        """Continue the prompts if it is time. The same call on every rank."""
        if self._every is None or engine.step_index % self._every:
            return
        found = engine.generate(self._tokens, self._count, stop=self._codec.ends)
        for text, tokens in zip(self._texts, found.tokens, strict=True) if self._leads else ():
            written = f"{text}{self._codec.text(tokens.tolist())}"
            print(f"step {engine.step_index} continues: {written}", file=sys.stderr, flush=True)


def check_samples(job: Job, spec: Spec) -> None:
    """Raise PlanError for prompts that no plan of ``spec`` takes."""
    if (job.sample_every is None) != (not job.sample_prompt):
        missing = "--sample-prompt TEXT" if job.sample_every is not None else "--sample-every N"
        what = "samples need prompts, and a number of steps between them"
        raise PlanError(what, where="--sample-every", fix=f"add {missing}")
    if job.sample_prompt:
        fitted(job.sample_prompt, codec_of(_tokenizer_of(job)), spec)


def _tokenizer_of(job: Job) -> str | None:
    """The tokenizer of prompts; a token file of samples holds its own. Raises PlanError for one without."""
    for source in job.sources:
        if source == STDLIB or not is_token_file(Path(source)):
            continue
        if files_in(Path(source)):
            return source
        name = open_token_file(Path(source), source).tokenization.name
        if name != BYTES.name:
            raise PlanError(
                f"{source} has the tokens of {name}, and a run on a token file has no tokenizer for prompts",
                where="--sample-prompt",
                fix="train on the text with --tokenizer FILE, or continue prompts with meshwright generate --load DIR",
            )
    return job.tokenizer

"""Data of a run: batches for training and validation, and their identity, which must not change on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.data.buckets import BucketBatches, OfLength, batches_of, token_batches_in
from runtime.data.reading import read_tokens
from runtime.data.roles import length_of, roles_of
from runtime.data.stream import is_stream, stream_function
from runtime.data.text.sources import STDLIB, files_of
from runtime.data.token_file import check_content, is_token_file, read_header
from runtime.data.tokens import Tokens
from runtime.data.validation_split import split
from runtime.data.vocabulary import check_vocabulary
from runtime.training.job import Job
from runtime.training.validation import HeldOut

_ADD = "add --validate-every N"
_MOST_CHECKED = 1 << 30  # bytes of a token file that are all read before a run


@dataclass(frozen=True, slots=True)
class RunData:
    """``held_out``: the sets of a validation; ``validate_every``: steps between two, None for none.

    ``identity``: goes with each save. ``told``: what was cut or left out of the training data. ``training``: None for a
    stream.
    """

    training: OfLength | BucketBatches | None
    held_out: tuple[HeldOut, ...]
    identity: dict[str, Any]
    validate_every: int | None = None
    told: tuple[str, ...] = ()

    def is_validated_after(self, step: int) -> bool:
        return self.validate_every is not None and step % self.validate_every == 0


def run_data(job: Job, spec: Spec, plan: Plan) -> RunData:
    """The data that ``job`` reads. Raises PlanError if the text does not serve it."""
    if is_stream(job.data):
        check_source(job)
        check_stream(job, spec)
        identity = {"data": job.data, "seed": spec.seed, "batch.global": spec.batch.global_size}
        return RunData(None, _named_sets(job, spec, plan), identity, job.validate_every)
    texts = [read_tokens(source, job.tokenizer) for source in job.sources]
    for tokens in texts:
        _check_ids(tokens, spec, plan)
    check_validation(job, spec)
    parts = [split(tokens, spec.data.validation) for tokens in texts]
    weights = [weight for _, weight in job.mixture]
    content = " + ".join(f"{weight:g} * {t.identity}" for (t, _), weight in zip(parts, weights or [1.0], strict=True))
    of_data = content if weights else parts[0][0].identity
    specs = _of_lengths(spec, plan)
    identity = {"data": of_data, "seed": spec.seed, "batch.global": specs[-1].batch.global_size}
    identity["optimizer.no_decay"] = spec.optimizer.no_decay
    if len(specs) > 1:
        steps = zip(spec.lengths, specs, strict=True)
        identity["inputs"] = ", ".join(f"{each.batch.global_size} of {length}" for length, each in steps)
    training = batches_of([tokens for tokens, _ in parts], weights, specs)
    sets = _named_sets(job, spec, plan)
    if rest := [tokens for _, tokens in parts if tokens is not None]:
        sets += (HeldOut("held_out" if sets else "", _validation(rest, weights, specs)),)
    told = filter(None, (getattr(each.objective, "told", "") for each in token_batches_in(training)))
    return RunData(training, sets, identity, job.validate_every, tuple(told))


def steps_of(job: Job, epochs: float) -> int:
    """The steps in which every sample of the training data comes ``epochs`` times. Raises PlanError."""
    check_source(job)
    if is_stream(job.data):
        what = f"--epochs needs data of a known size, and {job.data} is a stream"
        raise PlanError(what, where="--epochs", fix="give --steps; the end of the stream ends the training")
    spec = Spec.load(job.spec)
    texts = [split(read_tokens(source, job.tokenizer), spec.data.validation)[0] for source in job.sources]
    specs = [spec.at(place) for place in range(len(spec.lengths))] or [spec]
    batches = batches_of(texts, [weight for _, weight in job.mixture], specs)
    of_lengths = batches.of_lengths if isinstance(batches, BucketBatches) else [batches]
    return math.ceil(epochs * sum(each.num_samples / each.global_size for each in of_lengths) - 1e-9)


def check_validation(job: Job, spec: Spec) -> None:
    """Raise PlanError if nothing is held out that a validation could read, or no validation reads what is given."""
    for option, is_given in (("--validation-data", job.validation_data), ("--metric", job.metric)):
        if is_given and job.validate_every is None:
            raise PlanError(f"{option} is for validations, and there are none", where=option, fix=_ADD)
    if job.validate_every is not None and not spec.data.validation and not job.validation_data:
        fix = "add --validation-data NAME=FILE, or `data: {validation: 0.05}` to the spec"
        what = "--validate-every needs held-out text, but the spec holds out none"
        raise PlanError(what, where="--validate-every", fix=fix)
    for _, file in job.validation_data:
        _check_text(file)


def _named_sets(job: Job, spec: Spec, plan: Plan) -> tuple[HeldOut, ...]:
    """Those of ``--validation-data``. Raises PlanError if a text does not serve the spec."""
    found = []
    for name, file in job.validation_data:
        tokens = read_tokens(file, job.tokenizer)
        _check_ids(tokens, spec, plan)
        try:
            found.append(HeldOut(name, batches_of([tokens], [], _of_lengths(spec, plan))))
        except PlanError as error:
            raise PlanError(error.what, where=f"--validation-data {name}={file}", fix="give a longer text") from None
    return tuple(found)


def check_stream(job: Job, spec: Spec) -> None:
    """Raise PlanError for options and keys that a stream does not serve."""
    for where, is_asked in (("--compare", job.compare), ("data.validation", bool(spec.data.validation))):
        if is_asked:
            what = f"{job.data} is a stream, which is read once, from its begin to its end"
            raise PlanError(what, where=where, fix=f"leave out {where}")


def check_roles(spec: Spec) -> None:
    """Raise PlanError for inputs that no text can feed."""
    inputs = spec.longest.require_inputs()
    try:
        length_of(inputs, roles_of(inputs, spec.data.inputs))
    except PlanError as error:
        raise spec.locate(error) from None


def _of_lengths(spec: Spec, plan: Plan) -> list[Spec]:
    """The spec of each length, with the sizes that were planned."""
    asked = spec.chosen(Spec.load({**plan.spec, "cluster": None}))
    return [asked.at(place) for place in range(len(spec.lengths))] or [asked]


def check_source(job: Job) -> None:
    """Raise PlanError for a source that is not there, or a token file that is damaged: before anything takes long."""
    for source in job.sources:
        if is_stream(source):
            stream_function(source)
            if job.mixture:
                fix = "mix inside the function, and name it alone"
                raise PlanError(f"{source} is a stream, which has no share", where="--data", fix=fix)
        else:
            _check_text(source)


def _check_text(source: str) -> None:
    path = Path(source)
    if source == STDLIB or not is_token_file(path):
        files_of(source)
    elif read_header(path).num_bytes <= _MOST_CHECKED:
        check_content(path)


def _validation(texts: list[Tokens], weights: list[float], specs: list[Spec]) -> OfLength | BucketBatches:
    try:
        return batches_of(texts, weights, specs)
    except PlanError as error:
        if error.where != "--data":
            raise
        spec = specs[-1]
        what = f"data.validation = {spec.data.validation:g} holds out too little: {error.what}"
        raise spec.error("data.validation", what, "hold out a larger share, or give a longer text") from None


def _check_ids(tokens: Tokens, spec: Spec, plan: Plan) -> None:
    inputs = spec.require_inputs()
    ranges = plan.decisions.id_ranges if plan.decisions is not None else {}
    try:
        check_vocabulary(tokens, inputs, roles_of(inputs, spec.data.inputs), ranges)
    except PlanError as error:
        raise spec.locate(error) from None

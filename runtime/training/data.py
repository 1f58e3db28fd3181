"""The data of a run: batches for training and validation, and their identity, which must not change on resume.

--data a.tokens=0.7 --data b.tokens=0.3
data: {mixture: {a.tokens: 0.7, b.tokens: 0.3}}      of the spec, if there is no --data
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.data.buckets import BucketBatches, OfLength, batches_of, token_batches_in
from runtime.data.reading import check_vocabulary, read_tokens, split
from runtime.data.stream import is_stream, stream_function
from runtime.data.text.documents import STDLIB, files_of
from runtime.data.token_batches import length_of, roles_of
from runtime.data.token_file import check_content, is_token_file, read_header
from runtime.data.tokens import Tokens
from runtime.training.job import Job
from runtime.training.validation import HeldOut

_ADD = "add --validate-every N"
_MOST_CHECKED = 1 << 30  # bytes: smaller token files are checked completely before a run


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run. ``training``: None for a stream; ``held_out``: the sets of a validation; ``validate_every``:
    steps from one validation to the next, None for none; ``identity``: stored in each save; ``told``: lines about parts
    of the training data that were cut or left out.
    """

    training: OfLength | BucketBatches | None
    held_out: tuple[HeldOut, ...]
    identity: dict[str, Any]
    validate_every: int | None = None
    told: tuple[str, ...] = ()


def run_data(job: Job, spec: Spec, plan: Plan) -> RunData:
    """Return the data of ``job``. Raises PlanError if the text does not fit the spec."""
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
    """Return the number of steps of ``epochs`` passes over the training data. Raises PlanError for bad data."""
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
    """Raise PlanError for a validation without held-out text, or options of validations without any validation."""
    for option, is_given in (("--validation-data", job.validation_data), ("--metric", job.metric)):
        if is_given and job.validate_every is None:
            raise PlanError(f"{option} applies to validations, but --validate-every is missing", where=option, fix=_ADD)
    if job.validate_every is not None and not spec.data.validation and not job.validation_data:
        fix = "add --validation-data NAME=FILE, or `data: {validation: 0.05}` to the spec"
        what = "--validate-every needs held-out text, but the spec holds out none"
        raise PlanError(what, where="--validate-every", fix=fix)
    for _, file in job.validation_data:
        _check_text(file)


def _named_sets(job: Job, spec: Spec, plan: Plan) -> tuple[HeldOut, ...]:
    """Return the sets of ``--validation-data``. Raises PlanError if a text does not fit the spec."""
    sets = []
    for name, file in job.validation_data:
        tokens = read_tokens(file, job.tokenizer)
        _check_ids(tokens, spec, plan)
        try:
            sets.append(HeldOut(name, batches_of([tokens], [], _of_lengths(spec, plan))))
        except PlanError as error:
            raise PlanError(error.what, where=f"--validation-data {name}={file}", fix="give a longer text") from None
    return tuple(sets)


def check_stream(job: Job, spec: Spec) -> None:
    """Raise PlanError for options and keys that do not apply to a stream."""
    for where, is_asked in (("--compare", job.compare), ("data.validation", bool(spec.data.validation))):
        if is_asked:
            what = f"{job.data} is a stream, which is read only once"
            raise PlanError(what, where=where, fix=f"leave out {where}")


def check_roles(job: Job, spec: Spec) -> None:
    """Raise PlanError for inputs that cannot be made from the text, or the file of pairs."""
    inputs, files = spec.longest.require_inputs(), map(Path, job.sources)
    is_paired = any(is_token_file(path) and read_header(path).is_paired for path in files)
    with spec.locating():
        length_of(inputs, roles_of(inputs, spec.data.inputs), is_paired=is_paired)


def _of_lengths(spec: Spec, plan: Plan) -> list[Spec]:
    """Return the spec of each length, with the planned sizes."""
    planned = spec.chosen(Spec.load({**plan.spec, "cluster": None}))
    return [planned.at(place) for place in range(len(spec.lengths))] or [planned]


def check_source(job: Job) -> None:
    """Raise PlanError for a missing source or a damaged token file, before any long work."""
    for source in job.sources:
        if is_stream(source):
            stream_function(source)
            if job.mixture:
                fix = "mix inside the function, and give only its name"
                raise PlanError(f"{source} is a stream, which cannot be part of a mixture", where="--data", fix=fix)
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
    with spec.locating():
        check_vocabulary(tokens, inputs, roles_of(inputs, spec.data.inputs), ranges)


def read_mixture(texts: list[str]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """Return the values ``data`` and ``mixture`` of a job: one text and no shares, or several texts with shares.

    Raises PlanError if a share is missing or not positive.
    """
    parts = [_part(text) for text in texts]
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0], ()
    mixture = []
    for source, weight in parts:
        if weight is None or not 0 < weight < math.inf:
            what = f"--data {source} has no share" if weight is None else f"--data {source}: {weight:g} is not a share"
            raise PlanError(what, where="--data", fix="write --data PATH=SHARE for each text: --data a.txt=0.7")
        mixture.append((source, weight))
    return mixture[0][0], tuple(mixture)


def mixture_of_spec(path: str) -> tuple[str, tuple[tuple[str, float], ...]]:
    """Return the same values from the spec at ``path``; its paths are relative to the working directory, or the spec's.

    Raises PlanError if the spec names no text, or one that does not exist.
    """
    spec = Spec.load(path)
    shares = spec.data.mixture
    if not shares:
        fix = "add --data PATH, or `data: {mixture: {PATH: 1}}` to the spec"
        raise PlanError("no text to train on", where="--data", fix=fix)
    mixture = tuple((_place_of(source, spec, path), share) for source, share in shares.items())
    return mixture[0][0], mixture


def _place_of(source: str, spec: Spec, path: str) -> str:
    beside = Path(path).parent / source
    if source == STDLIB or Path(source).exists():
        return source
    if not beside.exists():
        fix = "name a token file, a text file or a directory, relative to the working directory or to the spec's"
        raise PlanError(f"data.mixture: no file or directory {source}", where=spec.location("data.mixture"), fix=fix)
    return str(beside)


def _part(text: str) -> tuple[str, float | None]:
    source, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, None
    try:
        return source, float(weight)
    except ValueError:
        return text, None


def named_files(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """Return (name, file) of each ``--validation-data``. Raises PlanError for another form, or a repeated name."""
    pairs = [(name, file) for name, _, file in (text.partition("=") for text in texts)]
    for place, (name, file) in enumerate(pairs):
        if not (name and file) or name in [other for other, _ in pairs[:place]]:
            what = f"--validation-data {texts[place]}: " + (
                "the name is repeated" if name and file else "not NAME=FILE"
            )
            raise PlanError(what, where="--validation-data", fix="write --validation-data NAME=FILE, each name once")
    return tuple(pairs)

"""The process behind the numeric tests: it captures each model once and runs cases on forked ranks.

    Lab().check(Case("gpt2", {"tp": 2, "pp": 2}))    -> Report of everything that differs from one process

The truth is written out here in plain torch: the unmodified model, the whole global batch, AdamW, clipping.
"""

import atexit
import gc
import importlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from runtime.fuzz.forks import Child, ForkError, StoreHost, in_fork
from tests.tools.captures import captured_again
from tests.tools.comparison import NUM_STEPS, Found, Report, compare
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks
from tests.tools.specs import entry_inputs

NUM_BATCHES = 3  # of a job that is not held against one process
CALL_SECONDS = 2 * HANG_SECONDS  # of many runs, of which at most one hangs
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "clip_grad_norm": 1.0}


@dataclass(frozen=True)
class Case:
    """``model`` is a name of the zoo; ``mesh`` the sizes of the axes; ``rest`` other parts of the spec.

    ``job(plan, batches)`` is run on every rank in place of the usual steps; it stands at the top of a module.
    """

    model: str
    mesh: dict[str, Any]
    rest: dict[str, Any] = field(default_factory=dict)
    num_sequences: int = 8
    micro: int = 2
    job: Callable[..., Any] | None = None
    job_arguments: tuple[Any, ...] = ()

    @property
    def world_size(self) -> int:
        return prod(self.mesh.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))

    def __str__(self) -> str:
        axes = ("tp", "cp", "pp", "dp", "vpp")
        return "-".join([self.model, *(f"{k}{v}" for k, v in self.mesh.items() if k in axes)])


def name_of(value: str | dict[str, int]) -> str:
    """The id of a parameter of a test: a layout as tp2-pp2, a name as it is."""
    return value if isinstance(value, str) else "-".join(f"{axis}{size}" for axis, size in value.items())


class Lab:
    """The client: one server process for a pytest session."""

    def __init__(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=False)
        self._process.start()
        there.close()

    def check(self, case: Case) -> Report:
        """Run the case on its ranks and hold it against one process."""
        return self._ask("check", case)

    def check_each(self, case: Case) -> Any:
        """The case's job gives on rank 0 several runs, as a list or by name; a Report of each."""
        return self._ask("check_each", case)

    def run(self, case: Case) -> list[Any]:
        """The results of the case's job, by rank. Raises PlanError or ForkError."""
        return self._ask("run", case)

    def plan(self, case: Case) -> Any:
        """The plan's tables (what it was decided on stays where it is)."""
        return self._ask("plan", case)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(host, *args)`` in a fork of the server: it may plan, and ``host.run_ranks`` forks ranks of it."""
        return self._ask("call", (function, args))

    def close(self) -> None:
        self._connection.close()
        self._process.join(HANG_SECONDS)
        if self._process.is_alive():
            self._process.terminate()

    def _ask(self, kind: str, case: Any) -> Any:
        return answer_of(self._connection, kind, case)


def send(connection: Connection, value: Any) -> None:
    """By plain pickle: multiprocessing would share a tensor's memory with a process that may be gone by then."""
    connection.send_bytes(pickle.dumps(value))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def answer_of(connection: Connection, kind: str, case: Any) -> Any:
    """What the process at the other end says to a question. Raises its error."""
    send(connection, (kind, case))
    answer, error = receive(connection)
    if error is not None:
        raise error
    return answer


@cache
def session_lab() -> Lab:
    """The one laboratory of this process, closed at its end."""
    laboratory = Lab()
    atexit.register(laboratory.close)
    return laboratory


# What every model, plan and rank imports: once here is cheaper than once in each fork.
PRELOADED = (
    "planner",
    "runtime",
    "runtime.verify.comparison",
    "torch.export",
    "torch._dynamo",
    "tests.tools.jobs",
    "tests.models.own",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    # Autograd counts its devices once. Before any export it finds none and starts no thread, so that forks stay free to
    # run a backward whatever a capture has run here; after one, a torch built for CUDA counts stand-ins for devices.
    torch.ones(1, requires_grad=True).sum().backward()
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.set_threshold(20_000, 20, 20)
    benches = Benches()
    while True:
        try:
            kind, case = receive(connection)
        except EOFError:
            return benches.close()  # else their pipes stay open while an error of the last answer refers to this frame
        try:
            answer = benches.ask(kind, case), None
        except Exception as error:
            answer = None, error
        send(connection, answer)


class Benches:
    """Owns the store of all rendezvous, and the models used last, each captured in a process of its own."""

    MOST = 4

    def __init__(self) -> None:
        self.host = StoreHost()
        self.kept: dict[tuple[Any, ...], Bench] = {}

    def ask(self, kind: str, case: Any) -> Any:
        if kind == "call":
            return in_fork(_called, self.host, os.urandom(4).hex(), *case, timeout_seconds=CALL_SECONDS)
        key = (case.model, case.micro, *(str(case.rest.get(name)) for name in ("precision", "loss", "train")))
        bench = self.kept.pop(key, None) or Bench(self.host, case)
        self.kept[key] = bench  # last: the one used last
        if len(self.kept) > self.MOST:
            self.kept.pop(next(iter(self.kept))).close()
        try:
            return bench.ask(kind, case)
        except EOFError:
            self.kept.pop(key).close()
            raise ForkError("the process of this model has ended") from None

    def close(self) -> None:
        """End the processes of all models; the exit of this process would wait for them."""
        for bench in self.kept.values():
            bench.close()


def _called(host: StoreHost, token: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    host.begin(token)
    return function(host, *args)


class Bench:
    """A fork that holds one model, captured; each question is answered by a fork of it."""

    def __init__(self, host: StoreHost, case: Case) -> None:
        self._connection, there = multiprocessing.Pipe()
        self._child = Child(_bench, there, self._connection, host, case)
        there.close()

    def ask(self, kind: str, case: Case) -> Any:
        return answer_of(self._connection, kind, case)

    def close(self) -> None:
        self._connection.close()
        self._child.end()


def _bench(connection: Connection, other: Connection, host: StoreHost, first: Case) -> None:
    from runtime.weights.initial_weights import fingerprint_of_model
    from tests.models import families

    other.close()
    entry = families.build(first.model)
    if first.rest.get("train"):
        entry.model.train()
    built = fingerprint_of_model(entry.model)
    model, truths = _captured(entry, first), {}
    while True:
        try:
            kind, case = receive(connection)
        except EOFError:
            return
        try:
            truth = None
            if kind.startswith("check"):
                key = (case.num_sequences, str(case.rest.get("optimizer")), str(case.rest.get("precision")))
                if key not in truths:
                    truths[key] = in_fork(one_process, entry, case, built)
                truth = truths[key]
            answer = in_fork(_answer, kind, model, entry, host, case, truth, os.urandom(4).hex()), None
        except Exception as error:
            if not isinstance(error, PlanError):
                error.add_note(traceback.format_exc())
            answer = None, error
        send(connection, answer)


def _captured(entry: Any, case: Case) -> Any:
    """The model, captured; as it is where that fails, so that each fork meets the error by itself."""
    try:
        return captured_again(entry.model, spec_of(entry, case))
    except PlanError:
        return entry.model


def spec_of(entry: Any, case: Case) -> dict[str, Any]:
    inputs = entry_inputs(entry, bounded=True)
    # Padding to the default of 128 · tp would leave the small vocabularies to the first rank alone.
    rest = {"tensor_parallel": {"vocabulary_multiple": 8}} | {k: v for k, v in case.rest.items() if k != "train"}
    optimizer = {"name": "adamw"} | ADAMW | rest.pop("optimizer", {})
    batch = {"global": case.num_sequences, "micro": case.micro}
    return {"mesh": case.mesh, "batch": batch, "inputs": inputs, "optimizer": optimizer, "seed": 7, **rest}


def _answer(kind: str, model: Any, entry: Any, host: StoreHost, case: Case, truth: Found | None, token: str) -> Any:
    from planner import plan

    decided = plan(model, spec_of(entry, case))
    if kind == "plan":
        return type(decided).of(decided)
    batches = [entry.batch(case.num_sequences, seed) for seed in range(NUM_BATCHES if kind == "run" else NUM_STEPS)]
    host.begin(token)
    results = Ranks(decided, "forks", host).run(case.job or steps, batches, *case.job_arguments)
    if kind == "run":
        return results
    assert truth is not None
    if kind == "check":
        return compare(results[0], truth)
    found = results[0]
    return (
        {n: compare(f, truth) for n, f in found.items()}
        if isinstance(found, dict)
        else [compare(f, truth) for f in found]
    )


def steps(decided: Any, batches: list[dict[str, Tensor]]) -> Found | None:
    """What a user does: gradients of the first batch, then one update for each batch."""
    from runtime import Engine

    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        first = engine.forward_backward(batches[0])
        gradients = engine.gather_gradients()
        reports = [engine.optimizer_step(), *(engine.train_step(batch) for batch in batches[1:])]
        parameters = engine.gather_parameters()
        evaluated = engine.evaluate(batches[0])
    losses, norms = [first, *(r.loss for r in reports[1:])], [r.grad_norm for r in reports]
    return Found(losses, norms, dict(gradients), parameters, evaluated) if parameters else None


def one_process(entry: Any, case: Case, built: dict[str, int]) -> Found:
    """The unmodified model on the whole global batch: the object itself, which this fork alone trains.

    The bench captured it before; that it left it as it was built is checked. A copy would be another model where a
    closure or a hook holds weights.
    """
    from planner.capture.gradients.applications import LowestPrecision
    from runtime.weights.initial_weights import fingerprint_of_model

    model = entry.model
    assert fingerprint_of_model(model) == built, "planning has changed the model"
    given = case.rest.get("precision") or {}
    if given.get("parameters"):
        model.to(getattr(torch, given["parameters"]))
    options = ADAMW | case.rest.get("optimizer", {})
    trained = [p for p in model.parameters() if p.requires_grad]
    update = torch.optim.AdamW(trained, options["lr"], options["betas"], weight_decay=options["weight_decay"])
    losses, norms, gradients = [], [], {}
    batches = [entry.batch(case.num_sequences, seed) for seed in range(NUM_STEPS)]
    with LowestPrecision() as seen:
        entry.loss(model(**batches[0]))
    for batch in batches:
        update.zero_grad()
        loss = entry.loss(model(**batch))
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {n: p.grad if p.grad is None else p.grad.clone() for n, p in _named(model)}
        norms.append(nn.utils.clip_grad_norm_(trained, options["clip_grad_norm"] or float("inf")).item())
        update.step()
    with torch.no_grad():
        evaluated = entry.loss(model(**batches[0])).item()
    parameters = {n: p.detach() for n, p in _named(model)}
    return Found(losses, norms, gradients, parameters, evaluated, seen.dtype)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))

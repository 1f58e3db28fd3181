"""The command ``meshwright diff``: compare two saved plans, or the plans of two specs of one model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from passes.errors import PlanError
from planner.commands.cli import Format, Output, Peft, write_text
from planner.files.text import MIB, parse_json, read_text, shorten
from runtime.options import flag, option, takes

if TYPE_CHECKING:
    from planner.frozen_plan import Plan

DIFFERENT = 1
EPILOG = (
    "Examples: meshwright diff before.json after.json · meshwright diff specs/tp2_pp2.yaml specs/tp4.yaml "
    "--model hf:examples/gpt2_small.json"
)
_MOST_BYTES = 64 * MIB


def is_saved_plan(path: Path) -> bool:
    """Return whether the file is JSON with the key ``version``, unlike a spec. Raises PlanError for a binary file."""
    text = read_text(path, "plan or spec", most_bytes=_MOST_BYTES, fix="give two saved plans, or two specs")
    if not text.lstrip().startswith("{"):
        return False
    try:
        values = parse_json(text)
    except ValueError as error:
        if '"version"' not in text:
            return False  # YAML in braces: the spec's own reader reports its errors
        words = f"the plan is damaged or truncated: {error}"
        raise PlanError(words, where=shorten(path), fix="save the plan again") from None
    return isinstance(values, dict) and "version" in values


def two_plans(first: Path, second: Path, model: str | None) -> tuple[Plan, Plan]:
    """Load two saved plans, or plan ``model`` with two specs. Raises PlanError if the files are of different kinds."""
    kinds = [is_saved_plan(path) for path in (first, second)]
    if kinds[0] != kinds[1]:
        plan, spec = (first, second) if kinds[0] else (second, first)
        fix = "give two saved plans, as `meshwright plan MODEL SPEC --format json -o FILE` writes them; or two specs"
        raise PlanError(f"{shorten(plan)} is a saved plan, but {shorten(spec)} is not", where=shorten(spec), fix=fix)
    if not kinds[0]:
        return _planned(first, second, model)
    from planner.frozen_plan import Plan

    if model is not None:
        what = "--model is only for specs: these are two saved plans"
        raise PlanError(what, where="--model", fix="remove --model, or give two specs")
    return Plan.load(first), Plan.load(second)


def _planned(first: Path, second: Path, model: str | None) -> tuple[Plan, Plan]:
    from planner.api import plan
    from planner.capture.model.reference import load_model
    from planner.spec.spec import Spec

    if model is None:
        raise PlanError(
            f"{shorten(first)} and {shorten(second)} are not saved plans",
            where=shorten(first),
            fix="add --model MODEL if they are specs; otherwise save plans with `meshwright plan MODEL SPEC "
            "--format json`",
        )
    specs = Spec.load(first), Spec.load(second)  # check both specs before the first plan, which takes long
    return plan(load_model(model), specs[0]), plan(load_model(model), specs[1])


@dataclass(frozen=True)
class Options:
    model: str | None = option("Plan this model with both specs, and compare the plans.", "MODEL")
    format: Format = option("Output format.", default="table")
    output: Output = None
    peft: Peft = None
    exit_code: bool = flag("Exit with 1 if the plans differ.")


@takes(Options)
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="Saved plan (JSON), or a spec if --model is given.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Second file, of the same kind.")],
    options: Options,
) -> None:
    """Compare two plans: each value of their tables that differs, by row and field."""
    from planner.capture.model.reference import named
    from planner.report.differences import differences, differences_text

    if options.peft is not None and options.model is None:
        raise PlanError(
            "--peft wraps the model of --model, which is not given", where="--peft", fix="add --model MODEL"
        )
    adapted = None if options.model is None else named(options.model, options.peft)
    changes = differences(*two_plans(first, second, adapted))
    if options.format == "json":
        text = json.dumps({"before": str(first), "after": str(second), **changes.to_dict()}, indent=2)
    else:
        text = differences_text(changes, str(first), str(second))
    write_text(text, options.output)
    if options.exit_code and changes.any:
        raise typer.Exit(DIFFERENT)

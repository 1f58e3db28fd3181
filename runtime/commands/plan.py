"""The command ``meshwright plan``: prints a plan, its passes, or the shardings of one parameter, or writes its file."""

from dataclasses import dataclass

from passes.errors import PlanError
from planner.commands.cli import (
    Model,
    Output,
    Peft,
    PlanFormat,
    SpecFile,
    format_plan,
    show_plan,
    show_sections,
    title_of,
    write_text,
)
from runtime.options import flag, option, takes

EPILOG = (
    "Examples: meshwright plan hf:examples/gpt2_small.json specs/tp2_pp2.yaml --format json -o p.json "
    "· meshwright plan examples/gpt.py:build examples/gpt.yaml --passes --rank 1"
)


@dataclass(frozen=True)
class Options:
    format: PlanFormat = option("Output format.", default="table")
    output: Output = None
    full: bool = flag("Print a row for every block, including repeated ones.")
    passes: bool = flag("Instead of the plan, print the changes that each pass makes to the graphs of one rank.")
    rank: int | None = option("Rank for --passes; default: 0.", "N")
    why: str | None = option(
        "Instead of the plan, print the cost of each way to shard a parameter (dotted name or glob).", "NAME"
    )
    length: int | None = option("Sequence length to print, if the spec has several; default: the longest.", "N")
    peft: Peft = None


@takes(Options)
def plan_command(model: Model, spec: SpecFile, options: Options) -> None:
    """Plan a run: the sharding of every parameter, all collectives, stages, schedule and memory."""
    from planner import plan
    from planner.capture.model.reference import load_model, named
    from planner.frozen_plan import check_length
    from planner.spec.spec import Spec

    model, output, length = named(model, options.peft), options.output, options.length
    _check(options)
    loaded = Spec.load(spec)
    if length is not None:
        check_length(length, loaded.lengths)
    result = plan(load_model(model), loaded)
    result = result if length is None else result.at_length(length)
    if options.passes:
        from planner.lower import passes_text

        write_text(passes_text(result, options.rank or 0, full=options.full), output)
    elif options.why is not None:
        from planner.report.alternatives import why as sections_of

        show_sections(sections_of(result, result.to_run()[0], options.why), output)
    elif options.format == "table" and output is None:
        show_plan(result, full=options.full)
    elif options.format == "pt" and output is not None:
        result.save(output)
    else:
        write_text(format_plan(result, options.format, full=options.full, title=title_of(model, spec)), output)


def _check(options: Options) -> None:
    """Raise PlanError for an option without effect."""
    format, passes = options.format, options.passes
    if format == "pt" and (options.output is None or options.output.suffix != ".pt"):
        what = "--format pt writes a plan that ranks load, to a file with the suffix .pt"
        raise PlanError(what, where="--format pt", fix="add -o plan.pt")
    if options.full and (options.why is not None or format not in ("table", "html")):
        what = "--full adds rows to tables, to an HTML page or to --passes"
        raise PlanError(what, where="--full", fix="remove --full, or --why and --format")
    if options.rank is not None and not passes:
        what = "--rank selects a rank for --passes, which is not given"
        raise PlanError(what, where="--rank", fix="add --passes, or remove --rank")
    if options.why is not None and (passes or format != "table"):
        fix = "leave out --passes and --format, or --why"
        raise PlanError("--why prints tables of one parameter, and nothing else", where="--why", fix=fix)
    if passes and format != "table":
        raise PlanError(f"--passes prints text, not {format}", where="--format", fix="leave out --format or --passes")
    if options.length is not None and format == "pt":
        fix = "leave out --length: the file has all lengths"
        raise PlanError("--length selects tables to print", where="--length", fix=fix)

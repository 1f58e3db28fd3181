"""The command ``meshwright``: the planner's commands, ``plan``, ``verify`` and ``memory``; others from commands/."""

from __future__ import annotations

import json
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from passes.errors import PlanError
from planner.cli import (
    Format,
    Model,
    Output,
    Peft,
    PlanFormat,
    SpecFile,
    app,
    format_plan,
    show_plan,
    show_sections,
    title_of,
    write_text,
)
from planner.command_group import BAD_INPUT, PROCESS
from planner.files.text import printable
from runtime.commands import (
    calibrate,
    checkpoint,
    diff,
    env,
    evaluate,
    export,
    fuzz,
    generate,
    prepare,
    report,
    train,
)

CHECK_FAILED = 1


@app.command(
    "plan",
    epilog="Examples: meshwright plan hf:examples/gpt2_small.json specs/tp2_pp2.yaml --format json -o p.json "
    "· meshwright plan examples/gpt.py:build examples/gpt.yaml --passes --rank 1",
)
def plan_command(
    model: Model,
    spec: SpecFile,
    format: Annotated[PlanFormat, typer.Option(help="Output format.")] = PlanFormat.table,
    output: Output = None,
    full: Annotated[bool, typer.Option("--full", help="Print a row for every block, including repeated ones.")] = False,
    passes: Annotated[
        bool,
        typer.Option("--passes", help="Print the changes of each pass in the graphs of one rank, instead of the plan."),
    ] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Rank for --passes; default: 0.")] = None,
    why: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print the cost of each way to shard one parameter (a dotted name, or a glob), instead of the plan.",
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(metavar="N", help="Of several lengths, the one to print; default: the greatest.")
    ] = None,
    peft: Peft = None,
) -> None:
    """Plan a run: the sharding of every parameter, all collectives, stages, schedule and memory."""
    from planner import plan
    from planner.capture.model.reference import load_model, named
    from planner.frozen_plan import check_length
    from planner.spec.spec import Spec

    model = named(model, peft)
    _check_options(format, passes, rank, output, why)
    if length is not None and format is PlanFormat.pt:
        fix = "leave out --length: the file has all lengths"
        raise PlanError("--length selects tables to print", where="--length", fix=fix)
    asked = Spec.load(spec)
    if length is not None:
        check_length(length, asked.lengths)
    result = plan(load_model(model), asked)
    result = result if length is None else result.at_length(length)
    if passes:
        from planner.lower import passes_text

        write_text(passes_text(result, rank or 0, full=full), output)
    elif why is not None:
        from planner.report.alternatives import why as sections_of

        show_sections(sections_of(result, result.to_run()[0], why), output)
    elif format is PlanFormat.table and output is None:
        show_plan(result, full=full)
    elif format is PlanFormat.pt and output is not None:
        result.save(output)
    else:
        write_text(format_plan(result, format, full=full, title=title_of(model, spec)), output)


def _check_options(format: PlanFormat, passes: bool, rank: int | None, output: Any, why: str | None) -> None:
    """An option that would have no effect is an error."""
    if format is PlanFormat.pt and (output is None or output.suffix != ".pt"):
        raise PlanError("a plan that runs is a file with a name in .pt", where="--format pt", fix="add -o plan.pt")
    if rank is not None and not passes:
        what = "--rank selects a rank for --passes, which is not given"
        raise PlanError(what, where="--rank", fix="add --passes, or remove --rank")
    if why is not None and (passes or format is not PlanFormat.table):
        fix = "leave out --passes and --format, or --why"
        raise PlanError("--why prints tables of one parameter, and nothing else", where="--why", fix=fix)
    if passes and format is not PlanFormat.table:
        raise PlanError(f"--passes prints text, not {format}", where="--format", fix="leave out --format or --passes")


@app.command("verify", epilog="Example: meshwright verify examples/gpt.py:build examples/gpt.yaml")
def verify_command(
    model: Model,
    spec: SpecFile,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates to run and compare.")] = 1,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Relative tolerance of loss and gradients; default: from the model's precision."),
    ] = None,
    remove_collective: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Remove the N-th collective, to see the check fail.")
    ] = None,
    output: Output = None,
    peft: Peft = None,
) -> None:
    """Train with the plan and in one process, and compare losses, gradients and parameters. Exit 1 if they differ.

    Starts the local processes itself.
    """
    from planner.capture.model.reference import named
    from runtime.verify.run import verify

    report = verify(
        named(model, peft), str(spec), steps=steps, remove_collective=remove_collective, tolerance=tolerance
    )
    write_text(str(report), output)
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)


@app.command("memory", epilog="Example: meshwright memory examples/gpt.py:build examples/gpt.yaml")
def memory_command(
    model: Model,
    spec: SpecFile,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Compare an evaluation instead: no gradients, no optimizer state.")
    ] = False,
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.table,
    output: Output = None,
    peft: Peft = None,
) -> None:
    """Run a step and compare predicted memory with what each rank holds. Exit 1 if they differ by more than 1 % in
    parameters, gradients and optimizer state, or 3 % in activations.

    Starts the local processes itself.
    """
    from planner.capture.model.reference import named
    from runtime.profiling.memory import compare_memory

    report = compare_memory(named(model, peft), str(spec), evaluates=evaluate)
    write_text(json.dumps(report.to_dict(), indent=2) if format is Format.json else str(report), output)
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)


app.command("train", epilog=train.EPILOG)(train.train_command)
app.command("prepare", epilog=prepare.EPILOG)(prepare.prepare_command)
app.command("evaluate", epilog=evaluate.EPILOG)(evaluate.evaluate_command)
app.command("generate", epilog=generate.EPILOG)(generate.generate_command)
app.command("checkpoint", epilog=checkpoint.EPILOG)(checkpoint.checkpoint_command)
app.command("export", epilog=export.EXPORT_EPILOG)(export.export_command)
app.command("import", epilog=export.IMPORT_EPILOG)(export.import_command)
app.command("diff", epilog=diff.EPILOG)(diff.diff_command)
app.command("calibrate", epilog=calibrate.EPILOG)(calibrate.calibrate_command)
app.command("report", epilog=report.EPILOG)(report.report_command)
app.command("fuzz", epilog=fuzz.EPILOG)(fuzz.fuzz_command)
app.command("env", epilog=env.EPILOG)(env.env_command)


def main() -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows ? for × and ·
    try:
        app(prog_name="meshwright", obj=PROCESS)
    except OSError as error:
        try:
            print(file=sys.stderr, flush=True)
        except OSError:  # a full disk behind the error stream: the output has the message
            print(printable(str(error.__context__ or error)))
            raise SystemExit(BAD_INPUT) from None
        raise


if __name__ == "__main__":
    main()

"""The planner's commands search, groups, schedule and schema, and the printing of plans: no GPU, no process group.

The command ``plan`` is in runtime/commands, because it prints the passes too.

A command builds plain data with the planner and prints it in the requested format. A PlanError becomes one message on
stderr and exit code 2, a RunError exit code 1 (planner.commands.command_group).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from meshwright import __version__
from passes.errors import PlanError
from planner.commands.command_group import App, Commands
from planner.files.atomic import write_for_user
from planner.files.text import reason, shorten
from planner.pipeline.kinds import KINDS
from planner.pipeline.schedule import CUSTOM
from planner.pipeline.simulate import format_schedule
from planner.progress import shown_by

if TYPE_CHECKING:
    from planner.frozen_plan import Plan
    from planner.report.section import Section

MOST_PRINTED_RANKS = 1 << 17


app = App(
    name="meshwright",
    cls=Commands,
    help="Plan and run tensor, pipeline and data parallel training of an unmodified PyTorch Transformer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
MODEL_HELP = "[bold]package.module:callable[/], [bold]path/file.py:callable[/] or [bold]hf:DIR_OR_CONFIG.json[/]"
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Peft = Annotated[
    Path | None,
    typer.Option(
        "--peft",
        metavar="CONFIG|DIR",
        help="Wrap MODEL with the package peft: an adapter_config.json, or a directory of saved adapters.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file instead of stdout.")
]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="YAML file with mesh, batch, inputs and options.")]


def _show_version(asked: bool) -> None:
    if asked:
        write_text(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    shows_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Define the options of the program itself."""


PlanFormat = Literal["table", "json", "yaml", "html", "pt", "schedule"]
Format = Literal["table", "json"]
ScheduleFormat = Literal["table", "json", "svg"]


def show_plan(plan: Plan, *, full: bool = False) -> None:
    """Print the plan's tables to stdout: in colours and fitted to the width of a terminal, else as plain text."""
    from planner.report.sections import sections

    show_sections(sections(plan, full=full))


def show_sections(parts: list[Section], output: Path | None = None) -> None:
    """Print tables to stdout as ``show_plan`` does, or write them as plain text to the file ``output``."""
    from planner.report.text import print_sections, sections_text

    if output is None and sys.stdout.isatty():
        print_sections(parts)
    else:
        write_text(sections_text(parts), output)


def show_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], output: Path | None = None) -> None:
    """Print one table as ``show_sections`` does."""
    from planner.report.section import Section

    show_sections([Section(title, columns, tuple(rows))], output)


def title_of(model: str, spec: Path) -> str:
    """Return the title of a page: the names of the model and of its spec."""
    return f"{Path(model.removeprefix('hf:')).name or model} · {spec.name}"


def format_plan(plan: Plan, format: PlanFormat, *, full: bool = False, title: str = "") -> str:
    """Return the plan as tables, JSON, YAML or HTML, or its schedule. ``full``: a row for every block."""
    from planner.report.text import to_yaml

    match format:
        case "json":
            return json.dumps(plan.to_dict(), indent=2)
        case "yaml":
            return to_yaml(plan)
        case "html":
            from planner.report.page.plan_page import plan_page  # templates are loaded for pages only

            return plan_page(plan, full=full, title=title)
        case "table":
            return plan.describe(full=full)
        case "schedule":
            return format_schedule(replace(plan.schedule.on(plan.mesh), kind=CUSTOM))
        case "pt":
            raise AssertionError("a .pt plan is a binary file, not text")


@app.command("search", epilog="Example: meshwright search hf:config.json specs/auto.yaml --top 5 --best best.yaml")
def search_command(
    model: Model,
    spec: SpecFile,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices; default: `devices` of the spec.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Number of layouts to print.")] = 5,
    format: Annotated[Format, typer.Option(help="Output format.")] = "table",
    output: Output = None,
    best: Annotated[
        Path | None,
        typer.Option(
            metavar="SPEC.yaml",
            help="Write a spec with the fastest layout to this file. `-o FILE.yaml` without --format does the same.",
        ),
    ] = None,
    peft: Peft = None,
) -> None:
    """Rank the layouts for all `auto` keys of the spec, fastest first, with the reason why each other one is slower."""
    from planner.api import find_layouts
    from planner.capture.model.reference import load_model, named
    from planner.search.winner import chosen, result_sections, result_to_dict, winner_text
    from planner.spec.spec import Spec

    names_a_spec = output is not None and output.suffix in (".yaml", ".yml")  # a table is no YAML
    if best is None and format == "table" and names_a_spec:
        best, output = output, None
    asked = Spec.load(spec)
    if devices is not None:
        asked = asked.with_devices(devices)
    with shown_progress() as progress:
        result = find_layouts(load_model(named(model, peft)), asked, top=top, progress=progress)
    if best is not None:
        write_text(winner_text(spec, asked, result.winner.point, chosen(result, result.winner)), best, "--best")
    if format == "table":
        show_sections(result_sections(result), output)
    else:
        write_text(json.dumps(result_to_dict(result), indent=2), output)


@app.command("groups", epilog="Example: meshwright groups --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4")
def groups_command(
    world_size: Annotated[int, typer.Option(help="Number of processes.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size.")] = 1,
    etp: Annotated[int | None, typer.Option(help="Tensor-parallel size inside an expert; default: --tp.")] = None,
    order: Annotated[str, typer.Option(help="Axes from the fastest to the slowest varying.")] = "tp-cp-ep-dp-pp",
    format: Annotated[Format, typer.Option(help="Output format.")] = "table",
    output: Output = None,
) -> None:
    """Print the process groups of each mesh axis, for dense layers and for experts."""
    from planner.mesh import Mesh, all_groups

    if world_size > MOST_PRINTED_RANKS:
        raise PlanError(
            f"the groups of {shorten(world_size, 40)} ranks are too many to print",
            where="--world-size",
            fix=f"give {MOST_PRINTED_RANKS} or less",
        )
    mesh = Mesh.from_world_size(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)
    groups = all_groups(mesh)
    if format == "json":
        write_text(json.dumps(groups), output)
    else:
        show_sections([_groups_section(kind, rows, world_size) for kind, rows in groups.items()], output)


def _groups_section(kind: str, groups: dict[str, list[list[int]]], world_size: int) -> Section:
    from planner.report.section import Section

    rows = [
        (_axis_name(axes, kind), str(len(of)), "  ".join(str(ranks).replace(" ", "") for ranks in of))
        for axes, of in groups.items()
    ]
    title = f"{kind} groups of {world_size} ranks"
    return Section(title, ("axis", "groups", "ranks"), tuple(rows), right=frozenset({"groups"}))


def _axis_name(token: str, kind: str) -> str:
    """Return the name of an axis in the table: etp and edp for experts. JSON keeps the names tp and dp."""
    from planner.mesh import EXPERT_AXES

    names = {name: axis for axis, name in EXPERT_AXES.items()} if kind == "expert" else {}
    return "-".join(names.get(axis, axis) for axis in token.split("-"))


@app.command("schedule", epilog="Example: meshwright schedule --pp 4 --microbatches 8 --kind 1f1b")
def schedule_command(
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.")],
    microbatches: Annotated[int, typer.Option(help="Microbatches per step of one dp rank.")],
    vpp: Annotated[int, typer.Option(help="Chunks per rank (virtual stages).")] = 1,
    group_size: Annotated[int | None, typer.Option(help="Microbatches per group; default: --pp.")] = None,
    kind: Annotated[str | None, typer.Option(help=f"{', '.join(KINDS)}; default: depends on --vpp.")] = None,
    format: Annotated[ScheduleFormat, typer.Option(help="Output format.")] = "table",
    output: Output = None,
) -> None:
    """Print the order of forwards and backwards on each pipeline rank, and the bubble."""
    from planner.pipeline.schedule import build_schedule
    from planner.pipeline.simulate import simulate
    from planner.report.schedule import schedule_svg, schedule_text, schedule_to_dict

    schedule = build_schedule(kind, pp, microbatches, vpp=vpp, group_size=group_size)
    simulation = simulate(schedule)
    if format == "json":
        write_text(json.dumps(schedule_to_dict(schedule, simulation)), output)
    elif format == "svg":
        write_text(schedule_svg(schedule, simulation), output)
    else:
        write_text(schedule_text(schedule, simulation), output)


@app.command("schema", epilog="Example: meshwright schema -o spec.schema.json")
def schema_command(
    cluster: Annotated[bool, typer.Option("--cluster", help="Schema of cluster files instead of specs.")] = False,
    output: Output = None,
) -> None:
    """Print the JSON schema of specs or cluster files, for completion and checks in an editor.

    Editors with the YAML language server read it if the spec's first line names it:
    [bold]# yaml-language-server: $schema=spec.schema.json[/]
    """
    from planner.cluster.cluster import Cluster
    from planner.spec.fields import json_schema
    from planner.spec.spec import Spec

    schema = json_schema(Cluster, "A meshwright cluster file") if cluster else json_schema(Spec)
    write_text(json.dumps(schema, indent=2, ensure_ascii=False), output)


def write_text(text: str | Iterable[str], path: Path | None = None, option: str = "--output") -> None:
    """Write ``text`` to stdout or ``path``; one string ends with a newline, several parts are unchanged. Raises
    PlanError at ``option`` if the output cannot be written."""
    if isinstance(text, str):
        text = (text if text.endswith("\n") else text + "\n",)
    if path is None:
        try:
            sys.stdout.writelines(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more at exit
            fix = f"free space there, or write to a file: {option}"
            raise PlanError(reason(error), where="the standard output", fix=fix) from None
        return
    try:
        write_for_user(path, text)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}", where=option, fix="give a writable file") from error


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of the current work, the number of finished items, and their total (0: unknown)."""
    console = Console(stderr=True)
    if not (sys.stderr.isatty() and console.is_terminal):
        yield lambda what, done, total: None
        return
    with console.status("searching") as status, shown_by(lambda line: status.update(escape(line))):

        def show(what: str, done: int, total: int) -> None:
            count = f" {done} of {total}" if total else f" {done}" if done else ""
            status.update(escape(f"{what}{count}"))

        yield show

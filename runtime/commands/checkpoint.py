"""The command ``meshwright checkpoint``: lists the saves of a directory, verifies them, or exports one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from passes.errors import PlanError
from planner.commands.cli import show_table, write_text
from runtime.commands.export import Names, export_save
from runtime.options import flag, option, takes

if TYPE_CHECKING:
    from runtime.checkpoint.manifest import Manifest

DAMAGED = 1
EPILOG = (
    "Examples: meshwright checkpoint run --verify · meshwright checkpoint run/step-00000012 --export weights "
    "· meshwright checkpoint run --export weights"
)


@dataclass(frozen=True)
class Options:
    verify: bool = flag("Read every byte and compare checksums.")
    export: Path | None = option(
        "Export the weights of DIR, or of its last save, in Hugging Face format; an adapter is merged into its base.",
        "HF_DIR",
    )
    ema: bool = flag("With --export: export the running mean of the weights (optimizer.ema).")
    names: Names = "hf"


@takes(Options)
def checkpoint_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of saves, or a single save.")],
    options: Options,
) -> None:
    """List the saves in a directory, verify them, or export one. Runs in one process. Exit 1 if a save is damaged."""
    from runtime.checkpoint.manifest import MANIFEST
    from runtime.checkpoint.saves import LATEST, latest_in, saves_in

    for name, is_set in (("--ema", options.ema), ("--names", options.names != "hf")):
        if is_set and options.export is None:
            what = f"{name} applies to --export, which is not given"
            raise PlanError(what, where=name, fix=f"add --export HF_DIR, or remove {name}")
    if options.export is not None:
        export_save(directory, options.export, ema=options.ema, names=options.names)
        return
    is_one = os.path.lexists(directory / MANIFEST)
    saves = [directory] if is_one else saves_in(directory)
    if not saves:
        fix = "name the directory that `train --save` or engine.save has written"
        raise PlanError("this directory has no saves", where=str(directory), fix=fix)
    problem = ""
    try:
        last = None if is_one else latest_in(directory)
    except PlanError as error:
        last, problem = None, f"{LATEST}: {error.what}"
    rows = [_row(save, options.verify, save == last) for save in saves]
    show_table("Saves", ("save", "step", "layout", "bytes", "written", "state"), [row for row, _ in rows])
    if problem:
        write_text(problem)
    if problem or not all(is_good for _, is_good in rows):
        raise typer.Exit(DAMAGED)


def _row(save: Path, thorough: bool, is_last: bool) -> tuple[tuple[str, ...], bool]:
    """Return the table row of a save, and whether the save is intact."""
    from runtime.checkpoint.saves import look, verify

    try:
        manifest = verify(save) if thorough else look(save)
        good = "intact" if thorough else "complete, not verified"
    except PlanError as error:
        return (save.name, "", "", "", "", error.what), False
    state = good + (", latest" if is_last else "")
    return (save.name, str(manifest.step), _layout(manifest), f"{manifest.num_bytes:,}", manifest.written, state), True


def _layout(manifest: Manifest) -> str:
    mesh = manifest.mesh
    usual = {"etp": mesh.get("tp"), "edp": mesh.get("edp")}  # omit sizes that follow from the others
    text = " · ".join(f"{axis} {size}" for axis, size in mesh.items() if size != usual.get(axis, 1))
    is_shared = mesh.get("dp", 1) * mesh.get("cp", 1) != 1
    return (text or "1 rank") + (", ZeRO-1" if manifest.zero and is_shared else "")

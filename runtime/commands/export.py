"""The commands ``meshwright export`` and ``import``: a save becomes a Hugging Face directory, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands.cli import write_text
from planner.progress import say, shown_if_slow

if TYPE_CHECKING:
    from runtime.checkpoint.manifest import Manifest

EXPORT_EPILOG = "Examples: meshwright export run weights · meshwright export run/step-00000012 weights --ema"
IMPORT_EPILOG = (
    "Examples: meshwright import weights run · meshwright train hf:weights SPEC --data stdlib --resume run --save run2"
)
Names = Annotated[
    str,
    typer.Option(
        "--names", metavar="hf|model", help="hf: tensors named as in the directory that was loaded; model: as in MODEL."
    ),
]


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of saves, or a single save.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for config.json and safetensors.")],
    ema: Annotated[bool, typer.Option("--ema", help="Export the running mean of the weights (optimizer.ema).")] = False,
    names: Names = "hf",
) -> None:
    """Export the last save of RUN as a Hugging Face directory; an adapter is merged into its base.

    Runs in one process, with one tensor in memory at a time.
    """
    export_save(run, directory, ema=ema, names=names)


def export_save(run: Path, directory: Path, *, ema: bool, names: str = "hf") -> None:
    """Export a save to ``directory``. Raises PlanError for a missing or damaged save, or an unwritable directory."""
    from runtime.checkpoint.conversion import export
    from runtime.checkpoint.model_files import files_of_run, told_of_changes, write_files
    from runtime.checkpoint.saves import resolve, verify

    save = resolve(run)
    with shown_if_slow(f"verifying {save.name}"):
        manifest = verify(save)
    export(save, manifest, directory, averaged=ema, names=names)
    for line in told_of_changes(save, manifest):
        say(line)
    write_files(files_of_run(save), directory)
    write_text(f"{save} → {directory}{_adapters_note(manifest)}{_dtypes_note(manifest)}")


def import_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face directory with safetensors.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="New directory of saves.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model of the weights; default: that of DIR's config.json."),
    ] = None,
) -> None:
    """Import a Hugging Face directory as a save of step 0, for train --resume RUN with any layout.

    Runs in one process, with one bucket in memory at a time.
    """
    from runtime.checkpoint.conversion import import_weights

    save, num_tensors = import_weights(directory, run, model)
    write_text(f"{directory} → {save}: {num_tensors} tensors")


def _dtypes_note(manifest: Manifest) -> str:
    from planner.capture.model.hub_format import stored_in

    kind = stored_in(manifest.texts.get("config.json"))
    dtypes = dict.fromkeys(dtype for tensor in manifest.tensors.values() if (dtype := tensor.values.get("parameter")))
    return f": was {kind}, is {', '.join(dtypes)}" if kind else ""


def _adapters_note(manifest: Manifest) -> str:
    if manifest.adapters is None:
        return ""
    kinds = ", ".join(str(config.get("peft_type", "adapter")) for config in manifest.adapters.configs.values())
    return f": the base with its adapter ({kinds}) merged, under the base's own names"

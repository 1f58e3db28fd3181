"""The results, as a line on the terminal and as the page docs/other_models.md."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from benchmarks.other_models.catalogue import CATALOGUE, Listed

PAGE = """# Models of other people

Models from PyPI packages, and models reimplemented from their papers, each checked by `meshwright verify`: it
compares the plan on its processes with the unmodified model in one process, after forward, backward and one update.
You can repeat it with torch {torch}:

    pip install {packages}
    python -m benchmarks.other_models --markdown docs/other_models.md     # or with parts of names: timm own_ whisper

torchtune also needs `torchao<0.12`, timm and others a torchvision. Packages that you have not installed are listed
as such; nothing in this repository needs them. The models are small (two or three layers, 32 or 64 channels)
and compute in float64 if they can. The rows were measured one after another over a sitting, while the code changed.

*FLOPs cut*: the share of the matrix products' work that tp shards. *Collectives a layer*: those over tp, forward and
backward, of one microbatch in the block with the most (a layer of a decoder with cross-attention has three sublayers,
one of SD3 two streams); "in all" if the plan finds no repeated blocks. *Result*: the largest relative difference of
the loss, and of a gradient; or the refusal.

{counts}

| model | package | layout | FLOPs cut | collectives a layer | result |
|---|---|---|---|---|---|
{rows}
"""


def line(listed: Listed, row: dict[str, Any]) -> str:
    flops = f"{row['flops']:.1%}" if "flops" in row else "-"
    seconds = f"{row.get('plan_seconds', 0):.1f}/{row.get('seconds', 0):.0f} s"
    warnings = "".join(f"\n    warning: {text}" for text in row.get("warnings", ()))
    collectives = row.get("collectives", "-")
    return (
        f"{listed.source:<20} {listed.build.split(':')[1]:<18} {listed.layout:<8} {flops:>7} {collectives:>3} "
        f"{seconds:>12}  {result(row)}{warnings}"
    )


def result(row: dict[str, Any]) -> str:
    if differences := row.get("differences"):
        return f"{row['result']} (loss {differences['loss']:.1e}, gradient {differences['gradient']:.1e})"
    detail = row.get("detail", "").strip()
    if row["result"] in ("failed", "crashed"):
        detail = detail.splitlines()[-1] if detail else ""
    detail = " ".join(detail.partition("\n  fix:")[0].split())
    return f"{row['result']}: {detail}" if detail else row["result"]


def markdown(seen: dict[str, Any]) -> str:
    """The page, with a row for every model of the catalogue."""
    rows = [(listed, seen.get(listed.build, {"result": "not run"})) for listed in CATALOGUE]
    results = [row["result"] for _, row in rows]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in dict.fromkeys(results))
    packages = sorted({listed.source for listed in CATALOGUE} - {"own", "torch"})
    lines = "\n".join(_row(listed, row) for listed, row in rows)
    return PAGE.format(
        packages=" ".join(packages),
        torch=version("torch").partition("+")[0],
        rows=lines,
        counts=f"{len(results)} models: {counts}.",
    )


def _row(listed: Listed, row: dict[str, Any]) -> str:
    source = (
        f"own, after {listed.paper}" if listed.source == "own" else f"{listed.source} {_version(listed, row)}".strip()
    )
    has_tp = "tp" in listed.layout
    flops = f"{row['flops']:.1%}" if "flops" in row and has_tp else "-"
    collectives = row["collectives"] if "collectives" in row and has_tp else "-"
    cells = (
        listed.name,
        source,
        listed.layout.replace(" ", " · "),
        flops,
        collectives,
        result(row).replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _version(listed: Listed, row: dict[str, Any]) -> str:
    """The one that was verified, from the row; the row has it even if the package is gone since."""
    return (row.get("version") or listed.version or "").partition("+")[0]

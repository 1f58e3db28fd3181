"""The result of a part: a table of figures, and whether each is within its reach."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

RESULTS = Path(__file__).parents[1] / "RESULTS.md"


@dataclass
class Table:
    """Rows of one part. ``failed``: the figures out of reach, in words."""

    part: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, *values: object) -> None:
        assert len(values) == len(self.columns), f"{len(values)} values for {len(self.columns)} columns"
        self.rows.append(tuple(shown(value) for value in values))

    def hold(self, what: str, value: float, limit: float) -> None:
        """Note a failure if ``value`` is above ``limit``, or NaN."""
        if not value <= limit:
            self.failed.append(f"{what}: {shown(value)}, at most {shown(limit)}")

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return text + "".join(f"\n\nFAILED {what}" for what in self.failed)


def shown(value: object) -> str:
    """A figure for eyes: four digits; true and false as yes and no; nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{platform.machine()}, no GPU"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"


def versions() -> str:
    import transformers

    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (
        f"torch {torch.__version__}{cuda}, transformers {transformers.__version__}, Python {platform.python_version()}"
    )


def section(table: Table, device: torch.device, seconds: float) -> str:
    """A part in the form of RESULTS.md."""
    about = f"{date.today().isoformat()}, {hardware(device)}; {versions()}; {seconds:.0f} s"
    return f"\n## On a GPU: {table.part}\n\n`python benchmarks/gpu.py {table.part}`: {about}.\n\n{table.markdown()}\n"

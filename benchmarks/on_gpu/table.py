"""The result of a part: tables of figures, whether numbers are right, and which forecasts missed."""

import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date

import torch


@dataclass
class Table:
    """Rows of one part. ``failed``: numbers that are wrong, in words; ``missed``: forecasts and speeds out of reach.

    ``part``: its name, and behind a colon that of one of its tables.
    """

    part: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, *values: object) -> None:
        assert len(values) == len(self.columns), f"{len(values)} values for {len(self.columns)} columns"
        self.rows.append(tuple(shown(value) for value in values))
        print(f"{self.part}: {' | '.join(self.rows[-1])}", file=sys.stderr, flush=True)  # for a part that is ended

    def hold(self, what: str, value: float, limit: float) -> None:
        """Note a failure if ``value``, a number that is right or wrong, is above ``limit``, or NaN."""
        if not value <= limit:
            self.failed.append(f"{what}: {shown(value)}, at most {shown(limit)}")

    def expect(self, what: str, value: float, limit: float) -> None:
        """The same of a forecast or a speed, which does not make the part fail."""
        if not value <= limit:
            self.missed.append(f"{what}: {shown(value)}, at most {shown(limit)}")

    def markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = [f"FAILED {what}" for what in self.failed] + [f"MISSED {what}" for what in self.missed]
        return "\n\n".join([text, *notes])


def tables_of(returned: Table | Iterable[Table]) -> Iterable[Table]:
    """A part returns one table, or yields each as it ends."""
    return (returned,) if isinstance(returned, Table) else returned


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
    command = f"python benchmarks/gpu.py {table.part.partition(':')[0]}"
    return f"\n### On a GPU: {table.part}\n\n`{command}`: {about}.\n\n{table.markdown()}\n"

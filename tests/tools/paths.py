"""Where the repository, the oracles and the goldens lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORACLES = ROOT / "tests" / "oracles"
GOLDEN = ROOT / "tests" / "golden"

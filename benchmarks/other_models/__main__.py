"""Verify the models of the catalogue, one after another: `python -m benchmarks.other_models [NAME…] [--markdown FILE]`.

Names are parts of a model's name or of its `build`, such as `timm`, `own_` or `from_litgpt:llama3`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.other_models.catalogue import CATALOGUE, Listed
from benchmarks.other_models.processes import rows_of
from benchmarks.other_models.table import line, markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a name or of build; all without")
    parser.add_argument("--results", type=Path, help="keep what was seen as JSON in this file, beside what it holds")
    parser.add_argument("--markdown", type=Path, help="write the table of all results to this file")
    arguments = parser.parse_args()
    seen: dict[str, Any] = {}
    if arguments.results and arguments.results.exists():
        seen = json.loads(arguments.results.read_text())
    for listed, row in rows_of(chosen(arguments.names)):
        seen[listed.build] = row
        print(line(listed, row), flush=True)
        if arguments.results:
            arguments.results.write_text(json.dumps(seen, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(markdown(seen))
    known = [seen[listed.build]["result"] for listed in CATALOGUE if listed.build in seen]
    print(", ".join(f"{known.count(result)} {result}" for result in dict.fromkeys(known)))


def chosen(names: list[str]) -> list[Listed]:
    """Those with one of the names as a part, in the order of the names."""
    found = [listed for name in names or [""] for listed in CATALOGUE if name in listed.name or name in listed.build]
    return list({listed.build: listed for listed in found}.values())


if __name__ == "__main__":
    main()

"""The command ``meshwright``, also ``python -m meshwright``. It first looks for foreign packages with names of ours."""

from __future__ import annotations

import sys

from meshwright.shadow import refuse_shadows


def main() -> None:
    try:
        refuse_shadows()
    except ImportError as error:
        print(f"ImportError: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    import importlib

    importlib.import_module("runtime.cli").main()


if __name__ == "__main__":
    main()

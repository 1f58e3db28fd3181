"""The command ``meshwright``, also ``python -m meshwright``. It first looks for foreign packages with names of ours."""

import os
import sys

from meshwright.shadow import refuse_shadows

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_streams() -> None:
    """Streams that were closed (``>&-``) lead nowhere, and no file of ours gets their descriptors."""
    for descriptor, (name, mode) in enumerate(STREAMS):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - until the process ends


def main() -> None:
    open_streams()
    try:
        refuse_shadows()
    except ImportError as error:
        print(f"ImportError: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    import importlib

    importlib.import_module("runtime.cli").main()


if __name__ == "__main__":
    main()

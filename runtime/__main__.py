"""``python -m runtime`` is the command ``meshwright``, for environments without an installed script."""

from runtime.cli import main

main()

"""``python -m runtime`` is the command ``meshwright``, where nothing is installed on the path."""

from runtime.cli import main

main()

"""``python -m horo_lite.cli``: the command where no console script is installed."""

from horo_lite.cli.main import main

main(prog_name="horo-lite")

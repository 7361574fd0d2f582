"""`python -m d3engine` is the command `d3engine`."""

from d3engine.cli import main

main()

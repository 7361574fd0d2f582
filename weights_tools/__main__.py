"""Lets the tools run before the rest of the engine is there: `python -m d3engine.weights_tools`."""

from d3engine.weights_tools.cli import app

if __name__ == "__main__":
    app(prog_name="python -m d3engine.weights_tools")

"""A sample as text: coloured by depth on a terminal, and plain elsewhere."""

from __future__ import annotations

from itertools import groupby

from d3engine.analysis.sample import Sample
from d3engine.cli.terminal import DepthColours, Writer, new_console


def show_sample(result: Sample) -> None:
    """Coloured on a terminal; elsewhere the text alone, and the layers of its tokens below."""
    console = new_console()
    writer, text = Writer(console, wrap=True, indent="  "), Writer(console, wrap=True)
    colours = DepthColours(result.depths, console)
    prompt = None
    for one in result.answers:
        if one.prompt != prompt:
            prompt = one.prompt
            text.write_words("Prompt:")
            writer.write_words(prompt)
        text.end_line()
        text.write_words(one.heading(result.num_layers))
        for place, token in enumerate(one.tokens):
            writer.write(token.text if place else token.text.lstrip(" "), colours.style(token.depth))
        writer.end_line()
        if not colours.enabled:
            runs = [(depth, len(list(group))) for depth, group in groupby(token.depth for token in one.tokens)]
            words = ", ".join(f"{depth} x {count}" if count > 1 else f"{depth}" for depth, count in runs)
            writer.write_words(f"Layers run by each token: {words}.")
        text.end_line()
    colours.legend(result.num_layers)

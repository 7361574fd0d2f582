"""A sample of answers as one HTML page or as text, each token coloured by its depth."""

from __future__ import annotations

from html import escape

from d3engine.cli.terminal import DepthColours, Writer, layers_by_token, new_console, safe_text
from d3engine.research.analysis.sample import Guess, Sample, SampleAnswer, SampleToken
from d3engine.research.plots import depth_colours


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
            writer.write_words(layers_by_token(token.depth for token in one.tokens))
        text.end_line()
    colours.legend(result.num_layers)


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem 12rem; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
.prompt, .answer { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.prompt { border-left: 3px solid #888; padding-left: .8rem; }
.answer { line-height: 2.1; }
.token { position: relative; padding: .15rem 0; border-radius: .2rem; cursor: help; }
.token:hover, .token:focus { outline: 2px solid #d55e00; outline-offset: 1px; z-index: 2; }
.guesses { display: none; position: fixed; left: 50%; bottom: 1rem; transform: translateX(-50%); z-index: 3;
  width: max-content; max-width: calc(100vw - 1rem); box-sizing: border-box; background: Canvas; color: CanvasText;
  border: 1px solid #888; border-radius: .3rem; padding: .4rem .7rem; box-shadow: 0 2px 8px #0006;
  font: 14px/1.6 system-ui, sans-serif; white-space: normal; }
.token:hover .guesses, .token:focus .guesses { display: block; }
.row { display: grid; grid-template-columns: 9em repeat(3, minmax(6.5em, 1fr)); column-gap: .4em; white-space: pre; }
@media (max-width: 30rem) { .guesses { font-size: 11px; } }
.guesses code { background: #8883; padding: 0 .2rem; }
.passed { opacity: .7; }
.legend span { padding: .15rem .5rem; margin-right: .15rem; border-radius: .2rem; }
"""


def sample_page(sample: Sample, title: str) -> str:
    """The page as text; `title` is plain text too."""
    colours = depth_colours(sample.depths)
    styles = {depth: f"background:{back};color:{letters}" for depth, (back, letters) in colours.items()}
    legend = "".join(f'<span style="{style}">{depth}</span>' for depth, style in styles.items())
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="legend">Layers run per token, of {sample.num_layers}: {legend}</p>',
        "<p>Point at a token, or tab to it, for what the model would have said after fewer layers.</p>",
    ]
    prompt = None
    for answer in sample.answers:
        if answer.prompt != prompt:
            prompt = answer.prompt
            parts.append(f'<h2>Prompt</h2><div class="prompt">{escape(safe_text(prompt))}</div>')
        parts.append(_answer(answer, sample.num_layers, styles))
    return "\n".join([*parts, "</body></html>", ""])


def _answer(answer: SampleAnswer, num_layers: int, styles: dict[int, str]) -> str:
    tokens = "".join(_token(token, styles[token.depth], num_layers) for token in answer.tokens if token.text)
    return f'<h2>{escape(answer.heading(num_layers))}</h2><div class="answer">{tokens}</div>'


def _token(token: SampleToken, style: str, num_layers: int) -> str:
    rows = "".join(map(_guess, token.guesses))
    heading = f"<code>{_visible(token.text)}</code> ran {token.depth} of {num_layers} layers; likeliest after"
    guesses = f'<span class="guesses">{heading}<br>{rows}</span>'
    return f'<span class="token" tabindex="0" style="{style}">{escape(safe_text(token.text))}{guesses}</span>'


def _guess(guess: Guess) -> str:
    kind, place = ("ran", "") if guess.ran else ("passed", ", skipped")
    cells = "".join(f"<span><code>{_visible(text)}</code> {_percent(chance)}</span>" for text, chance in guess.top)
    return f'<span class="{kind} row"><span>layer {guess.layer}{place}</span>{cells}</span>'


def _percent(chance: float) -> str:
    """A chance in whole percent; one that is not nothing is not shown as nothing."""
    return "&lt;1%" if chance < 0.005 else f"{chance:.0%}"


def _visible(text: str) -> str:
    """A token's text as HTML, with spaces and line feeds that can be seen."""
    return escape(safe_text(text)).replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5") or "\u2205"

"""An evaluation as one page of HTML that needs nothing else: no script, no font, no picture from anywhere.

The one idea: the page shows the same tables as the terminal, and above them each benchmark's policies as points with
their intervals over the layers they ran, drawn as SVG by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from d3engine.evaluation.report import Result, Table

STYLE = """
:root { color-scheme: light dark; --line: #8888; --mark: #0072b2; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt { opacity: .7; } dd { margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:nth-child(even) { background: var(--soft); } p.note { font-size: .9rem; opacity: .8; margin: .4rem 0; }
svg { max-width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .mark { stroke: var(--mark); fill: var(--mark); stroke-width: 2; }
"""

WIDTH, LABEL, ROW, TOP = 960, 430, 30, 14
"""Pixels: of the chart, of its labels, of a policy's row, above the first."""


def page(title: str, facts: Mapping[str, str], results: Sequence[Result], tables: Sequence[Table]) -> str:
    """The whole page; everything that came from outside is escaped."""
    said = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    charts = "".join(_chart(result) for result in results)
    body = "".join(_table(table) for table in tables)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<dl>{said}</dl>\n{charts}{body}</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{notes}\n"
    )


def _chart(result: Result) -> str:
    """Exact match of each policy with its interval, from 0 to 100 %."""
    height = TOP + ROW * len(result.scores) + 26
    bottom = height - 26
    parts = []
    for percent in range(0, 101, 20):
        x = _x(percent / 100)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{height - 8}" text-anchor="middle">{percent} %</text>')
    for number, (title, score) in enumerate(zip(result.titles, result.scores, strict=True)):
        y = TOP + ROW * number + ROW // 2 - 4
        label = f"{title} ({score.realised_mean_layers:.1f} layers)"
        low, high = _x(score.interval.low), _x(score.interval.high)
        parts.append(f'<text x="{LABEL - 14}" y="{y + 5}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<line class="mark" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="mark" cx="{_x(score.accuracy)}" cy="{y}" r="5"/>')
    name = escape(result.benchmark.name)
    caption = f"{name}: exact match with its 95 % interval, by depth (layers a token, realised)"
    return (
        f'<h2>{caption}</h2>\n<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{caption}">{"".join(parts)}</svg>\n'
    )


def _x(share: float) -> float:
    """Where a share of 0 to 1 stands, in pixels."""
    return round(LABEL + share * (WIDTH - LABEL - 30), 1)

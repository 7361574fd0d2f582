"""An evaluation as one page of HTML that needs nothing else: no script, no font, no picture from anywhere.

The one idea: the page shows the same tables as the terminal, and above them each benchmark's policies as points with
their intervals over the layers they ran, drawn as SVG by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from textwrap import wrap

from d3engine.evaluation.report import Chart, Table

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

WIDTH, MARGIN, LINE, BAR, AXIS = 960, 24, 18, 26, 26
"""Pixels: of the chart, beside the scale, of a line of a label, of the bar below a label, of the scale's own text."""

LABEL = 110
"""Letters in a line of a label: as many as are surely narrower than the chart."""


def page(title: str, facts: Mapping[str, str], charts: Sequence[Chart], tables: Sequence[Table]) -> str:
    """The whole page; everything that came from outside is escaped."""
    said = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    drawn = "".join(_chart(chart) for chart in charts)
    body = "".join(_table(table) for table in tables)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<dl>{said}</dl>\n{drawn}{body}</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{notes}\n"
    )


def _chart(chart: Chart) -> str:
    """Each value with its interval on a scale from 0 to 100 %, below its label, however long that is."""
    marks, y = [], 0
    for label, value, interval in chart.points:
        for line in wrap(label, LABEL):
            y += LINE
            marks.append(f'<text x="{MARGIN}" y="{y}">{escape(line)}</text>')
        middle = y + BAR // 2
        low, high = _x(interval.low), _x(interval.high)
        marks.append(f'<line class="mark" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>')
        marks.append(f'<circle class="mark" cx="{_x(value)}" cy="{middle}" r="5"/>')
        y += BAR
    grid = []
    for percent in range(0, 101, 20):
        x = _x(percent / 100)
        grid.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{y}"/>')
        grid.append(f'<text x="{x}" y="{y + LINE}" text-anchor="middle">{percent} %</text>')
    caption, height = escape(chart.caption), y + AXIS
    return (
        f'<h2>{caption}</h2>\n<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{caption}">{"".join(grid + marks)}</svg>\n'
    )


def _x(share: float) -> float:
    """Where a share of 0 to 1 stands, in pixels."""
    return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)

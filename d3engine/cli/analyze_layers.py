"""`d3engine analyze layers`: what the next token loses by every window of skipped layers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.engine_options import Model, Options, model_directory, takes_engine
from d3engine.cli.observing import AsJson, Limit, Png, observe, settings_bar, takes_questions
from d3engine.cli.output_files import printing_last
from d3engine.errors import require_integer

if TYPE_CHECKING:
    from d3engine.analysis.layers import LayerLoss


@takes_questions
@takes_engine
def layers(
    engine_options: Options,
    asking: Options,
    model: Model = "demo",
    limit: Limit = 12,
    widths: Annotated[
        list[int] | None,
        typer.Option("--width", help="Layers of a window; may be repeated (1, 2, 4 and 8, up to a third of all)."),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option("--from-step", help="Step to skip from; may be repeated (1 and 32)."),
    ] = None,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Which layers the model can spare, and from which step on: the next token's loss by every window of layers.

    Every window is skipped in the same text, the model's own answers or with --reference-answers those of the task, and
    the next token's distribution is compared with full depth's: no task has to be solved.
    """
    from d3engine.analysis.layers import measure_layers, passes
    from d3engine.model.config import ModelConfig

    total = ModelConfig.from_directory(model_directory(model)).num_layers
    chosen = sorted(set(widths or [width for width in (1, 2, 4, 8) if width == 1 or 3 * width <= total]))
    from_steps = sorted(set(steps or [1, 32]))
    for width in chosen:
        require_integer("--width", width, 1, total - 1)
    for step in from_steps:
        require_integer("--from-step", step, 1)
    seen = observe(model, engine_options, asking, limit, png)
    longest = max(len(one.token_ids) for one in seen.answered)
    reached = [step for step in from_steps if step < longest] if steps is None else from_steps
    count = len(seen.answered) * passes(total, chosen, reached)
    with settings_bar("layers", count, "window") as progress:
        result = measure_layers(seen.observer, seen.answered, chosen, reached, progress)
    with printing_last(partial(_show, result, as_json)):
        if png:
            from d3engine.analysis.layer_picture import plot_layers

            plot_layers(result, png, f"{Path(model).name}: loss of the next token by the window of layers skipped")


def _show(result: LayerLoss, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from d3engine.cli.terminal import print_table

    for place, table in enumerate((result.table(), result.position_table())):
        typer.echo("", nl=place > 0)
        print_table(table.title, table.header, table.rows)

"""`d3engine analyze kinds`: which kinds of tokens need many layers, and which a policy costs most."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from d3engine.cli.depth_options import Depth, takes_depth
from d3engine.cli.engine_options import Model, Options, model_directory, takes_engine
from d3engine.cli.observing import AsJson, Limit, Png, observe, policy_or_own, settings_bar, takes_questions
from d3engine.cli.output_files import printing_last
from d3engine.errors import require
from d3engine.progress import hides_bars

if TYPE_CHECKING:
    from d3engine.analysis.by_kind import ByKind


@takes_questions
@takes_depth
@takes_engine
def kinds(
    engine_options: Options,
    asking: Options,
    depth: Depth,
    model: Model = "demo",
    limit: Limit = 50,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """Digits, "####", line breaks, words ...: layers until settled, and what a policy costs each (the paper's limits).

    Steps are gathered by the token that they yield, and by the one that they are fed with, whose kind is known
    beforehand. The text is given: the model's own answers, or with --reference-answers those of the task. Without
    --depth the policy is the model's own (d3.json).
    """
    from d3engine.analysis.answers import answer
    from d3engine.analysis.by_kind import measure_by_kind
    from d3engine.analysis.kinds import TokenKinds
    from d3engine.depth.words import policy_in_words
    from d3engine.model.config import ModelConfig

    policy = policy_or_own(model, depth)
    total = ModelConfig.from_directory(model_directory(model)).num_layers
    schedule = policy.schedule(total)
    is_plain = schedule.is_nested and policy.exit_rule(total) is None and not policy.drafts
    require(is_plain, "--depth", policy.name, "a policy whose layers are known before and stay skipped, such as d3")
    seen = observe(model, engine_options, asking, limit, png)
    require(seen.engine.tokenizer is not None, "model", model, "a model with a tokenizer")
    assert seen.engine.tokenizer is not None
    decoded = None
    if seen.asked.references is None:
        progress = sys.stderr.isatty() and not hides_bars()
        asked = seen.asked
        decoded = answer(seen.engine, asked.prompts, asked.max_tokens, policy, stop=asked.stop, progress=progress)
    known = TokenKinds(seen.engine.tokenizer, seen.engine.config.eos_token_ids)
    with settings_bar("kinds", len(seen.answered), "answer") as done:
        words = policy_in_words(policy)
        result = measure_by_kind(seen.observer, known, seen.answered, schedule, words, decoded, done)
    with printing_last(partial(_show, result, as_json)):
        if png:
            from d3engine.analysis.kind_picture import plot_kinds

            plot_kinds(result, png, f"{Path(model).name}: what kinds of tokens need, and what they lose")


def _show(result: ByKind, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from d3engine.analysis.by_kind import SIDES
    from d3engine.cli.terminal import print_table

    for place, side in enumerate(SIDES):
        table = result.table(side)
        typer.echo("", nl=place > 0)
        print_table(table.title, table.header, table.rows)

"""`d3engine bridge measure`: what policies lose against full depth as they decode, with and without bridges."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from d3engine.cli.bridge_texts import (
    BridgesFile,
    Data,
    PromptTokens,
    Task,
    Text,
    TextOptions,
    TextTokens,
    bridges_of,
    bridges_path,
    open_passage,
    progress_bar,
    read_own_bridges,
    schedule_of,
)
from d3engine.cli.engine_options import Model, Options, takes_engine
from d3engine.errors import NOTHING, require


@takes_engine
def measure_command(
    engine_options: Options,
    model: Model = "demo",
    bridges: BridgesFile = None,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", help='A policy with its options, "d3 alpha=0.9 start=0.8"; may be repeated.'),
    ] = None,
    text: Text = None,
    task: Task = None,
    data: Data = None,
    texts: Annotated[int, typer.Option("--texts", help="Texts to measure on at most.")] = 8,
    text_tokens: TextTokens = 256,
    prompt_tokens: PromptTokens = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read texts at the depths that each policy has for them, and compare every next-token distribution with full
    depth's, by generation step. Each policy stands there twice: its windows skipped as they are, and bridged.
    """
    asked = TextOptions(text or [], task, data, None, texts, 1, text_tokens, prompt_tokens)
    asked.check()
    require(bool(policies), "--policy", NOTHING, "given at least once")

    from d3engine.bridges.decoded import Candidate, measure_decoded

    engine, passage = open_passage(model, engine_options)
    path = bridges_path(model, bridges)
    own = read_own_bridges(engine, path, passage.device)
    candidates = []
    for policy in policies or ():
        schedule = schedule_of(policy, engine.config.num_layers)
        candidates.append(Candidate(policy, schedule, None))
        candidates.append(Candidate(f"{policy}, bridged", schedule, bridges_of(schedule, own, path)))
    read = asked.read_one_kind(engine, engine_options.get("seed", 0))
    with progress_bar("measure", "text", len(read)) as bar:
        result = measure_decoded(passage, candidates, read, prompt_tokens, lambda: bar.update() and None)
    require(result.policies[0].positions > 0, "--text", asked.source, "texts longer than --prompt-tokens by two tokens")
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from d3engine.cli.terminal import print_table

    for table in (result.table(), result.step_table()):
        print_table(table.title, table.header, table.rows)

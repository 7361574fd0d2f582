"""`d3engine bridge measure`: what policies lose against full depth as they decode, with and without bridges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.bridge_texts import (
    ANSWER_TOKENS,
    BridgesFile,
    Data,
    MaxTokens,
    Prompts,
    PromptTokens,
    Task,
    Text,
    TextOptions,
    TextTokens,
    bridges_of,
    bridges_path,
    open_passage,
    policy_of,
    progress_bar,
    read_own_bridges,
    schedule_of,
)
from d3engine.cli.engine_options import Model, Options, takes_engine
from d3engine.errors import NOTHING, require

if TYPE_CHECKING:
    from d3engine.bridges.judging import Reading
    from d3engine.bridges.own_answers import OwnComparison
    from d3engine.engine import Engine


@takes_engine
def measure_command(
    engine_options: Options,
    model: Model = "demo",
    bridges: BridgesFile = None,
    policies: Annotated[
        list[str] | None,
        typer.Option("--depth", help='A policy with its options, "d3 alpha=A start=S"; may be repeated.'),
    ] = None,
    text: Text = None,
    task: Task = None,
    prompts: Prompts = None,
    data: Data = None,
    texts: Annotated[int, typer.Option("--texts", help="Texts to measure on at most.")] = 8,
    text_tokens: TextTokens = 256,
    prompt_tokens: PromptTokens = None,
    max_tokens: MaxTokens = ANSWER_TOKENS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read texts at the depths that each policy has for them, and compare every next-token distribution with full
    depth's, by generation step. Each policy stands there twice: its windows skipped as they are, and bridged.

    With --prompts, or --task chat, each policy also answers by itself, and what it keeps of full depth's answers is
    counted.
    """
    asked = TextOptions(text or [], task, prompts, data, texts, text_tokens, prompt_tokens, max_tokens)
    asked.check()
    require(bool(policies), "--depth", NOTHING, "given at least once")

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
        result = measure_decoded(passage, candidates, read, lambda: bar.update() and None)
    require(result.policies[0].positions > 0, "--text", asked.source, "texts longer than their prompts by two tokens")
    answers = _answered(engine, policies or [], path, read) if asked.are_chats else None
    if as_json:
        told = {} if answers is None else {"own_answers": answers.as_dict()}
        typer.echo(json.dumps({**result.as_dict(), **told}, indent=2))
        return
    from d3engine.cli.terminal import print_table

    for table in (result.table(), result.step_table(), *([] if answers is None else [answers.table()])):
        print_table(table.title, table.header, table.rows)


def _answered(engine: Engine, policies: Sequence[str], bridges: Path, readings: Sequence[Reading]) -> OwnComparison:
    """What each policy answers itself to the prompts of full depth's answers, skipped and bridged."""
    from d3engine.bridges.own_answers import OwnAnswers, OwnComparison, own_answers

    kept = [one for one in readings if len(one.token_ids) > one.prompt_length]
    both = []
    for words in policies:
        both.append((words, policy_of(words)))
        both.append((f"{words}, bridged", policy_of(words, f"bridges={bridges}")))
    found = []
    with progress_bar("answers", "policy", len(both)) as bar:
        for name, policy in both:
            found.append(OwnAnswers(name, own_answers(engine, policy, kept)))
            bar.update()
    return OwnComparison(OwnAnswers("full", [one.token_ids[one.prompt_length :] for one in kept]), found)

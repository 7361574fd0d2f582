"""`d3engine bridge chats`: conversations that a model makes up itself, written once for all that is done with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from d3engine.cli.bridge_texts import ANSWER_TOKENS
from d3engine.cli.engine_options import Model, Options, engine_arguments, takes_engine
from d3engine.cli.output_files import check_output, write_output
from d3engine.cli.verbosity import note
from d3engine.errors import require, require_integer


@takes_engine
def chats_command(
    engine_options: Options,
    out: Annotated[Path, typer.Option("--out", help="The .jsonl file to write.")],
    model: Model = "demo",
    texts: Annotated[int, typer.Option("--texts", help="Conversations at most.")] = 200,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.")] = ANSWER_TOKENS,
) -> None:
    """Write questions that the model makes up, with its greedy answers to them at full depth: a text for --text.

    What --task chat takes is the same, made anew by each command.
    """
    check_output("--out", out)
    require(out.suffix == ".jsonl", "--out", str(out), "a file whose name ends in .jsonl")
    require_integer("--texts", texts, 1)
    require_integer("--max-tokens", max_tokens, 2)

    from d3engine.analysis.answers import answer
    from d3engine.bridges.own_chats import made_up_prompts
    from d3engine.engine import Engine

    with Engine(model, **engine_arguments(model, engine_options)) as engine:
        asked = made_up_prompts(engine, texts, 2 * engine_options.get("seed", 0))
        prompts = [engine.chat_prompt([{"role": "user", "content": one}]) for one in asked]
        answers = [one.text for one in answer(engine, prompts, max_tokens)]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": text}]})
        for one, text in zip(asked, answers, strict=True)
    ]
    write_output("--out", out, "\n".join(lines) + "\n")
    note(f"{len(lines)} conversations written to {out}")

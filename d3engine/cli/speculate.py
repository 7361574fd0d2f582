"""`d3engine speculate`: which drafts pay for your prompts."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.commands import AsJson, check_output, new_app, note, print_table, tell_verdict, write_output
from d3engine.cli.engine_options import COMPUTING, Model, Options, engine_arguments, model_directory, takes_engine
from d3engine.depth.policy import MAX_DRAFT_LENGTH
from d3engine.errors import integer_in, require, require_integer, require_number
from d3engine.utils.files import beside
from d3engine.utils.progress import progress_bar

if TYPE_CHECKING:
    from d3engine.research.speculation import Candidate, Measured, TuneReport

app = new_app(help="Find the drafts that pay for your prompts.", no_args_is_help=True)

MAX_LENGTHS = 8
MAX_AT_ONCE = 256
SHOWN_POSITIONS = 4


@app.command("tune")
@partial(takes_engine, names=(*COMPUTING, "max_model_len", "kv_cache_memory_bytes", "seed"))
def tune_command(
    engine_options: Options,
    model: Model = "demo",
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", "--draft", help="A smaller model of the same vocabulary, to be tried too."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A prompt on each line, or a .json list, asked by the chat template."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Prompts of that file at most.")] = 16,
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of a draft to be tried, with commas.")] = "2,4,8",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each answer at most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    at_once: Annotated[int, typer.Option("--at-once", help="Prompts answered in one batch.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print which drafter and draft length answer your prompts fastest, and the --speculative-config for it.

    Each drafter answers all prompts with each length, and with as many tokens as pay. Without --prompts these are four
    built-in ones. The exit code is 1 where a token differs from the answers without drafts.
    """
    tried = _read_lengths(lengths)
    require_integer("--limit", limit, 1)
    require_integer("--max-tokens", max_tokens, 1)
    require_number("--temperature", temperature, 0, 100)
    require_integer("--at-once", at_once, 1, MAX_AT_ONCE)
    arguments = engine_arguments(model, engine_options)
    from d3engine.research.analysis.answers import read_prompts
    from d3engine.research.speculation import BUILT_IN, candidates_of, tune

    asked = BUILT_IN if prompts is None else read_prompts(prompts, limit)
    passes = 2 + len(list(candidates_of(tried, draft_model)))
    with progress_bar(None, "prompt", passes * len(asked)) as bar:

        def done(candidate: Candidate, count: int) -> None:
            bar.set_description(" ".join(_name(candidate)))
            bar.update(count)

        found = tune(
            model,
            arguments,
            draft_model=draft_model,
            prompts=asked,
            lengths=tried,
            max_tokens=max_tokens,
            temperature=temperature,
            at_once=at_once,
            done=done,
        )
    tell_verdict(found, _print, as_json)


@app.command("tokens")
def tokens_command(
    draft_model: Annotated[str, typer.Argument(metavar="DRAFT_MODEL", help="The draft model, named as MODEL is.")],
    texts: Annotated[
        list[Path],
        typer.Option(
            "--text",
            help='Texts like your answers; may be repeated: plain text, or .jsonl with "text", "messages", or '
            '"question" and "answer" on each line.',
        ),
    ],
) -> None:
    """Let a draft model propose the tokens that are frequent in your texts, by a file beside its weights.

    A draft model of 65,536 tokens or more proposes 32,768 of them on a CPU: the frequent ones of English and code, or
    those of this file.
    """
    from d3engine.engine.draft_model import DRAFT_TOKENS_FILE, DRAFT_VOCABULARY, head_tokens
    from d3engine.model.config import ModelConfig
    from d3engine.research.bridges.texts import TextReader
    from d3engine.text.tokenizer import load_tokenizer

    directory = model_directory(draft_model)
    config = ModelConfig.from_directory(directory)
    allowed = f"a model of {2 * DRAFT_VOCABULARY:,} tokens at least, since others propose all of theirs"
    require(config.vocab_size >= 2 * DRAFT_VOCABULARY, "DRAFT_MODEL", draft_model, allowed)
    target = beside(directory, DRAFT_TOKENS_FILE)
    check_output("DRAFT_MODEL", target)
    reader = TextReader(directory, load_tokenizer(directory), sys.maxsize)
    counts = Counter(token for path in texts for line in reader.lines(path, "--text") for token in reader.encode(line))
    require(counts.total() > 0, "--text", [str(path) for path in texts], "texts with tokens")

    def share() -> str:
        known = head_tokens(config, directory)
        assert known is not None
        return f"{sum(counts[token] for token in known.tolist()) / counts.total():.1%}"

    before = share()
    write_output("DRAFT_MODEL", target, json.dumps([token for token, _ in counts.most_common(DRAFT_VOCABULARY)]))
    note(f"{target} written; of the texts' tokens the draft model can propose {share()}, before {before}")


def _read_lengths(given: str) -> list[int]:
    allowed = f"1 to {MAX_LENGTHS} different integers from 1 to {MAX_DRAFT_LENGTH}, such as 2,4,8"
    words = [word.strip() for word in given.split(",")]
    found = [number for word in words if (number := integer_in(word)) is not None]
    are_right = all(1 <= length <= MAX_DRAFT_LENGTH for length in found)
    require(are_right and len(set(found)) == len(words) <= MAX_LENGTHS, "--lengths", given, allowed)
    return found


def _name(candidate: Candidate) -> tuple[str, str]:
    if candidate.config is None:
        return candidate.drafter, ""
    return candidate.drafter, "as pays" if candidate.length is None else str(candidate.length)


def _print(found: TuneReport) -> None:
    header = ("drafter", "length", "tokens/verification", "accepted", "by position", "tokens/s", "gain", "equal")
    rows = [_row(found, one) for one in (found.before, *found.candidates, found.after)]
    best = found.best
    if best.config is None:
        said = "Best: no drafts. None of these is faster than both passes without."
    else:
        said = f"Best: --speculative-config {shlex.quote(json.dumps(best.config))}"
    notes = [
        f"By position: the share of drafts whose 1st, 2nd, ... token was accepted, up to the {SHOWN_POSITIONS}th.",
        said,
    ]
    if found.draft_model is None:
        notes.insert(1, "Without --draft-model, no model has drafted.")
    print_table(f"{found.model}: {found.prompts} prompts, {found.before.tokens} tokens a pass", header, rows, notes)


def _row(found: TuneReport, one: Measured) -> tuple[str, ...]:
    per, places = one.tokens_per_verification, one.acceptance_by_position[:SHOWN_POSITIONS]
    return (
        *_name(one.candidate),
        "" if per is None else f"{per:.2f}",
        f"{one.accepted / one.drafted:.0%}" if one.drafted else "",
        " ".join(f"{share:.0%}" for share in places),
        f"{one.tokens_per_second:.1f}",
        f"{found.gain(one):.2f}",
        f"{one.equal}/{one.answers}",
    )

"""`d3engine verify`: whether answers keep their bits in a batch, in chunks, preempted, cached and drafted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.commands import new_app, print_table, tell_verdict
from d3engine.cli.engine_options import COMPUTING, Model, Options, engine_arguments, takes_engine
from d3engine.errors import require_integer
from d3engine.utils.progress import progress_bar

if TYPE_CHECKING:
    from d3engine.research.equality import EqualityReport

app = new_app()


@app.command()
@partial(takes_engine, names=COMPUTING)  # the others are what the checks vary
def verify(
    engine_options: Options,
    model: Model = "demo",
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", help="A smaller model of the same vocabulary, for the checks of drafts."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each answer.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all answers.")] = False,
) -> None:
    """Check that answers are the same bits alone, in a batch, in chunks, preempted, over a cached prefix and drafted.

    Built-in prompts, greedy and sampled, at full depth. Prints a check a row and a SHA-256 over tokens and
    log-probabilities, which a machine with the same instruction set reproduces. The exit code is 1 where a bit differs.
    """
    require_integer("--max-tokens", max_tokens, 17, 512)  # each answer grows by a block, so that some are preempted
    arguments = engine_arguments(model, engine_options)
    from d3engine.research.equality import checks_for, verify_equality

    with progress_bar(None, "check", 1 + len(checks_for(draft_model))) as bar:

        def done(name: str) -> None:
            bar.set_description(name)
            bar.update()

        found = verify_equality(model, arguments, draft_model=draft_model, max_tokens=max_tokens, done=done)
    tell_verdict(found, _print, as_json)


def _print(found: EqualityReport) -> None:
    rows = [
        (result.name, f"{result.tokens}", result.evidence, result.difference or "equal") for result in found.results
    ]
    notes = [
        ", ".join(f"{name} {value}" for name, value in found.computed_by.items()),
        f"SHA-256 of tokens and log-probabilities: {found.sha256}",
    ]
    if found.draft_model is None:
        notes.insert(0, "Without --draft-model, drafts were not checked.")
    print_table(
        f"{found.model}: bitwise equal to each request alone?", ("check", "tokens", "evidence", "bits"), rows, notes
    )

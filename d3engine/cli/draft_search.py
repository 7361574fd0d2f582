"""`d3engine calibrate --draft`: search the attentions and MLPs that a draft leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from d3engine.cli.commands import ExitCode, note, print_json, print_table
from d3engine.cli.engine_options import Options, open_engine, sampling_params
from d3engine.depth import FullDepth
from d3engine.errors import InvalidValueError, require, require_integer
from d3engine.utils.progress import progress_bar
from d3engine.utils.version import __version__

if TYPE_CHECKING:
    from d3engine.research.calibration.draft_search import Drafted
    from d3engine.research.calibration.tasks import CalibrationTask

USUAL_PROMPTS, USUAL_TOKENS = 8, 32
"""The authors' search answers eight prompts with 32 tokens each."""


ScoreName = StrEnum("ScoreName", ["weights", "time"])
"""The values of `--draft-by`."""


def find_draft(
    model: str,
    directory: Path,
    engine_options: Options,
    asked: CalibrationTask,
    target: Path,
    *,
    trials: int,
    score: ScoreName,
    limit: int | None,
    max_tokens: int | None,
    as_json: bool,
    refused: Mapping[str, Any],
) -> ExitCode:
    """Search, tell what came of it, and write the draft if it is worth its while; `refused` are options that say
    nothing here, with the values that were given."""
    from d3engine.model.expected_tensors import fingerprint
    from d3engine.research.calibration.draft_search import best_draft, score_draft, search_draft
    from d3engine.research.calibration.report import write_policy_file
    from d3engine.research.calibration.scoring import Part
    from d3engine.research.evaluation.chat_form import prompt_of

    for flag, value in refused.items():
        require(not value, flag, value, "absent beside --draft, which searches no depth of answers")
    require_integer("--draft", trials, 1)
    count = require_integer("--limit", USUAL_PROMPTS if limit is None else limit, 1)
    most = require_integer("--max-tokens", USUAL_TOKENS if max_tokens is None else max_tokens, 2)
    parts = asked.parts(count, count)
    engine = open_engine(model, engine_options, FullDepth())
    params = sampling_params(engine, {"max_tokens": most, "temperature": 0.0, "stop": list(asked.stop) or None})
    searched, fresh = (
        partial(score_draft, engine, [prompt_of(engine, question) for question in parts[part]], params)
        for part in (Part.SCREENING, Part.CERTIFICATION)
    )
    by_clock, seed = score is ScoreName.time, engine_options.get("seed", 0)
    note(f"{trials} trials of {count} answers of at most {most} tokens; {count} other questions tell what was found.")
    with progress_bar(None, "trial", trials) as bar:
        tried = search_draft(
            searched, engine.config.num_layers, trials, seed=seed, by_clock=by_clock, progress=bar.update
        )
    best = best_draft(tried, by_clock=by_clock)
    found = fresh(best.policy)
    pays = best.gain > 1 and found.gain > 1
    report = {
        "model": model,
        "task": asked.name,
        "seed": seed,
        "max_tokens": most,
        "score": score.value,
        "trials": trials,
        "different_drafts": len(tried),
        "depth": best.policy.describe(),
        "searched": as_dict(best),
        "fresh": as_dict(found),
        "pays": pays,
    }
    if pays:
        evidence = {**report, "model": None, "depth": None, "written_by": f"d3engine {__version__}"}
        evidence = {name: value for name, value in evidence.items() if value is not None}
        name = fingerprint(directory)
        content = {"depth": best.policy.describe(), "task": asked.name, "fingerprint": name, "evidence": evidence}
        try:
            write_policy_file(content, target)
        except InvalidValueError:
            print_json({**report, "written": None})  # all that is left of the work
            raise
    if as_json:
        print_json({**report, "written": str(target) if pays else None})
    else:
        _show(best, found, len(tried), target if pays else None)
    return ExitCode.DONE if pays else ExitCode.NO_SAFE_SETTING


def as_dict(found: Drafted) -> dict[str, Any]:
    """Counts and rates, ready for JSON; without times, so that the same search writes the same file."""
    return {
        "tokens": found.tokens,
        "drafted_tokens": found.drafted,
        "acceptance_rate": found.acceptance_rate,
        "tokens_per_verification": found.tokens_per_verification,
        "gain_in_weights_read": found.gain,
    }


def _show(best: Drafted, found: Drafted, different: int, written: Path | None) -> None:
    header = ("questions", "tokens", "accepted", "tokens per verification", "weights read, full depth over this")
    title = f"The best of {different} drafts"
    print_table(title, header, [_row("searched", best), _row("fresh", found)])
    typer.echo(f"Attention left out: {_layers(best.policy.skip_attention)}; MLP: {_layers(best.policy.skip_mlp)}.")
    if written is None:
        typer.echo("It reads as many weights as full depth, or more: nothing was written.")
    else:
        typer.echo(f"Written to {written}: answers are those of full depth.")


def _row(name: str, found: Drafted) -> tuple[str, ...]:
    rate, per_pass = found.acceptance_rate, found.tokens_per_verification
    accepted = "-" if rate is None else f"{rate:.1%}"
    return name, f"{found.tokens}", accepted, "-" if per_pass is None else f"{per_pass:.2f}", f"{found.gain:.3f}"


def _layers(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids)) or "none"

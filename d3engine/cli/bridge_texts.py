"""The texts that commands on bridges fit to, choose by and measure on: their options, and how they are read.

The one idea: what is measured on is never what was fitted on. It is a file of its own, or every eighth of the texts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.engine_options import Options, engine_arguments
from d3engine.errors import NOTHING, InvalidValueError, ModelFormatError, require, require_integer
from d3engine.progress import hides_bars

if TYPE_CHECKING:
    from d3engine.bridges.passage import Passage
    from d3engine.depth import Schedule
    from d3engine.engine import Engine
    from d3engine.model.bridges import Bridge, Bridges, Window

Text: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        help='Texts; may be repeated: plain text, or .jsonl with "text", "messages", or "question" and "answer" on '
        "each line.",
    ),
]
Task: TypeAlias = Annotated[
    str | None,
    typer.Option("--task", help="Or the model's own answers to a task's questions, as d3engine calibrate has it."),
]
Data: TypeAlias = Annotated[
    Path | None, typer.Option("--data", help="Folder with gsm8k/ and bbh/ to read questions from.")
]
HeldOutFile: TypeAlias = Annotated[
    Path | None, typer.Option("--held-out", help="What to measure on (every eighth of the texts).")
]
HeldOutTexts: TypeAlias = Annotated[int, typer.Option("--held-out-texts", help="Texts to measure on at most.")]
TextTokens: TypeAlias = Annotated[int, typer.Option("--text-tokens", help="Tokens of a text at most.")]
PromptTokens: TypeAlias = Annotated[
    int, typer.Option("--prompt-tokens", help="First tokens of a text, which run every layer, as prompts do.")
]
BridgesFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--bridges", help="A file of d3engine bridge fit (bridges.safetensors beside the weights)."),
]


@dataclass(frozen=True)
class TextOptions:
    """What a command was given."""

    files: Sequence[Path]
    task: str | None
    data: Path | None
    held_out: Path | None
    texts: int
    held_out_texts: int
    text_tokens: int
    prompt_tokens: int

    @property
    def source(self) -> str | list[str]:
        """Where the texts are from, for people."""
        return self.task or [path.name for path in self.files]

    def check(self, fewest: int = 1) -> None:
        """Refuse what cannot be, before any work."""
        require_integer("--texts", self.texts, fewest)
        require_integer("--held-out-texts", self.held_out_texts, 1)
        require_integer("--prompt-tokens", self.prompt_tokens, 1)
        require_integer("--text-tokens", self.text_tokens, self.prompt_tokens + 2)
        require(bool(self.files) != (self.task is not None), "--text", NOTHING, "given, or --task in its place")
        require(self.task is not None or self.data is None, "--data", self.data, "absent without --task")

    def read(self, engine: Engine, seed: int) -> tuple[list[list[int]], list[list[int]]]:
        """The texts, and others to measure on."""
        from d3engine.bridges.texts import parted, shuffled

        lines, reader = self._lines(engine, seed, self.texts + (0 if self.held_out else self.held_out_texts))
        first, other = parted(lines) if self.held_out is None else (lines, reader.lines(self.held_out, "--held-out"))
        picked = shuffled(first, self.texts, seed), shuffled(other, self.held_out_texts, seed + 1)
        return list(map(reader.encode, picked[0])), list(map(reader.encode, picked[1]))

    def read_one_kind(self, engine: Engine, seed: int) -> list[list[int]]:
        """The texts, none of them held out."""
        from d3engine.bridges.texts import shuffled

        lines, reader = self._lines(engine, seed, self.texts)
        return list(map(reader.encode, shuffled(lines, self.texts, seed)))

    def _lines(self, engine: Engine, seed: int, count: int) -> tuple[Any, Any]:
        from d3engine.bridges.texts import Line, TextReader

        reader = TextReader(engine.directory, engine.get_tokenizer(), self.text_tokens)
        if self.task is None:
            return [line for path in self.files for line in reader.lines(path, "--text")], reader
        texts = _own_answers(engine, self.task, self.data, seed, self.text_tokens, count)
        return [Line(text, "--task", Path(self.task)) for text in texts], reader


def open_passage(model: str, options: Options) -> tuple[Engine, Passage]:
    """An engine, and its weights as bridges are measured with."""
    from d3engine.analysis.answers import open_model
    from d3engine.bridges.passage import Passage

    engine, observer = open_model(model, engine_arguments(model, options))
    return engine, Passage(observer)


def bridges_path(model: str, given: Path | None) -> Path:
    """The file that is named, or the one beside the weights."""
    from d3engine.cli.engine_options import model_directory
    from d3engine.files import beside
    from d3engine.model.bridges import BRIDGES_FILE

    return beside(model_directory(model), BRIDGES_FILE) if given is None else given


def read_own_bridges(engine: Engine, path: Path, device: Any) -> Bridges:
    """The bridges of a file, as float32. Raises `InvalidValueError` for those of other weights."""
    import torch

    from d3engine.model.bridges import read_bridges
    from d3engine.model.fingerprint import fingerprint

    try:
        found = read_bridges(path)
    except ModelFormatError as error:
        raise InvalidValueError("--bridges", str(path), f"what d3engine bridge fit has written ({error})") from None
    is_ours = found.fingerprint == fingerprint(engine.directory)
    require(is_ours, "--bridges", str(path), "fitted to these weights, not to others")
    return found.to(torch.float32, torch.device(device))


def write_own_bridges(bridges: Bridges, target: Path) -> None:
    """Write a file of bridges. Raises `InvalidValueError` where that cannot be done."""
    from d3engine.model.bridges import write_bridges

    try:
        write_bridges(bridges, target)
    except OSError as error:
        raise InvalidValueError("--out", str(target), f"a file that can be written ({error})") from error


def bridges_of(schedule: Schedule, bridges: Bridges, path: Path) -> Mapping[Window, Bridge]:
    """Those that a schedule needs."""
    missing = [f"{first}:{stop}" for first, stop in schedule.windows() if (first, stop) not in bridges.by_window]
    require(not missing, "--bridges", str(path), f"a file with the windows {', '.join(missing[:8])}")
    return {window: bridges.by_window[window] for window in schedule.windows()}


def schedule_of(policy: str, num_layers: int) -> Schedule:
    """The schedule of a policy in one line, without bridges of its own."""
    from d3engine.cli.depth_options import policy_from_words
    from d3engine.depth import DepthPolicy

    found = policy_from_words(policy.split())
    require(isinstance(found, DepthPolicy), "--policy", policy, "a policy with its options, not auto")
    assert isinstance(found, DepthPolicy)
    plain = found.exit_rule(num_layers) is None and found.draft_rule(num_layers) is None
    schedule = found.schedule(num_layers)
    require(plain and schedule.is_nested, "--policy", policy, "one whose skipped layers stay skipped")
    require(schedule.bridges is None, "--policy", policy, "without bridges, which --bridges names")
    return schedule


def progress_bar(name: str, unit: str, total: int) -> Any:
    """A bar that goes when it is full; none where bars are not wanted."""
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=unit, disable=hides_bars(), leave=False)


def _own_answers(
    engine: Engine, task: str, data: Path | None, seed: int, text_tokens: int, count: int
) -> list[list[int]]:
    """Prompts of a task's validation split with the model's own greedy answers at full depth behind them."""
    from d3engine.analysis.answers import answer
    from d3engine.calibration.tasks import calibration_task

    asked = calibration_task(task, data, seed=seed, shots=None)
    prompts = [question.prompt for question in asked.load("validation", count)][:count]
    progress = sys.stderr.isatty() and not hides_bars()
    answers = answer(engine, prompts, min(asked.max_tokens, text_tokens), stop=asked.stop, progress=progress)
    return [(one.prompt_ids + one.token_ids)[-text_tokens:] for one in answers]

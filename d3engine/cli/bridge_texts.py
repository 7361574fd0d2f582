"""The texts that `d3engine bridge` fits to, chooses by and measures on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.commands import measures_depths, writing
from d3engine.cli.engine_options import Options, engine_arguments
from d3engine.cli.signatures import give_parameters, keyword
from d3engine.errors import NOTHING, require, require_integer
from d3engine.utils.arguments import OptionTable
from d3engine.utils.progress import shows_bars

if TYPE_CHECKING:
    from d3engine.depth import DepthPolicy, Schedule
    from d3engine.engine.engine import Engine
    from d3engine.model.bridges import Bridge, Bridges, Window
    from d3engine.research.bridges.judging import Reading
    from d3engine.research.bridges.passage import Passage
    from d3engine.research.bridges.texts import Line

PROMPT_TOKENS = 40
"""Of a text that is no answer."""

ANSWER_TOKENS = 128

Command: TypeAlias = Callable[..., Any]

CHAT = "chat"
"""The task whose questions the model makes up itself."""

DATA = "Folder with gsm8k/, humaneval/, mbpp/ or bbh/ to read questions from."
Data: TypeAlias = Annotated[Path | None, typer.Option("--data", help=DATA)]
Fewshot: TypeAlias = Annotated[
    int | None, typer.Option("--num-fewshot", help="Solved examples before a question (3; none if generated).")
]
BridgesFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--bridges", help="A file of d3engine bridge fit (bridges.safetensors beside the weights)."),
]

SOURCES: OptionTable = {
    "text": (
        "--text",
        list[Path],
        'Texts; may be repeated: plain text, or .jsonl with "text", "messages", or "question" and "answer" on '
        "each line.",
    ),
    "task": (
        "--task",
        str,
        "Or the model's own answers to a task's questions, as d3engine calibrate has it; chat: to questions that it "
        "makes up itself.",
    ),
    "prompts": ("--prompts", Path, "Or its answers to these, a line each, asked by its chat template."),
    "answers": ("--answers", Path, "Or a file of d3engine depth answers, with what it holds out."),
    "data": ("--data", Path, DATA),
    "held_out": ("--held-out", Path, "What to measure on (every eighth of the texts)."),
}
SIZES: OptionTable = {
    "held_out_texts": ("--held-out-texts", int, "Texts to measure on at most."),
    "text_tokens": ("--text-tokens", int, "Tokens of a text at most."),
    "prompt_tokens": (
        "--prompt-tokens",
        int,
        f"First tokens of a text, which run every layer, as prompts do ({PROMPT_TOKENS}; of an answer, its own).",
    ),
    "max_tokens": ("--max-tokens", int, "Tokens of an answer at most, to --prompts or of --task chat."),
}
OF_HELD_OUT = ("answers", "held_out", "held_out_texts")
"""What a command without held-out texts does not take."""


def takes_texts(use: str, before: str, without: Sequence[str] = (), **defaults: int) -> Callable[[Command], Command]:
    """Make the parameter `asked` of a typer command, a `TextOptions`, of options in its place, except those `without`.

    Those of sizes stand before the parameter `before`. `use` is the help of --texts.
    """
    defaults["max_tokens"] = ANSWER_TOKENS

    def options(table: OptionTable) -> list[inspect.Parameter]:
        found = []
        for name, (flag, kind, text) in table.items():
            annotation = Annotated[kind if name in defaults else kind | None, typer.Option(flag, help=text)]  # type: ignore[valid-type]
            found.append(keyword(name, annotation, defaults.get(name)))
        return [one for one in found if one.name not in without]

    sources, sizes = options(SOURCES), options({"texts": ("--texts", int, use), **SIZES})

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_texts(**arguments: Any) -> Any:
            given = {one.name: arguments.pop(one.name) for one in (*sources, *sizes)}
            return command(asked=TextOptions(**given), **arguments)

        parameters: list[inspect.Parameter] = []
        for one in inspect.signature(command, eval_str=True).parameters.values():
            parameters += sizes if one.name == before else []
            parameters += sources if one.name == "asked" else [one]
        give_parameters(with_texts, parameters)
        return with_texts

    return decorate


@dataclass(frozen=True)
class TextOptions:
    """What a command was given."""

    text: Sequence[Path] | None
    task: str | None
    prompts: Path | None
    data: Path | None
    texts: int
    text_tokens: int
    prompt_tokens: int | None
    max_tokens: int
    held_out: Path | None = None
    held_out_texts: int = 1
    answers: Path | None = None

    @property
    def source(self) -> str | list[str]:
        """Where the texts are from, for people."""
        return self.task or [path.name for path in (*(self.text or ()), self.prompts, self.answers) if path is not None]

    @property
    def are_answers(self) -> bool:
        """Whether they are the model's own answers, whose generated positions alone are to be learnt from."""
        asked = self.task is not None or self.prompts is not None or self.answers is not None
        return asked and self.prompt_tokens is None

    @property
    def are_chats(self) -> bool:
        """Whether they are the model's answers in a conversation."""
        return self.prompts is not None or self.task == CHAT

    def check(self, fewest: int = 1) -> None:
        """Refuse what cannot be, before any work."""
        require_integer("--texts", self.texts, fewest)
        require_integer("--held-out-texts", self.held_out_texts, 1)
        require_integer("--max-tokens", self.max_tokens, 2)
        fewest_tokens = 2 + require_integer("--prompt-tokens", self._prompt_tokens, 1)
        require_integer("--text-tokens", self.text_tokens, fewest_tokens)
        sources = bool(self.text) + sum(one is not None for one in (self.task, self.prompts, self.answers))
        require(sources == 1, "--text", NOTHING, "given, or --task or --prompts in its place")
        reads_files = self.task not in (None, CHAT)
        require(reads_files or self.data is None, "--data", self.data, "absent without a --task of its files")

    def read(self, engine: Engine, seed: int) -> tuple[list[Reading], list[Reading]]:
        """The texts, and others to measure on."""
        from d3engine.research.bridges.texts import parted, shuffled

        if self.answers is not None:
            own, held_out = self._kept_answers(engine, self.answers)
            return shuffled(own, self.texts, seed), shuffled(held_out, self.held_out_texts, seed + 1)
        found = self._found(engine, 2 * seed, self.texts + (0 if self.held_out else self.held_out_texts))
        first, other = parted(found) if self.held_out is None else (found, self._lines(engine, self.held_out))
        picked = shuffled(first, self.texts, seed), shuffled(other, self.held_out_texts, seed + 1)
        return [one() for one in picked[0]], [one() for one in picked[1]]

    def read_one_kind(self, engine: Engine, seed: int) -> list[Reading]:
        """The texts, none of them held out; what a model makes up for them `read` has never given."""
        from d3engine.research.bridges.texts import shuffled

        return [one() for one in shuffled(self._found(engine, 2 * seed + 1, self.texts), self.texts, seed)]

    @property
    def _prompt_tokens(self) -> int:
        return PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens

    def _found(self, engine: Engine, seed: int, count: int) -> list[Callable[[], Reading]]:
        """All texts to choose from, of which those that are chosen are then called for."""
        if self.task is None and self.prompts is None:
            return [one for path in self.text or () for one in self._lines(engine, path, "--text")]
        if self.are_chats:
            answers = _own_chats(engine, self.prompts, seed, self.max_tokens, self.text_tokens, count)
        else:
            assert self.task is not None
            answers = _own_answers(engine, self.task, self.data, seed // 2, self.text_tokens, count)
        return [partial(self._answer, one) for one in answers]

    def _kept_answers(self, engine: Engine, path: Path) -> list[list[Reading]]:
        """Those of a file of `d3engine depth answers` to learn from, and those held out."""
        from d3engine.model.expected_tensors import fingerprint
        from d3engine.research.bridges.judging import Reading
        from d3engine.research.distillation.corpus import read_parts

        return [
            [self._answer(Reading([*o.prompt_ids, *o.token_ids][: self.text_tokens], len(o.prompt_ids))) for o in part]
            for part in read_parts(path, fingerprint(engine.directory))
        ]

    def _answer(self, answer: Reading) -> Reading:
        return answer if self.prompt_tokens is None else replace(answer, prompt_length=self.prompt_tokens)

    def _lines(self, engine: Engine, path: Path, option: str = "--held-out") -> list[Callable[[], Reading]]:
        from d3engine.research.bridges.judging import Reading
        from d3engine.research.bridges.texts import TextReader

        reader = TextReader(engine.directory, engine.get_tokenizer(), self.text_tokens)
        lines = reader.lines(path, option)

        def read(line: Line) -> Reading:
            return Reading(reader.encode(line), self._prompt_tokens)

        return [partial(read, line) for line in lines]


def open_passage(model: str, options: Options) -> tuple[Engine, Passage]:
    """An engine, and its weights as bridges are measured with."""
    from d3engine.research.analysis.answers import open_model
    from d3engine.research.bridges.passage import Passage

    measures_depths()
    engine, observer = open_model(model, engine_arguments(model, options))
    return engine, Passage(observer)


def bridges_path(model: str, given: Path | None) -> Path:
    """The file that is named, or the one beside the weights."""
    from d3engine.cli.engine_options import model_directory
    from d3engine.model.bridges import BRIDGES_FILE
    from d3engine.utils.files import beside

    return beside(model_directory(model), BRIDGES_FILE) if given is None else given


def read_own_bridges(engine: Engine, path: Path, device: Any) -> Bridges:
    """The bridges of a file, as float32. Raises `InvalidValueError` for those of other weights."""
    import torch

    from d3engine.model.expected_tensors import fingerprint
    from d3engine.research.calibration.bridge_choices import read_fitted

    found = read_fitted(path, fingerprint(engine.directory))
    return found.to(torch.float32, torch.device(device))


def write_own_bridges(bridges: Bridges, target: Path) -> None:
    """Write a file of bridges. Raises `InvalidValueError` where that cannot be done."""
    from d3engine.model.bridges import write_bridges

    with writing("--out", target):
        write_bridges(bridges, target)


def bridges_of(schedule: Schedule, bridges: Bridges, path: Path) -> Mapping[Window, Bridge]:
    """Those that a schedule needs."""
    missing = [f"{first}:{stop}" for first, stop in schedule.windows() if (first, stop) not in bridges.by_window]
    require(not missing, "--bridges", str(path), f"a file with the windows {', '.join(missing[:8])}")
    return {window: bridges.by_window[window] for window in schedule.windows()}


def policy_of(words: str, *more: str) -> DepthPolicy:
    """The policy of a line, with further options."""
    from d3engine.cli.depth_options import parse_depth
    from d3engine.depth import DepthPolicy

    found = parse_depth(" ".join((words, *more)))
    require(isinstance(found, DepthPolicy), "--depth", words, "a policy with its options, not auto")
    assert isinstance(found, DepthPolicy)
    return found


def schedule_of(policy: str, num_layers: int) -> Schedule:
    """The schedule of a line's policy, which must name no bridges."""
    found = policy_of(policy)
    plain = found.exit_rule(num_layers) is None and found.draft_rule(num_layers) is None
    schedule = found.schedule(num_layers)
    require(plain and schedule.is_nested, "--depth", policy, "one whose skipped layers stay skipped")
    require(schedule.bridges is None, "--depth", policy, "without bridges, which --bridges names")
    require(not schedule.students, "--depth", policy, "without a student (d3engine depth measure judges those)")
    return schedule


def _own_answers(
    engine: Engine, task: str, data: Path | None, seed: int, text_tokens: int, count: int
) -> list[Reading]:
    """Prompts of a task's validation split with the model's own greedy answers at full depth behind them."""
    from d3engine.research.analysis.answers import answer
    from d3engine.research.bridges.judging import Reading
    from d3engine.research.calibration.tasks import calibration_task

    asked = calibration_task(task, data, seed=seed, shots=None)
    prompts = [question.prompt for question in asked.load("validation", count)][:count]
    answers = answer(engine, prompts, min(asked.max_tokens, text_tokens), stop=asked.stop, progress=shows_bars())
    kept = [one.prompt_ids[-max(text_tokens - len(one.token_ids), 1) :] for one in answers]
    return [Reading(prompt + one.token_ids, len(prompt)) for prompt, one in zip(kept, answers, strict=True)]


def _own_chats(
    engine: Engine, file: Path | None, seed: int, max_tokens: int, text_tokens: int, count: int
) -> list[Reading]:
    """Questions of a file, or such as the model makes up, with its own greedy answers at full depth behind them."""
    from d3engine.research.analysis.answers import answer, read_prompts
    from d3engine.research.bridges.judging import Reading
    from d3engine.research.bridges.own_answers import made_up_prompts

    asked = made_up_prompts(engine, count, seed) if file is None else read_prompts(file, count)
    prompts = [engine.chat_prompt([{"role": "user", "content": one}]) for one in asked]
    answers = answer(engine, prompts, max_tokens, progress=shows_bars())
    return [Reading((one.prompt_ids + one.token_ids)[:text_tokens], len(one.prompt_ids)) for one in answers]

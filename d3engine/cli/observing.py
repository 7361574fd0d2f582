"""What the subcommands of `d3engine analyze` share: prompts, observed answers, output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.commands import App, AsJson, check_plot, measures_depths, printing_last, show_report
from d3engine.cli.depth_options import AUTO, Depth, takes_depth
from d3engine.cli.engine_options import Model, Options, engine_arguments, model_directory, takes_engine, takes_options
from d3engine.cli.signatures import give_parameters, keyword
from d3engine.depth import DepthPolicy, FullDepth
from d3engine.errors import NOTHING, require, require_integer
from d3engine.utils.arguments import OptionTable
from d3engine.utils.progress import counting, progress_bar, shows_bars

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.research.analysis.answers import Answered
    from d3engine.research.analysis.copying import Outcome
    from d3engine.research.analysis.observer import Observer
    from d3engine.research.analysis.report import Table
    from d3engine.research.evaluation.benchmark import Question
    from d3engine.research.evaluation.kept import Prompt
    from d3engine.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128

ASKING: OptionTable = {
    "prompts": ("--prompts", Path, "One prompt per line, or a .json list of texts, instead of a task."),
    "task": (
        "--task",
        str,
        "What is asked: a generated task (word-problems; word-sorting:3 is one of that size); gsm8k, humaneval, "
        "mbpp, bbh or bbh/<task> with --data.",
    ),
    "data": ("--data", Path, "Folder with gsm8k/, humaneval/, mbpp/ or bbh/ to read questions from."),
    "shots": ("--num-fewshot", int, "Solved examples before a question (3; none if generated)."),
    "chat": ("--chat", bool, "Put each prompt, as a user's turn, into the model's chat template."),
    "reference": ("--reference-answers", bool, "Look at the task's own answers instead of the model's."),
    "max_tokens": ("--max-tokens", int, f"Tokens of an answer at most (the task's own; {DEFAULT_MAX_TOKENS} without)."),
}
"""What a command asks the model -> flag, type, help."""

Limit: TypeAlias = Annotated[int, typer.Option("--limit", help="How many prompts (of each task).")]
Png: TypeAlias = Annotated[
    Path | None, typer.Option("--png", help="Also draw it to this file (PNG, or what its suffix says).")
]


@dataclass(frozen=True)
class Asked:
    """What the model is asked, and how: `questions` judge their answers; None where the prompts are a user's own.

    `references` are the answers that the questions bring.
    """

    prompts: Sequence[Prompt]
    questions: Sequence[Question] | None
    max_tokens: int
    stop: tuple[str, ...] = ()
    references: Sequence[str] | None = None


@dataclass(frozen=True)
class Observed:
    """The model, an observer of its weights, and its answers at full depth."""

    engine: Engine
    observer: Observer
    asked: Asked
    answered: list[Answered]

    def tokenizer(self, model: str) -> Tokenizer:
        """Raises `InvalidValueError` that names the model where it has none."""
        require(self.engine.tokenizer is not None, "model", model, "a model with a tokenizer")
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer

    def judge(self) -> tuple[Callable[[DepthPolicy], Outcome], str]:
        """How a policy's answers to the same prompts come out, and the name of that measure."""
        from d3engine.research.analysis.copying import AGREEMENT

        measures_depths()
        if self.asked.questions is None:
            return partial(_agreement, self), AGREEMENT
        return partial(_exact_match, self), "exact match"


takes_questions = partial(takes_options, name="asking", table=ASKING, panel="What is asked")


def observe(
    model: str, options: Options, asking: Options, limit: int, png: Path | None, *, judges: bool = False
) -> Observed:
    """The model, and its answers at full depth, or those that a task brings.

    What can be refused is refused before the model is loaded; a command that `judges` answers takes neither those nor a
    task in the form of a chat.
    """
    from d3engine.research.analysis.answers import MAX_PROMPTS, answer, open_model, reference_answers

    require_integer("--limit", limit, 1, MAX_PROMPTS)
    if judges:
        require(not asking.get("reference"), "--reference-answers", NOTHING, "absent where answers are judged")
        is_own = not asking.get("chat") or "prompts" in asking
        require(is_own, "--chat", NOTHING, "given with --prompts where answers are judged")
    model_directory(model)
    check_plot("--png", png)
    asked = questions_of(asking, options.get("seed", 0), limit)
    engine, observer = open_model(model, engine_arguments(model, options))
    if asking.get("chat"):
        turns = [[{"role": "user", "content": prompt}] for prompt in asked.prompts]
        asked = replace(asked, prompts=[engine.chat_prompt(turn) for turn in turns])
    if asked.references is not None:
        with counting("answers", "answer", len(asked.prompts)) as done:
            given = reference_answers(engine, observer, asked.prompts, asked.references, asked.max_tokens, done)
        return Observed(engine, observer, asked, given)
    answered = answer(engine, asked.prompts, asked.max_tokens, stop=asked.stop, progress=shows_bars())
    return Observed(engine, observer, asked, answered)


def questions_of(asking: Options, seed: int, limit: int) -> Asked:
    """The questions of a task, or the prompts of a file; word problems where neither is named."""
    from d3engine.research.analysis.answers import read_prompts
    from d3engine.research.evaluation import catalogue

    prompts: Path | None = asking.get("prompts")
    task: str | None = asking.get("task")
    data: Path | None = asking.get("data")
    given: Any = {"split": "test", "seed": seed, "limit": limit, "shots": asking.get("shots")}
    if prompts is not None:
        for name, flag in (
            ("task", "--task"),
            ("data", "--data"),
            ("shots", "--num-fewshot"),
            ("reference", "--reference-answers"),
        ):
            require(name not in asking, flag, asking.get(name), "absent beside --prompts")
        max_tokens = require_integer("--max-tokens", asking.get("max_tokens", DEFAULT_MAX_TOKENS), 1)
        return Asked(read_prompts(prompts, limit), None, max_tokens)
    if data is None:
        require(task is None or catalogue.needs_no_files(task), "--task", task, catalogue.NAMES_WITHOUT_HARNESS)
        (benchmark,) = catalogue.generated([task or "word-problems"], **given)
    else:
        require(task is not None, "--task", task, f"one of {catalogue.OF_FILES} beside --data")
        (benchmark,) = catalogue.from_files([task or ""], data, **given)
    own = DEFAULT_MAX_TOKENS if task is None else benchmark.max_tokens
    max_tokens = require_integer("--max-tokens", asking.get("max_tokens", own), 1)
    questions = benchmark.questions
    references = [catalogue.reference_answer(question) for question in questions] if asking.get("reference") else None
    return Asked([question.prompt for question in questions], questions, max_tokens, benchmark.stop, references)


def _exact_match(seen: Observed, policy: DepthPolicy) -> Outcome:
    from d3engine.request.params import SamplingParams
    from d3engine.research.analysis.copying import Outcome
    from d3engine.research.evaluation.accuracy import measure

    asked = seen.asked
    assert asked.questions is not None
    params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, stop=list(asked.stop) or None)
    score = measure(seen.engine, asked.questions, policy, params)
    return Outcome(len(asked.questions), score.correct, score.unfinished)


def _agreement(seen: Observed, policy: DepthPolicy) -> Outcome:
    from d3engine.research.analysis.answers import answer
    from d3engine.research.analysis.copying import Outcome

    found = answer(seen.engine, seen.asked.prompts, seen.asked.max_tokens, policy)
    right = sum(a.token_ids == b.token_ids for a, b in zip(found, seen.answered, strict=True))
    return Outcome(len(found), right, sum(one.cut_off for one in found))


@dataclass(frozen=True)
class AnalysisOptions:
    """What a subcommand was given: the model, what it is asked, and where its result goes."""

    model: str
    engine_options: Options
    asking: Options
    limit: int
    png: Path | None
    as_json: bool

    @property
    def num_layers(self) -> int:
        """Of the model, whose weights are not loaded for it."""
        from d3engine.model.config import ModelConfig

        return ModelConfig.from_directory(model_directory(self.model)).num_layers

    def observe(self, *, judges: bool = False) -> Observed:
        """As `observe`."""
        return observe(self.model, self.engine_options, self.asking, self.limit, self.png, judges=judges)

    def grid(
        self, layers: Sequence[int] | None, steps: Sequence[int] | None, flag: str, spare: int = 0
    ) -> tuple[list[int], list[int]]:
        """The numbers of layers and the steps of a grid, in order; of all layers `spare` must be left."""
        total = self.num_layers
        counts = sorted(set(layers or [1, max(total // 8, 1), max(total // 4, 1), max(total // 2, 1)]))
        chosen = sorted(set(steps or [1, 2, 4, 8, 16, 32]))
        for count in counts:
            require_integer("--layers", count, 1, total - spare)
        for step in chosen:
            require_integer(flag, step, 1)
        return counts, chosen

    def policy_or_own(self, depth: Depth) -> DepthPolicy:
        """The policy of --depth; without it the model's own, where that is not full depth."""
        from d3engine.engine.depth import resolve_depth

        if depth != AUTO:
            return depth
        own = resolve_depth(AUTO, model_directory(self.model))
        allowed = f"given, since {self.model} has no d3.json with a policy"
        require(not isinstance(own, FullDepth), "--depth", NOTHING, allowed)
        return own

    def present(
        self,
        result: Any,
        plot: Callable[[Any, Path, str], None] | None = None,
        words: str | None = None,
        tables: Callable[[], Iterable[Table]] | None = None,
    ) -> None:
        """Print a result and draw it to --png, if that is given; the picture says `words`, or what its table does."""
        shown = tables or (lambda: [result.table()])
        with printing_last(partial(show_report, result.as_dict, shown, self.as_json, apart=True)):
            if self.png and plot is not None:
                title = result.table().title if words is None else words
                plot(result, self.png, f"{Path(self.model).name}: {title[0].lower()}{title[1:]}")


def analysis(app: App, limit: int, *, draws: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of `app` of a function that gets `AnalysisOptions`, and the options that it declares itself.

    Without `draws` the command has no --png.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def with_options(
            model: str,
            limit: int,
            as_json: bool,
            engine_options: Options,
            asking: Options,
            png: Any = None,
            **more: Any,
        ) -> None:
            command(AnalysisOptions(model, engine_options, asking, limit, png, as_json), **more)

        before = [keyword("model", Model, "demo"), keyword("limit", Limit, limit)]
        after = [*([keyword("png", Png)] if draws else []), keyword("as_json", AsJson, False)]
        give_parameters(with_options, [*before, *(one.replace(kind=one.KEYWORD_ONLY) for one in own), *after])
        taking = takes_engine(with_options)
        if any(one.name == "depth" for one in own):
            taking = takes_depth(taking)
        return app.command()(takes_questions(taking))

    return decorate


def with_bar(answered: Sequence[Answered], name: str) -> Any:
    """The answers under a progress bar on a terminal."""
    return progress_bar(name, "answer", None, iterable=answered)

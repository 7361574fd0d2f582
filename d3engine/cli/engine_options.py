"""The options of the engine and of sampling that several commands share."""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.commands import LOGGER, note
from d3engine.cli.depth_options import AUTO as AUTO_DEPTH
from d3engine.cli.depth_options import Depth
from d3engine.cli.signatures import give_parameters, keyword, naming_flags
from d3engine.engine.engine_config import EngineConfig
from d3engine.errors import NOTHING, InvalidValueError, integer_in, require, require_integer
from d3engine.request.params import CHAT_DEFAULTS, FROM_FILE, SamplingParams, StructuredOutputsParams
from d3engine.utils.arguments import OptionTable, options_of, panels_of, unlisted
from d3engine.utils.files import UnreadableFileError, as_json, beside, read_text

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.engine.settings import EngineProperties
    from d3engine.model.config import ModelConfig


STRUCTURED: dict[str, tuple[str, Any, str]] = {
    "json_schema": ("--json-schema", Path, "A file with a JSON schema that every answer satisfies."),
    "regex": ("--regex", str, "A regular expression that every answer matches from end to end."),
    "choice": ("--choice", list[str], "A text that an answer may be; may be repeated."),
    "grammar": ("--grammar", Path, "A file with a grammar in Lark's syntax that every answer follows."),
}
"""Option -> flag, type, help; `with_form` makes `structured_outputs` of those that are given."""

_FIELDS = {name: "json" if name == "json_schema" else name for name in STRUCTURED}
"""Option -> the field of `StructuredOutputsParams` that it is."""


def with_form(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `SamplingParams`, the form among them. Raises `InvalidValueError` naming the flag."""
    forms = [name for name in STRUCTURED if name in given]
    if not forms:
        return given
    flags = ", ".join(STRUCTURED[name][0] for name in forms)
    require(len(forms) == 1, flags, f"{len(forms)} of them", "one alone, since an answer has one form")
    (name,), rest = forms, {key: value for key, value in given.items() if key not in forms}
    with naming_the_flag(given):
        return {**rest, "structured_outputs": StructuredOutputsParams(**{_FIELDS[name]: _form(name, given[name])})}


@contextmanager
def naming_the_flag(given: dict[str, Any]) -> Iterator[None]:
    """Where the form that is given is refused, say so of its flag, and of its file in place of what that holds."""
    try:
        yield
    except InvalidValueError as error:
        for name in STRUCTURED:
            if name in given and error.field == _FIELDS[name]:
                flag, kind, _ = STRUCTURED[name]
                if kind is Path:
                    raise InvalidValueError(flag, str(given[name]), f"a file with {error.allowed}") from None
                raise InvalidValueError(flag, error.value, error.allowed) from None
        raise


def text_of(flag: str, path: Path, others: str = "") -> str:
    """The text of a file; raises `InvalidValueError`, which names the flag and what it takes else."""
    try:
        return read_text(path)
    except UnreadableFileError as error:
        raise InvalidValueError(flag, str(path), f"a regular file of UTF-8 text{others} ({error})") from error


def _form(name: str, given: Any) -> Any:
    """What `StructuredOutputsParams` takes: the content of a file, of a JSON schema as an object."""
    flag, kind, _ = STRUCTURED[name]
    if kind is not Path:
        return given
    text = text_of(flag, given)
    if name != "json_schema":
        return text
    allowed = "a file with a JSON schema, which is a JSON object"
    try:
        schema = as_json(text, given)
    except UnreadableFileError as error:
        reason = error.__context__  # a key that stands twice is of the file, which may be private
        said = f"valid JSON: {reason}" if isinstance(reason, json.JSONDecodeError) else "valid JSON"
        raise InvalidValueError(flag, str(given), f"{allowed} (this one is not {said})") from None
    require(isinstance(schema, dict), flag, str(given), f"{allowed} (this one holds {_kind_in_words(schema)})")
    return schema


def _kind_in_words(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


AUTO = "auto"
WEIGHTS_PER_NATIVE_THREAD = 2**18
"""Weights of a layer that are worth a native thread from the third on; two are worth it with fewer for each."""
MOST = 1024


def read_threads(given: str) -> int | None:
    """The number after `--threads`; None for "auto"."""
    if given == AUTO:
        return None
    number = integer_in(given)
    if number is None or not 1 <= number <= MOST:
        raise InvalidValueError("--threads", given, f"{AUTO!r}, or an integer from 1 to {MOST}")
    return number


def native_threads_for(config: ModelConfig, most: int) -> int:
    """How many threads of the native library suit a model: at least two, and at most `most`."""
    return min(most, max(2, config.layer_parameters // WEIGHTS_PER_NATIVE_THREAD))


def use_threads(given: str, config: ModelConfig, spare_cores: int = 0) -> int:
    """Let PyTorch compute with that many threads from now on; how many the native library is to have.

    "auto" never takes more than PyTorch would by itself or the process may use, less the cores that are to be spared.
    """
    import torch

    from d3engine.engine.host import pytorch_threads_for, usable_cpus

    asked = read_threads(given)
    most = max(1, min(torch.get_num_threads(), usable_cpus()) - spare_cores)
    torch.set_num_threads(asked or pytorch_threads_for(config, most))
    return asked or native_threads_for(config, most)


Options: TypeAlias = dict[str, Any]
"""The options given, by the name of the argument they stand for."""

MODEL = 'A directory, a .gguf file, "demo" (bundled), a fetched model, or owner/name[:Q4_K_M] of the Hugging Face hub.'
Model: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]

DEFAULT_MAX_TOKENS = 256

ENGINE: OptionTable = {
    **options_of(EngineConfig),
    "admission": ("--admission-interval", int, "Steps between two admissions of waiting requests [default: 1]."),
    "threads": ("--threads", str, "CPU threads: a number, or auto, by the model's size and the cores [default: auto]."),
}
"""Argument of `Engine`, or of `engine_arguments`, -> flag, type, help."""

UNLISTED = unlisted(EngineConfig, SamplingParams) | {
    *("allow_lora_loading", "metrics_prefix", "sse_keep_alive_seconds", "health_stall_seconds", "max_logprobs"),
    *("admission", "max_lora_rank", "ttl", "enable_sleep_mode"),
}
"""Options that are taken and not listed: helps have room for fifty, and few ever change these."""

PANELS = panels_of(EngineConfig) | {"admission": "Advanced", "threads": "Engine"}
"""Field -> heading of the help."""


def _sampling(**defaults: Any) -> dict[str, tuple[str, Any, str]]:
    """The options of one answer; `defaults` are the command's own, where no file of the model says otherwise."""
    own = {one.name: one.default for one in fields(SamplingParams)} | defaults
    own |= {name: f"generation_config.json's, or {own[name]:g}" for name in FROM_FILE}
    options = options_of(SamplingParams, own)
    del options["n"]
    return options


SAMPLING = _sampling(max_tokens=DEFAULT_MAX_TOKENS)
"""Argument of `SamplingParams` -> flag, type, help. What is not given follows generation_config.json."""

CHAT_MAX_TOKENS = 512
CHAT_SAMPLING = _sampling(max_tokens=CHAT_MAX_TOKENS, **CHAT_DEFAULTS)
"""Of a conversation."""

_TASKS = {"max_tokens": "the task's", "temperature": 0}
TASK_SAMPLING = SAMPLING | {name: options_of(SamplingParams, _TASKS)[name] for name in _TASKS}
"""Where a task asks the questions."""

SAMPLES: OptionTable = {"n": options_of(SamplingParams)["n"], **SAMPLING, **STRUCTURED}
"""With several answers to one prompt, and forms for them."""


COMPUTING = (
    *("device", "dtype", "weight_dtype", "activations", "kv_cache_dtype"),
    *("batch_invariant", "backend", "threads"),
)
"""Options of the engine that decide how numbers are computed."""


def takes_engine(command: Callable[..., Any], names: Iterable[str] = ENGINE) -> Callable[..., Any]:
    """Replace the parameter `engine_options` of a typer command by the options of the engine, or by some of them."""
    return takes_options(command, "engine_options", {name: ENGINE[name] for name in names}, "Engine", PANELS)


def takes_options(
    command: Callable[..., Any],
    name: str,
    table: OptionTable,
    panel: str,
    panels: Mapping[str, str] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Replace a parameter of a typer command by the options of a table, of which it gets those that were given.

    `panels` says under which heading of the help an option stands, where it is another than `panel`.
    """

    @functools.wraps(command)
    def with_options(**arguments: Any) -> Any:
        given = {field: arguments.pop(f"{name}_{field}") for field in table}
        # An option that may be repeated is an empty list when it was not given, in some versions of typer.
        arguments[name] = {field: value for field, value in given.items() if value is not None and value != []}
        with naming_flags({field: flag for field, (flag, _, _) in table.items()}):
            return command(**arguments)

    signature = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    for field, (flag, kind, text) in table.items():
        heading = panels.get(field, panel)
        option = typer.Option(flag, help=text, show_default=False, rich_help_panel=heading, hidden=field in UNLISTED)
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        parameters.append(keyword(f"{name}_{field}", annotation))  # depth has a max_tokens too
    give_parameters(with_options, parameters)
    return with_options


_takes_sampling = partial(takes_options, name="sampling", panel="Sampling")

takes_samples = partial(_takes_sampling, table=SAMPLES)
"""For one or several answers per prompt, with `--n` and the options of forms."""

takes_chat_sampling = partial(_takes_sampling, table=CHAT_SAMPLING)
"""For one answer of a conversation."""

takes_task_sampling = partial(_takes_sampling, table=TASK_SAMPLING)
"""For answers to a task's questions."""


def model_directory(model: str, advice: str = "") -> Path:
    """The model's directory; `advice` follows what it must be where it is none."""
    from d3engine.engine.model_directory import model_directory as directory_of

    return directory_of(model, advice)


def beside_weights(model: str, directory: Path, out: Path | None, name: str) -> Path:
    """Where `out` or, beside the weights, a file of this name is written; refuses to write beside the bundled ones."""
    from d3engine.engine.model_directory import DEMO

    bundled = "given as a file to write, since the bundled model's directory belongs to the package"
    require(out is not None or model != DEMO, "--out", NOTHING, bundled)
    return out if out is not None else beside(directory, name)


def open_engine(model: str, options: Options, depth: Depth | None = None) -> Engine:
    """The engine of a command; raises `InvalidValueError` for options that are not allowed.

    Without `depth` every request brings its own. The command names an "auto" setting and its task on stderr.
    """
    arguments = engine_arguments(model, options)
    from d3engine.engine.engine import Engine

    engine = Engine(model, depth=depth or AUTO_DEPTH, **arguments)
    if depth == AUTO_DEPTH:
        tell_own_setting(engine, model)
    return engine


def tell_own_setting(engine: EngineProperties, model: str) -> None:
    """Say on stderr which setting the model's d3.json holds, and for which task; nothing without that file."""
    from d3engine.engine.depth import own_setting

    found = own_setting(engine.depth, model_directory(model))
    if found is not None and not LOGGER.isEnabledFor(logging.INFO):  # whose reader the engine has told
        note(found)


def engine_arguments(model: str, options: Options, spare_cores: int = 0) -> Options:
    """The arguments of `Engine` that the options stand for; from here on PyTorch takes the threads asked for.

    `--threads auto` leaves `spare_cores` to others.
    """
    directory = model_directory(model)
    from d3engine.model.config import ModelConfig
    from d3engine.request.admission import IntervalAdmission

    arguments = dict(options)
    if "admission" in arguments:
        arguments["admission"] = IntervalAdmission(require_integer("--admission-interval", arguments["admission"], 1))
    given = arguments.pop("threads", AUTO)
    arguments["num_threads"] = use_threads(given, ModelConfig.from_directory(directory), spare_cores)
    return arguments


Lora: TypeAlias = Annotated[
    Path | None,
    typer.Option("--lora", metavar="DIRECTORY", help="LoRA adapter to answer with, as PEFT saves one."),
]


def with_adapter(options: Options, directory: Path | None) -> Options:
    """The engine options that load the adapter of `--lora`, if there is one."""
    if directory is None:
        return options
    from d3engine.model.adapters import largest_rank

    return {**options, "lora_modules": {"lora": str(directory)}, "max_lora_rank": largest_rank(directory)}


def sampling_params(engine: Engine, given: Options) -> SamplingParams:
    """What the model's generation_config.json says, with the options given in its place."""
    return replace(engine.default_sampling_params, **{"max_tokens": DEFAULT_MAX_TOKENS, **with_form(given)})


def check_sampling(given: Options) -> None:
    """Refuse sampling options that no model can honour, before one is loaded."""

    SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **with_form(given)})

"""The options of the engine and of sampling that several commands share, in vLLM's spelling.

The one idea: as with `takes_depth`, a command declares one parameter (`engine_options` or `sampling`) and gets the
options that were really given, as a dict; what was not given is left to the engine and to generation_config.json.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.depth_options import AUTO as AUTO_DEPTH
from d3engine.cli.depth_options import Depth
from d3engine.cli.signatures import give_parameters, keyword, naming_flags
from d3engine.cli.structured_options import STRUCTURED, with_form
from d3engine.cli.verbosity import LOGGER, note
from d3engine.errors import require_integer

if TYPE_CHECKING:
    from d3engine.engine import Engine
    from d3engine.loading.facts import EngineProperties
    from d3engine.request.params import SamplingParams

Options: TypeAlias = dict[str, Any]
"""The options given, by the name of the argument they stand for."""

MODEL = 'A directory, a .gguf file, "demo" (bundled), "smollm2" (fetched once), or owner/name of the Hugging Face hub.'
Model: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]

OptionTable: TypeAlias = Mapping[str, tuple[str, Any, str]]

DEFAULT_MAX_TOKENS = 256

ENGINE: OptionTable = {
    "device": ("--device", str, "auto, cpu, cuda or cuda:N (auto)."),
    "dtype": ("--dtype", str, "auto, float32, bfloat16 or, on a GPU, float16 (auto)."),
    "weight_dtype": ("--weight-dtype", str, "Of matrices; on a CPU bfloat16 and float16 save memory (auto)."),
    "pack_weights": (
        "--pack-weights/--no-pack-weights",
        bool,
        "Hold bfloat16 matrices in 12 bits a weight, the same weights, on a CPU (no).",
    ),
    "max_model_len": (
        "--max-model-len",
        int,
        "Tokens of prompt and answer at most (the model's, or what fits the memory).",
    ),
    "max_num_seqs": ("--max-num-seqs", int, "Sequences that run at once at most (64)."),
    "max_num_batched_tokens": ("--max-num-batched-tokens", int, "Tokens computed in one step at most (2048)."),
    "block_size": ("--block-size", int, "KV entries of a block (16)."),
    "kv_cache_dtype": ("--kv-cache-dtype", str, "auto, or fp8: cache entries of 8 bits with scales (auto)."),
    "kv_cache_memory_bytes": (
        "--kv-cache-memory-bytes",
        int,
        "Size of the KV cache (on a CPU 1 GiB at most).",
    ),
    "gpu_memory_utilization": ("--gpu-memory-utilization", float, "Share of a GPU's memory to use (0.9)."),
    "enable_prefix_caching": (
        "--enable-prefix-caching/--no-enable-prefix-caching",
        bool,
        "Let prompts share the KV cache of a common beginning (yes).",
    ),
    "admission": ("--admission-interval", int, "Steps between two admissions of waiting requests (each step)."),
    "tensor_parallel_size": ("--tensor-parallel-size", int, "Devices to spread the model over (1)."),
    "batch_invariant": (
        "--batch-invariant/--no-batch-invariant",
        bool,
        "Let no bit of an answer depend on who shares its batch; slower on a GPU (no).",
    ),
    "seed": ("--seed", int, "From which every sequence gets the seed of its sampling (0)."),
    "threads": ("--threads", str, "CPU threads: a number, or auto, by the model's size and the cores (auto)."),
}
"""Argument of `Engine`, or of `engine_arguments`, -> flag, type, help."""

PANELS = {
    **dict.fromkeys(
        ("weight_dtype", "pack_weights", "max_model_len", "kv_cache_dtype", "kv_cache_memory_bytes"), "Memory"
    ),
    **dict.fromkeys(("gpu_memory_utilization", "enable_prefix_caching"), "Memory"),
    **dict.fromkeys(("block_size", "admission", "batch_invariant", "max_num_batched_tokens"), "Advanced"),
}
"""Headings of the help, for those that do not stand under "Engine"."""

SAMPLING: OptionTable = {
    "max_tokens": ("--max-tokens", int, f"Tokens to generate at most ({DEFAULT_MAX_TOKENS})."),
    "min_tokens": ("--min-tokens", int, "Tokens to generate before anything can end the answer (0)."),
    "temperature": ("--temperature", float, "0 is greedy (the model's generation_config.json, or 1)."),
    "top_p": ("--top-p", float, "Keep the likeliest tokens up to this probability (as temperature, or 1)."),
    "top_k": ("--top-k", int, "Keep so many likeliest tokens; 0 and -1 keep all (as temperature, or 0)."),
    "min_p": ("--min-p", float, "Drop tokens less likely than this times the likeliest (as temperature, or 0)."),
    "presence_penalty": ("--presence-penalty", float, "Against tokens that were generated already (0)."),
    "frequency_penalty": ("--frequency-penalty", float, "The same, once for each time (0)."),
    "repetition_penalty": (
        "--repetition-penalty",
        float,
        "Against tokens of prompt and answer (as temperature, or 1).",
    ),
    "stop": ("--stop", list[str], "A text that ends the answer; may be repeated."),
    "stop_token_ids": ("--stop-token-ids", list[int], "A token id that ends the answer; may be repeated."),
    "bad_words": ("--bad-words", list[str], "A word never to write; may be repeated."),
    "ignore_eos": ("--ignore-eos", bool, "Go on after the end-of-sequence token."),
    "include_stop_str_in_output": ("--include-stop-str-in-output", bool, "Show the stop text too."),
    "skip_special_tokens": ("--skip-special-tokens/--no-skip-special-tokens", bool, "Hide special tokens (yes)."),
}
"""Argument of `SamplingParams` -> flag, type, help. What is not given follows generation_config.json."""

CHAT_DEFAULTS: Options = {"temperature": 0.7, "top_p": 0.9}
"""With what `chat` samples a model whose files do not say it: at 1, an API's default, small models talk nonsense."""
CHAT_MAX_TOKENS = 512

CHAT_SAMPLING: OptionTable = {
    **SAMPLING,
    "max_tokens": ("--max-tokens", int, f"Tokens to generate at most ({CHAT_MAX_TOKENS})."),
    "temperature": ("--temperature", float, "0 is greedy (the model's generation_config.json, or 0.7 without any)."),
    "top_p": ("--top-p", float, "Keep the likeliest tokens up to this probability (as temperature, or 0.9)."),
}
"""Of a conversation."""

TASK_SAMPLING: OptionTable = {
    **SAMPLING,
    "max_tokens": ("--max-tokens", int, "Tokens to generate at most (the task's own limit)."),
    "temperature": ("--temperature", float, "0 is greedy (0)."),
}
"""Where a task asks the questions."""

SAMPLES: OptionTable = {"n": ("--n", int, "Answers to each prompt (1)."), **SAMPLING, **STRUCTURED}
"""With several answers to one prompt, and forms for them."""


def takes_engine(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `engine_options` of a typer command by the options of the engine."""
    return takes_options(command, "engine_options", ENGINE, "Engine", PANELS)


def takes_chat_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `sampling` of a typer command by the options of sampling, with the defaults of `chat`."""
    return takes_options(command, "sampling", CHAT_SAMPLING, "Sampling")


def takes_task_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same with the defaults of a task."""
    return takes_options(command, "sampling", TASK_SAMPLING, "Sampling")


def takes_samples(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same for one or several answers per prompt, with `--n` and the options of forms."""
    return takes_options(command, "sampling", SAMPLES, "Sampling")


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
        option = typer.Option(flag, help=text, show_default=False, rich_help_panel=panels.get(field, panel))
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        parameters.append(keyword(f"{name}_{field}", annotation))  # depth has a max_tokens too
    give_parameters(with_options, parameters)
    return with_options


def model_directory(model: str, advice: str = "") -> Path:
    """The model's directory; `advice` follows what it must be where it is none."""
    from d3engine.loading.model_directory import model_directory as directory_of

    return directory_of(model, advice)


def open_engine(model: str, options: Options, depth: Depth | None = None) -> Engine:
    """The engine of a command; raises `InvalidValueError` for options that are not allowed.

    Without `depth` every request brings its own. "auto" is told on stderr, with the task that it was found for.
    """
    arguments = engine_arguments(model, options)
    from d3engine.engine import Engine

    engine = Engine(model, depth=depth or AUTO_DEPTH, **arguments)
    if depth == AUTO_DEPTH:
        tell_own_setting(engine, model)
    return engine


def tell_own_setting(engine: EngineProperties, model: str) -> None:
    """Say on stderr which setting the model's d3.json holds, and for which task; nothing without that file."""
    from d3engine.loading.depth import own_setting

    found = own_setting(engine.depth, model_directory(model))
    if found is not None and not LOGGER.isEnabledFor(logging.INFO):  # whose reader the engine has told
        note(found)


def engine_arguments(model: str, options: Options, spare_cores: int = 0) -> Options:
    """The arguments of `Engine` that the options stand for; from here on PyTorch takes the threads asked for.

    `--threads auto` leaves `spare_cores` to others.
    """
    directory = model_directory(model)
    from d3engine.cli.threads import AUTO, use_threads
    from d3engine.model.config import ModelConfig
    from d3engine.scheduling.admission import IntervalAdmission

    arguments = dict(options)
    if "admission" in arguments:
        arguments["admission"] = IntervalAdmission(require_integer("--admission-interval", arguments["admission"], 1))
    given = arguments.pop("threads", AUTO)
    arguments["num_threads"] = use_threads(given, ModelConfig.from_directory(directory), spare_cores)
    return arguments


def sampling_params(engine: Engine, given: Options) -> SamplingParams:
    """What the model's generation_config.json says, with the options given in its place."""
    return replace(engine.default_sampling_params, **{"max_tokens": DEFAULT_MAX_TOKENS, **with_form(given)})


def check_sampling(given: Options) -> None:
    """Refuse sampling options that no model can honour, before one is loaded."""
    from d3engine.request.params import SamplingParams

    SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **with_form(given)})

"""The options of `d3engine serve` that are not of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from d3engine.cli.depth_options import AUTO, parse_depth
from d3engine.cli.engine_options import Options, takes_options
from d3engine.cli.signatures import naming_flags
from d3engine.depth import DepthPolicy
from d3engine.errors import InvalidValueError, MissingExtraError, require
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.settings import ServerSettings
from d3engine.utils.arguments import OptionTable
from d3engine.utils.environment import API_KEY
from d3engine.utils.files import UnreadableFileError, read_text

WHO: OptionTable = {
    "host": ("--host", str, "The address to listen at (127.0.0.1: this machine alone)."),
    "port": ("--port", int, "Its port; 0 is any that is free (8000)."),
    "api_keys": (
        "--api-key",
        list[str],
        f"A key to ask for; repeatable. {API_KEY.name} hides it better.",
    ),
    "api_key_file": ("--api-key-file", Path, "A file of such keys, one a line."),
    "metrics_keys": ("--metrics-key", list[str], "A key that opens /metrics alone; repeatable."),
    "allow_no_key": ("--allow-no-key", bool, "Let everybody who reaches the port use the model."),
    "allowed_hosts": ("--allowed-hosts", list[str], "A further name that the server answers to; repeatable."),
    "allowed_origins": ("--allowed-origins", list[str], "An origin whose pages may call it; repeatable (none)."),
}
WHAT: OptionTable = {
    "model_names": ("--served-model-name", list[str], "An id for the model; repeatable (its own name)."),
    "depth_aliases": ("--depth-alias", list[str], 'A further id at a depth: ID=full, "ID=d3 alpha=A start=S".'),
    "allow_depth": ("--allow-depth", list[str], "A policy that requests may ask for; repeatable (d3, full)."),
    "lock_depth": ("--lock-depth", bool, "Refuse every depth that a request brings."),
    "max_depth_policies": ("--max-depth-policies", int, "Policies of requests in progress at most (16)."),
    "max_prompts": ("--max-prompts", int, "Prompts of a request at most (256)."),
    "max_logprobs": ("--max-logprobs", int, "Log-probabilities per token at most (20)."),
    "allow_priority": ("--allow-priority", bool, "Let requests choose their priority."),
    "allow_lora_loading": ("--allow-lora-loading", bool, "Let requests load LoRA adapters by path."),
    "trust_request_chat_template": ("--trust-request-chat-template", bool, "Take chat templates from requests."),
    "tool_call_parser": (
        "--tool-call-parser",
        str,
        "Format of tool calls, in vLLM's names [default: the template's].",
    ),
    "reasoning_parser": ("--reasoning-parser", str, "Format of reasoning, in vLLM's names [default: the template's]."),
    "otlp_traces_endpoint": ("--otlp-traces-endpoint", str, "Where a span per request goes: .../v1/traces (nowhere)."),
    "sse_keep_alive_seconds": ("--sse-keep-alive-interval", float, "Seconds of silence in a stream (15; 0: any)."),
}
BODIES = (
    "model_names",
    "depth_aliases",
    "allow_depth",
    "lock_depth",
    "max_prompts",
    "max_logprobs",
    "allow_priority",
    "trust_request_chat_template",
    "tool_call_parser",
    "reasoning_parser",
)
"""Of these, what is about the bodies of requests, be there a server or not."""
LIMITS: OptionTable = {
    "max_queue": ("--max-queue", int, "Sequences that wait beside those that run (4 times --max-num-seqs)."),
    "max_body_bytes": ("--max-body-bytes", int, "Bytes of a request at most (8 MiB)."),
    "max_request_work": (
        "--max-request-work",
        int,
        "Characters and list entries of a request, times the answers they concern (as --max-body-bytes).",
    ),
    "max_connections": ("--max-connections", int, "Open connections at most (1024)."),
    "timeouts": (
        "--timeout",
        list[str],
        "NAME=SECONDS, repeatable: header of a request (10), its body (60), the whole request (none), write to a slow "
        "client (60), keep-alive of an idle connection (5), shutdown after SIGTERM or Ctrl-C (30).",
    ),
    "health_stall_seconds": ("--health-stall-seconds", float, "Seconds without a step until /health says hung (60)."),
    "metrics_prefix": ("--metrics-prefix", str, "Before the names of all metrics (d3engine)."),
}
TIMEOUTS = {
    "header": "header_timeout",
    "body": "body_timeout",
    "request": "request_timeout",
    "write": "write_timeout",
    "keep-alive": "keep_alive_timeout",
    "shutdown": "drain_timeout",
}
"""Name of `--timeout` -> field of `GuardSettings`."""
FURTHER: OptionTable = {
    "models": ("--model", list[str], "A further model, loaded when a request names it; repeatable."),
    "ttl": ("--model-ttl", float, "Seconds without a request until a further model is unloaded (never)."),
}
ADAPTERS: OptionTable = {
    "lora_modules": ("--lora-modules", list[str], "A LoRA adapter to serve, NAME=PATH; repeatable."),
    "max_lora_rank": ("--max-lora-rank", int, "Maximum rank of an adapter (16)."),
}
TABLES = {
    "who": ("Access", WHO),
    "what": ("Model and depth", WHAT),
    "limits": ("Limits", LIMITS),
    "further": ("Model and depth", FURTHER),
    "adapters": ("Model and depth", ADAPTERS),
}


def takes_server(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameters of a typer command that `TABLES` names by the options of the server."""
    for name, (panel, table) in TABLES.items():
        command = takes_options(command, name, table, panel)
    return command


def takes_bodies(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `what` of a typer command by the options that say what bodies of requests may ask for."""
    table = {name: WHAT[name] for name in BODIES}
    return takes_options(command, "what", table, TABLES["what"][0])


def takes_ids(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `what` of a typer command by the options that give the model its ids."""
    table = {name: WHAT[name] for name in ("model_names", "depth_aliases")}
    return takes_options(command, "what", table, TABLES["what"][0])


def require_server_packages(command: str) -> None:
    """Refuse to start without what the extra brings, before anything slow is done."""
    for package in ("starlette", "uvicorn", "httptools", "msgspec", "orjson", "prometheus_client"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package.replace("_", "-"), "serve", command) from None


def server_settings(model: str, who: Options, what: Options, limits: Options) -> ServerSettings:
    """The settings that the options come to; raises `InvalidValueError` for what is not allowed."""
    who, limits = dict(who), dict(limits)
    timeouts = _timeouts(limits.pop("timeouts", ()))
    keys = [*who.pop("api_keys", ()), *_keys_of_file(who.pop("api_key_file", None)), *_keys_of_environment()]
    with naming_flags({field: f"{name} of --timeout" for name, field in TIMEOUTS.items()}):
        guards = GuardSettings(api_keys=tuple(keys), **_frozen(who), **limits, **timeouts)
    return ServerSettings(guards=guards, **served_as(model, what))


def served_as(model: str, what: Options) -> Options:
    """The arguments of `ServerSettings` that say as what a model is served, and what may be asked of it."""
    aliases = dict(_alias(given) for given in what.get("depth_aliases", ()))
    return {"model_names": (own_name(model),)} | _frozen(what) | {"depth_aliases": aliases}


def _frozen(options: Options) -> Options:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _timeouts(given: Iterable[str]) -> Options:
    found: Options = {}
    for text in given:
        name, _, value = text.partition("=")
        require(name in TIMEOUTS, "--timeout", text, f"NAME=SECONDS, with one of {', '.join(TIMEOUTS)}")
        require(TIMEOUTS[name] not in found, "--timeout", text, f"given once for {name}")
        try:
            found[TIMEOUTS[name]] = float(value)
        except ValueError:
            raise InvalidValueError(f"{name} of --timeout", value, "a number of seconds") from None
    return found


def own_name(model: str) -> str:
    """What clients call a model: a directory by its last name, anything else as it was given."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _keys_of_file(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        keys = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    except UnreadableFileError as error:
        raise InvalidValueError("--api-key-file", str(file), f"a regular file of UTF-8 text ({error})") from error
    require(len(keys) > 0, "--api-key-file", str(file), "a file with a key in it")
    return keys


def _keys_of_environment() -> list[str]:
    return [key.strip() for key in API_KEY.read().split(",") if key.strip()]


def _alias(given: str) -> tuple[str, DepthPolicy]:
    name, separator, words = given.partition("=")
    require(bool(separator and name), "--depth-alias", given, "ID=POLICY, with the policy's options as option=value")
    policy = parse_depth(words, "--depth-alias")
    if policy == AUTO:
        raise InvalidValueError("--depth-alias", given, "ID=POLICY; the model's own depth has ids already")
    return name, policy

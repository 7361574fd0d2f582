"""The options of `d3engine serve` that are not of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from d3engine.cli.depth_options import AUTO, parse_depth
from d3engine.cli.engine_options import Options, takes_options, text_of
from d3engine.cli.signatures import naming_flags
from d3engine.depth import DepthPolicy
from d3engine.errors import InvalidValueError, MissingExtraError, require
from d3engine.server.middleware.settings import GuardSettings
from d3engine.server.settings import ServerSettings
from d3engine.utils.arguments import OptionTable
from d3engine.utils.environment import API_KEY

WHO: OptionTable = {
    "host": ("--host", str, "Address to listen on [default: 127.0.0.1, this machine alone]."),
    "port": ("--port", int, "Port to listen on; 0 for any that is free [default: 8000]."),
    "api_keys": (
        "--api-key",
        list[str],
        f"API key that clients must send; repeatable. {API_KEY.name} keeps it out of process lists.",
    ),
    "api_key_file": ("--api-key-file", Path, "File of API keys, one a line."),
    "metrics_keys": ("--metrics-key", list[str], "API key for /metrics alone; repeatable."),
    "allow_no_key": ("--allow-no-key", bool, "Serve without an API key on an address that others reach."),
    "allowed_hosts": ("--allowed-hosts", list[str], "Additional Host name that the server accepts; repeatable."),
    "allowed_origins": ("--allowed-origins", list[str], "Web origin allowed to call; repeatable [default: none]."),
}
WHAT: OptionTable = {
    "model_names": ("--served-model-name", list[str], "Id of the model in requests; repeatable [default: its name]."),
    "depth_aliases": ("--depth-alias", list[str], 'Additional id with a depth: ID=full, "ID=d3 alpha=A start=S".'),
    "allow_depth": ("--allow-depth", list[str], "Policy that requests may choose; repeatable [default: d3, full]."),
    "lock_depth": ("--lock-depth", bool, "Refuse requests that choose a depth."),
    "max_depth_policies": ("--max-depth-policies", int, "Maximum distinct depth policies in flight [default: 16]."),
    "max_prompts": ("--max-prompts", int, "Maximum prompts of a request [default: 256]."),
    "max_logprobs": ("--max-logprobs", int, "Maximum log-probabilities of a token [default: 20]."),
    "allow_priority": ("--allow-priority", bool, "Let requests choose a priority below 0."),
    "allow_lora_loading": ("--allow-lora-loading", bool, "Let requests load LoRA adapters by path."),
    "enable_sleep_mode": ("--enable-sleep-mode", bool, "Serve /sleep and /wake_up; --model-ttl holds for all models."),
    "trust_request_chat_template": ("--trust-request-chat-template", bool, "Take chat templates from requests."),
    "tool_call_parser": ("--tool-call-parser", str, "Format of tool calls, in vLLM's names [default: the template's]."),
    "reasoning_parser": ("--reasoning-parser", str, "Format of reasoning, in vLLM's names [default: the template's]."),
    "otlp_traces_endpoint": (
        "--otlp-traces-endpoint",
        str,
        "OTLP/HTTP endpoint for a span per request, .../v1/traces [default: none].",
    ),
    "sse_keep_alive_seconds": (
        "--sse-keep-alive-interval",
        float,
        "Maximum seconds of silence in a stream; 0: any [default: 15].",
    ),
}
BODIES = (
    *("model_names", "depth_aliases", "allow_depth", "lock_depth", "max_prompts", "max_logprobs", "allow_priority"),
    *("trust_request_chat_template", "tool_call_parser", "reasoning_parser"),
)
"""Of these, what is about the bodies of requests, be there a server or not."""
LIMITS: OptionTable = {
    "max_queue": ("--max-queue", int, "Maximum waiting sequences [default: 4 times --max-num-seqs]."),
    "max_body_bytes": ("--max-body-bytes", int, "Maximum bytes of a request [default: 8 MiB]."),
    "max_request_work": (
        "--max-request-work",
        int,
        "Maximum characters and list entries of a request, times its answers [default: --max-body-bytes].",
    ),
    "max_connections": ("--max-connections", int, "Maximum open connections [default: 1024]."),
    "timeouts": (
        "--timeout",
        list[str],
        "NAME=SECONDS, repeatable: header of a request (10), body (60), request as a whole (none), write to a slow "
        "client (60), keep-alive of an idle connection (5), shutdown after SIGTERM or Ctrl-C (30).",
    ),
    "health_stall_seconds": (
        "--health-stall-seconds",
        float,
        'Seconds without a step until /health reports "hung" [default: 60].',
    ),
    "metrics_prefix": ("--metrics-prefix", str, "Prefix of all metric names [default: d3engine]."),
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
    "models": ("--model", list[str], "Additional model, loaded when a request names it; repeatable."),
    "ttl": (
        "--model-ttl",
        float,
        "Idle seconds until an additional model is unloaded, with --enable-sleep-mode any [default: never].",
    ),
}
ADAPTERS: OptionTable = {
    "lora_modules": ("--lora-modules", list[str], "LoRA adapter to serve, NAME=PATH; repeatable."),
    "max_lora_rank": ("--max-lora-rank", int, "Maximum rank of an adapter [default: 16]."),
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


_takes_what = partial(takes_options, name="what", panel=TABLES["what"][0])
takes_bodies = partial(_takes_what, table={name: WHAT[name] for name in BODIES})
takes_ids = partial(_takes_what, table={name: WHAT[name] for name in ("model_names", "depth_aliases")})


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
    keys = [*who.pop("api_keys", ()), *_keys_of_file(who.pop("api_key_file", None))]
    keys += [key.strip() for key in API_KEY.read().split(",") if key.strip()]
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
    return path.resolve().name if os.path.exists(path) else model


def _keys_of_file(file: Path | None) -> list[str]:
    if file is None:
        return []
    keys = [line.strip() for line in text_of("--api-key-file", file).splitlines() if line.strip()]
    require(len(keys) > 0, "--api-key-file", str(file), "a file with a key in it")
    return keys


def _alias(given: str) -> tuple[str, DepthPolicy]:
    name, separator, words = given.partition("=")
    require(bool(separator and name), "--depth-alias", given, "ID=POLICY, with the policy's options as option=value")
    policy = parse_depth(words, "--depth-alias")
    if policy == AUTO:
        raise InvalidValueError("--depth-alias", given, "ID=POLICY; the model's own depth has ids already")
    return name, policy

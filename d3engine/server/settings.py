"""What the operator of the server decides, and a request may not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import POLICIES
from d3engine.errors import NOTHING, InvalidValueError, require
from d3engine.server.middleware.settings import GuardSettings
from d3engine.utils.arguments import Integers, Numbers, argument, check_arguments

NEVER_BY_REQUEST = ("speculative", "table")
"""Policies that no request may name: one loads a model from a path, the other may be as long as its sender likes."""

TRACES_ENDPOINT = re.compile(r"https?://[^/\s?#@]+/[^\s?#]*")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything the routes may be told; checked here, when the server starts.

    Args:
        model_names: the ids under which the model is served at the server's own depth; the first names it in answers.
        depth_aliases: further ids, each of which stands for the model at one depth.
        allow_depth: names of the policies that a request may ask for; the server's own is always allowed.
        lock_depth: refuse every depth that a request brings.
        max_depth_policies: different policies of requests that may be unfinished at once.
        max_prompts: of one request.
        max_logprobs: of one token, at most, that a request may ask for.
        allow_priority: let requests choose one below 0, which puts them before others.
        allow_lora_loading: let requests load and unload LoRA adapters, which they name by paths of this machine.
        enable_sleep_mode: let requests free the memory of models, which the next request for one loads again.
        trust_request_chat_template: let a request bring a chat template of its own.
        tool_call_parser: the format of the model's calls, in vLLM's names; "auto": as the chat template has it; "none".
        reasoning_parser: the format of its reasoning, likewise.
        sse_keep_alive_seconds: a silent stream says this often that it is alive; 0: never.
        otlp_traces_endpoint: where spans of requests go, as OTLP over HTTP (extra `otel`); None: there are none.
        guards: who may call, how much they may send and how long anything may take.
    """

    model_names: tuple[str, ...]
    depth_aliases: Mapping[str, DepthPolicy] = field(default_factory=dict)
    allow_depth: tuple[str, ...] = ("d3", "full")
    lock_depth: bool = False
    max_depth_policies: int = argument(16, Integers(1))
    max_prompts: int = argument(256, Integers(1))
    max_logprobs: int = argument(20, Integers(0))
    allow_priority: bool = False
    allow_lora_loading: bool = False
    enable_sleep_mode: bool = False
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    sse_keep_alive_seconds: float = argument(15.0, Numbers(0, 86400))
    otlp_traces_endpoint: str | None = None
    guards: GuardSettings = field(default_factory=GuardSettings)

    def __post_init__(self) -> None:
        require(len(self.model_names) > 0, "model_names", self.model_names, "at least one id")
        ids = [*self.model_names, *self.depth_aliases]
        for name in ids:
            fits = isinstance(name, str) and 0 < len(name) <= 256 and name.isprintable()
            require(fits, "model_names", name, "ids of 1 to 256 printable characters")
        require(len(set(ids)) == len(ids), "depth_aliases", ids, "ids that differ from each other and the model's")
        allowed = [name for name in POLICIES if name not in NEVER_BY_REQUEST]
        for name in self.allow_depth:
            require(name in allowed, "allow_depth", name, f"names out of {', '.join(allowed)}")
        check_arguments(self)
        if self.otlp_traces_endpoint is not None and TRACES_ENDPOINT.fullmatch(self.otlp_traces_endpoint) is None:
            shown = NOTHING if "@" in self.otlp_traces_endpoint else self.otlp_traces_endpoint  # never a password
            words = 'a whole URL like "http://127.0.0.1:4318/v1/traces", without a name or a password'
            raise InvalidValueError("otlp_traces_endpoint", shown, words)
        from d3engine.server.requests.formats import reasoning_format_named, tool_format_named

        if self.tool_call_parser not in ("auto", "none"):
            tool_format_named(self.tool_call_parser)
        if self.reasoning_parser not in ("auto", "none"):
            reasoning_format_named(self.reasoning_parser)

"""NVIDIA Dynamo: an engine for its workers, token ids in and token ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.depth import DepthPolicy
from d3engine.errors import MissingExtraError, require
from d3engine.integrations.asgi import FIELDS, FieldReader
from d3engine.request.outputs import CompletionOutput, RequestOutput
from d3engine.request.params import RequestOutputKind
from d3engine.server.metrics import Exposition
from d3engine.server.settings import ServerSettings

try:
    from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
    from dynamo.common.backend.run import run
    from dynamo.common.backend.worker import WorkerConfig
except ImportError as error:
    raise MissingExtraError(error.name or "ai-dynamo", "dynamo", "d3engine integrations dynamo") from None

# Dynamo's frontend speaks OpenAI's API and (de)tokenizes. It passes on unread only one field of a request, the model's
# id; so the id selects the depth, as our server's aliases do.
BY_DYNAMO = ("stop", "max_thinking_tokens", "apply_context_length_limit")
"""Stop conditions that the frontend applies, or that have no effect here."""
RENAMED = {"stop_token_ids_hidden": "stop_token_ids", "guided_decoding": "structured_outputs"}
FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}


class DynamoEngine(LLMEngine):  # type: ignore[misc]  # untyped
    """An engine with the interface of a Dynamo worker.

    Args:
        make: loads the engine.
        directory: of the model; Dynamo's frontend reads tokenizer and chat template there.
        name: the model's id at the engine's default depth.
        aliases: further ids, each with a depth policy.
    """

    def __init__(
        self, make: Callable[[], AsyncEngine], directory: str, name: str, aliases: Mapping[str, DepthPolicy]
    ) -> None:
        self._make = make
        self._directory = directory
        self._name = name
        self._aliases = aliases
        self._engine: AsyncEngine | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Called by Dynamo's launcher, which is not supported: `d3engine integrations dynamo` reads the options."""
        raise NotImplementedError("a worker is started by `d3engine integrations dynamo`, which reads the options")

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the engine and report its capacity."""
        self._engine = engine = self._make()
        self._reader = FieldReader(engine, ServerSettings(model_names=(self._name,), depth_aliases=self._aliases))
        settings, stats = engine.settings, await engine.stats()
        capacity = LlmRegistration(
            context_length=engine.max_model_len,
            kv_cache_block_size=settings.block_size,
            total_kv_blocks=stats.kv_blocks_total // engine.config.num_layers,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )
        aliases = list(self._aliases)
        return EngineConfig(self._directory, self._name, llm=capacity, model_aliases=aliases)

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The tokens of one request as they are sampled. Dynamo closes the generator when the client leaves."""
        assert self._engine is not None
        params = self._reader.params(self._fields(request), RequestOutputKind.DELTA, detokenize=False)
        given = self._engine.generate(list(request["token_ids"]), params)
        num_tokens = 0
        async with aclosing(given) as outputs:
            async for output in outputs:
                for answer in output.outputs:
                    num_tokens += len(answer.token_ids)
                    yield _chunk(output, answer, num_tokens)
                if context.is_stopped():
                    return

    async def register_prometheus(self, metrics: Any) -> None:
        """Add the engine's metrics to the worker's /metrics, under our server's names."""
        assert self._engine is not None
        engine, exposition = self._engine.sync(), Exposition("d3engine")
        metrics.register_prometheus_expfmt_callback(lambda: exposition.text_of_engine(engine.stats()).decode())

    async def cleanup(self) -> None:
        """End the engine; called when the worker ends, even if `start` has failed."""
        if self._engine is not None:
            await self._engine.close()

    def _fields(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request's parameters by our names. Raises `InvalidValueError` for unsupported ones."""
        asked: dict[str, Any] = {**(request.get("sampling_options") or {}), **(request.get("stop_conditions") or {})}
        fields: dict[str, Any] = {}
        for name, value in asked.items():
            own = RENAMED.get(name, name)
            if name not in BY_DYNAMO and value is not None and (value or own in FIELDS):
                fields[own] = value
        if asked.get("stop_token_ids") and asked.get("stop_token_ids_hidden"):
            fields["stop_token_ids"] = sorted({*asked["stop_token_ids"], *asked["stop_token_ids_hidden"]})
        for name, value in (request.get("output_options") or {}).items():
            refused = name in ("logprobs", "prompt_logprobs") and value is not None
            require(not refused, name, value, "absent behind Dynamo")
        if request.get("model") in self._aliases:
            fields["depth"] = request["model"]
        return fields


def _chunk(output: RequestOutput, answer: CompletionOutput, num_tokens: int) -> dict[str, Any]:
    chunk: dict[str, Any] = {"token_ids": answer.token_ids, "index": answer.index}
    if answer.finish_reason is not None:
        chunk["finish_reason"] = FINISH_REASONS[answer.finish_reason]
        num_prompt = len(output.prompt_token_ids)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        chunk["completion_usage"] = usage
    return chunk


def run_worker(engine: DynamoEngine, **worker: Any) -> None:
    """Serve requests of Dynamo's frontends until a signal; `worker` are arguments of its `WorkerConfig`."""

    async def make(_: object) -> tuple[DynamoEngine, WorkerConfig]:
        return engine, WorkerConfig(**worker)

    run(DynamoEngine, engine_factory=make)

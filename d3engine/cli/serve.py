"""`d3engine serve MODEL`: serve a model over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from d3engine.cli.commands import ExitCode, new_app, note
from d3engine.cli.depth_options import Depth, takes_depth
from d3engine.cli.engine_options import (
    Model,
    Options,
    engine_arguments,
    model_directory,
    takes_engine,
    tell_own_setting,
)
from d3engine.cli.server_options import require_server_packages, server_settings, takes_server
from d3engine.errors import D3EngineError, require, require_integer, require_number
from d3engine.server.middleware.settings import LONGEST
from d3engine.utils.garbage import freeze_loaded
from d3engine.utils.version import __version__

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine
    from d3engine.engine.settings import EngineSettings
    from d3engine.engine.stats import EngineStats
    from d3engine.server.models import FurtherModel, FurtherModels
    from d3engine.server.settings import ServerSettings
    from d3engine.server.state import AppState

app = new_app()

EngineProcess: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--engine-process/--no-engine-process",
        help="Run the engine in a separate process [default: on a GPU].",
        show_default=False,
        rich_help_panel="Engine",
    ),
]
StreamInterval: TypeAlias = Annotated[
    int,
    typer.Option(
        "--stream-interval",
        help="Tokens per event of a stream; the first and the last are sent at once [default: 1].",
        show_default=False,
        rich_help_panel="Engine",
    ),
]

LOOPS_CORE = 1
"""Cores that computing leaves to the event loop, as far as there are more."""


@app.command()
@takes_depth
@takes_engine
@takes_server
def serve(
    engine_options: Options,
    who: Options,
    what: Options,
    limits: Options,
    further: Options,
    adapters: Options,
    depth: Depth,
    model: Model = "demo",
    engine_process: EngineProcess = None,
    stream_interval: StreamInterval = 1,
) -> None:
    """Serve models over HTTP for the clients of OpenAI, Anthropic and Ollama.

    Ctrl-C or SIGTERM stops the server after the answers in progress; a second one stops it at once. -v logs every
    request.
    """
    settings = server_settings(model, who, what, limits)
    require_integer("--stream-interval", stream_interval, 1)
    model_directory(model)
    if "ttl" in further:
        require_number("ttl", further["ttl"], 0, LONGEST, open_low=True)
    require_server_packages("d3engine serve")
    if settings.otlp_traces_endpoint is not None:
        from d3engine.server.tracing import require_tracing_packages

        require_tracing_packages("--otlp-traces-endpoint")
    from d3engine.server.running import bind

    with bind(settings.guards) as bound:
        from d3engine.async_engine.async_engine import AsyncEngine
        from d3engine.engine.engine_config import EngineConfig
        from d3engine.engine.resolve import resolve_settings
        from d3engine.server.models import FurtherModels

        transport = {None: "auto", True: "process", False: "thread"}[engine_process]

        def arguments_of(name: str, max_model_len: int | None) -> dict[str, Any]:
            options = {**engine_options, "max_model_len": max_model_len}
            arguments: dict[str, Any] = engine_arguments(name, options, LOOPS_CORE)
            if name == model:  # adapters are of the first model, and a file keeps the prefixes of one
                arguments |= adapters
            else:
                arguments.pop("prefix_cache_file", None)
            return {"model": name, "depth": depth, "stream_interval": stream_interval, **arguments}

        def load(name: str, max_model_len: int | None) -> AsyncEngine:
            return AsyncEngine(transport=transport, **arguments_of(name, max_model_len))

        def settings_of(name: str, max_model_len: int | None) -> EngineSettings:
            return resolve_settings(EngineConfig(**arguments_of(name, max_model_len)))

        names = [model, *further.get("models", [])]
        length, models, taken, room = _further_models(names, settings, engine_options, load, settings_of)
        engine = load(model, length)
        if depth == "auto":
            tell_own_setting(engine, model)
        make = partial(FurtherModels, models, first_bytes=taken, room_bytes=room, ttl=further.get("ttl"))
        raise typer.Exit(_run(engine, settings, bound, model, make))


def _further_models(
    names: list[str],
    settings: ServerSettings,
    engine_options: Options,
    load: Callable[[str, int | None], AsyncEngine],
    settings_of: Callable[[str, int | None], EngineSettings],
) -> tuple[int | None, list[FurtherModel], int, int | None]:
    """The first model's length, those beside it, its bytes, and those that the others may take together.

    The last is None where nothing says it. Without an option that says otherwise a further model's length is one for
    which there is room beside the first.

    Raises `InvalidValueError` for a model that is not there, or does not fit beside the first.
    """
    from d3engine.cli.server_options import own_name
    from d3engine.engine.device import resolve_device
    from d3engine.engine.host import GIB, machine_bytes
    from d3engine.engine.memory import CPU_CACHE_BYTES, CPU_MEMORY_SHARE, LEAST_LENGTH, num_blocks
    from d3engine.engine.model_directory import model_files
    from d3engine.model.config import ModelConfig
    from d3engine.server.models import FurtherModel

    def file_bytes(directory: Path) -> int:  # which the weights take too, about
        return sum(file.stat().st_size for file in model_files(directory))

    most, kv_bytes = engine_options.get("max_model_len"), engine_options.get("kv_cache_memory_bytes")
    is_on_cpu = resolve_device(engine_options.get("device", "auto")).type == "cpu"

    def with_cache(name: str, length: int | None) -> tuple[int | None, int]:
        """The length that a model's engine has, and the bytes of its KV cache."""
        if not is_on_cpu:
            return length, kv_bytes or CPU_CACHE_BYTES
        own = settings_of(name, length)
        return own.max_model_len, num_blocks(own, lambda: 0) * own.block_bytes

    first, *others = names
    machine = machine_bytes()
    taken = [*settings.model_names, *settings.depth_aliases]
    found: list[FurtherModel] = []
    first_length, cache = with_cache(first, most) if others else (most, 0)
    first_bytes = file_bytes(model_directory(first)) + cache
    room = None if machine is None else int(CPU_MEMORY_SHARE * machine) - first_bytes
    for name in others:
        directory, own = model_directory(name), own_name(name)
        require(own not in taken, "--model", name, "a model of another name than those that are served")
        taken.append(own)
        config, weights = ModelConfig.from_directory(directory), file_bytes(directory)
        length, cache = with_cache(name, None if most is None else min(most, config.max_position_embeddings))
        if room is not None and length is not None and most is kv_bytes is None and weights + cache > room:
            fits = int((room - weights) / cache * length) // 256 * 256  # a cache of more than its least grows so
            if fits >= LEAST_LENGTH:
                note(f"{own}: max_model_len is {fits:,}, what the memory has room for beside {first}")
                length, cache = with_cache(name, fits)
        needed = weights + cache
        allowed = f"a model that fits beside {first}: it takes about {needed / GIB:.1f} GiB with its KV cache, and"
        allowed += f" {max(0, room or 0) / GIB:.1f} GiB are left (--max-model-len and --kv-cache-memory-bytes make"
        allowed += " caches smaller)"
        require(room is None or needed <= room, "--model", name, allowed)
        found.append(FurtherModel(own, partial(load, name, length), needed, directory, config, length))
    return first_length, found, first_bytes, room


def _run(
    engine: AsyncEngine,
    settings: ServerSettings,
    bound: socket.socket,
    model: str,
    further: Callable[[AppState], FurtherModels],
) -> ExitCode:
    """Serve until a signal comes; how it ended."""
    from d3engine.server.app import create_app
    from d3engine.server.running import GuardedServer

    served = create_app(engine, settings, further)
    models: FurtherModels = served.state.further
    server = GuardedServer(served, settings.guards, served.state.traffic, note)

    async def run() -> None:
        try:
            stats = await engine.stats()
            # Open the template's files and process before they can run out; each chat reports an unusable one itself.
            with suppress(D3EngineError):
                await engine.chat_template()
            freeze_loaded()
            server.when_started(lambda: _introduce(engine, settings, bound, model, stats, models))
            models.begin()
            await server.serve([bound])
        finally:
            await models.close()
            await engine.close()

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        try:
            runner.run(run())
        finally:
            if (tracer := served.state.served.tracer) is not None:
                tracer.close()
    if server.num_cut:
        note(f"ended; {server.num_cut} answers were cut off")
        return ExitCode.FAILED
    note("ended; every answer was complete")
    return ExitCode.DONE


def _introduce(
    engine: AsyncEngine,
    settings: ServerSettings,
    bound: socket.socket,
    model: str,
    stats: EngineStats,
    further: FurtherModels,
) -> None:
    """What is served, by what, where and to whom."""
    from d3engine.depth.labels import policy_in_words
    from d3engine.server.running import address_of

    guards = settings.guards
    address = address_of(guards.host, bound.getsockname()[1])
    ids = ", ".join([*settings.model_names, *settings.depth_aliases, *engine.lora_adapters])
    dtype = str(engine.dtype).removeprefix("torch.")
    held = stats.kv_blocks_total // engine.config.num_layers * engine.settings.block_size
    who = "this machine" if guards.is_local else "everybody who reaches the port"
    lines: dict[str, Any] = {
        "model": f"{model}, {engine.config.num_layers} layers, as {ids}",
        **({"also": ", ".join(one.name for one in further.models) + ", when asked for"} if further.models else {}),
        "depth": policy_in_words(engine.depth),
        "runs": f"{stats.executor}, {dtype}{', in a separate process' if engine.has_process else ''}",
        "room": f"a KV cache of {held:,} tokens at full depth; at most {engine.settings.max_num_seqs} sequences, each "
        f"of at most {engine.max_model_len:,} tokens",
        "open to": f"{who}, {'with a key' if guards.api_keys else 'without a key'}",
        "address": f"{address}/v1",
        "page": f"{address}/",
    }
    note(f"d3engine {__version__} serves:")
    for name, said in lines.items():
        note(f"  {name:<9}{said}")
    note("Ctrl-C ends it when the answers in progress are complete.")

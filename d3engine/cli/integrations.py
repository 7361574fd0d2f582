"""`d3engine integrations`: what other serving stacks need to run the engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3engine.cli.commands import new_app, note
from d3engine.cli.depth_options import Depth, takes_depth
from d3engine.cli.engine_options import (
    ENGINE,
    Model,
    Options,
    engine_arguments,
    model_directory,
    takes_engine,
    takes_options,
)
from d3engine.cli.serve import LOOPS_CORE
from d3engine.cli.server_options import served_as, takes_ids
from d3engine.depth import DepthPolicy
from d3engine.errors import require

if TYPE_CHECKING:
    from d3engine.async_engine.async_engine import AsyncEngine

app = new_app(help="Write what other serving stacks need to run the engine.", no_args_is_help=True)

PLAIN_ENGINE = {name: option for name, option in ENGINE.items() if name not in ("admission", "threads")} | {
    "num_threads": ("--threads", int, "CPU threads (as many as the process may use CPUs).")
}
"""The engine's arguments that a file can hold."""


@app.command("triton-repository")
@takes_depth
@partial(takes_options, name="engine_options", table=PLAIN_ENGINE, panel="Engine")
def triton_repository(
    engine_options: Options,
    depth: Depth,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model repository; made where it is not there.")],
    model: Model = "demo",
    name: Annotated[str, typer.Option("--name", help="What Triton calls the model.")] = "d3",
) -> None:
    """Write a model for NVIDIA Triton Inference Server, which its Python backend runs.

    d3engine must be installed in the Python that Triton runs its models in.
    """
    from d3engine.integrations.triton_repository import write_triton_repository

    directory = model_directory(model)
    arguments = dict(engine_options)
    if isinstance(depth, DepthPolicy):
        arguments["depth"] = depth.describe()
    given = str(directory.resolve()) if Path(model).exists() else model
    on_gpu = str(arguments.get("device", "")).startswith("cuda")
    written = write_triton_repository(out, name, given, arguments, on_gpu=on_gpu)
    note(f"{written} is written; tritonserver --model-repository {out} runs it.")


@app.command()
@takes_depth
@takes_engine
@takes_ids
def dynamo(
    engine_options: Options,
    what: Options,
    depth: Depth,
    model: Model = "demo",
    namespace: Annotated[str, typer.Option("--namespace", help="Of Dynamo's workers.")] = "dynamo",
    discovery: Annotated[str, typer.Option("--discovery-backend", help="etcd, file, mem or kubernetes.")] = "etcd",
    request_plane: Annotated[str, typer.Option("--request-plane", help="tcp or nats.")] = "tcp",
    event_plane: Annotated[str, typer.Option("--event-plane", help="zmq or nats.")] = "zmq",
) -> None:
    """Run a model as a worker of NVIDIA Dynamo.

    Dynamo's frontends find it where --discovery-backend says, and hand it token ids.
    """
    from d3engine.integrations.dynamo import DynamoEngine, run_worker

    directory = model_directory(model)
    served = served_as(model, what)
    name, *others = served["model_names"]
    require(not others, "--served-model-name", others, "given once, since Dynamo takes one name for a depth")

    def load() -> AsyncEngine:
        from d3engine.async_engine.async_engine import AsyncEngine

        return AsyncEngine(model, depth=depth, **engine_arguments(model, engine_options, LOOPS_CORE))

    run_worker(
        DynamoEngine(load, str(directory), name, served["depth_aliases"]),
        namespace=namespace,
        component="d3engine",
        model_name=str(directory),
        served_model_name=name,
        discovery_backend=discovery,
        request_plane=request_plane,
        event_plane=event_plane,
    )

"""A model of Triton's Python backend, with the tensors of Triton's vLLM backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # which Triton puts on the path of its models

from d3engine.async_engine.async_engine import AsyncEngine
from d3engine.depth.policy import policy_from_dict
from d3engine.engine.stats import EngineStats
from d3engine.errors import D3EngineError, InvalidValueError, require
from d3engine.integrations.asgi import FieldReader
from d3engine.integrations.triton_repository import ARGUMENTS_FILE
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind
from d3engine.server.metrics import COUNTERS, GAUGES
from d3engine.utils.files import read_json

POLL_SECONDS = 0.1
"""Interval of checks whether a client has cancelled."""


class TritonPythonModel:
    """The class that Triton instantiates; `triton_repository` writes a `model.py` that imports it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine that `model.json` describes."""
        file = Path(args["model_repository"]) / args["model_version"] / ARGUMENTS_FILE
        arguments = read_json(file)
        if isinstance(arguments.get("depth"), dict):
            arguments["depth"] = policy_from_dict(arguments["depth"])
        self._engine = AsyncEngine(**arguments)
        self._reader = FieldReader(self._engine)
        self._metrics = _Metrics()
        self._metrics.update(self._engine.sync().stats())

    async def execute(self, requests: Sequence[Any]) -> None:
        """Answer requests, each in a task; Triton calls it again meanwhile."""
        await asyncio.gather(*map(self._answer, requests))

    def finalize(self) -> None:
        asyncio.run(self._engine.close())

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        answering = asyncio.create_task(self._send_answer(request, sender))
        while not (await asyncio.wait({answering}, timeout=POLL_SECONDS))[0]:
            if sender.is_cancelled():
                answering.cancel()
        try:
            await answering
        except asyncio.CancelledError:
            _send_error(sender, "the client has cancelled the request", pb_utils.TritonError.CANCELLED)
        except InvalidValueError as error:
            _send_error(sender, f"{error}.", pb_utils.TritonError.INVALID_ARG)
        except D3EngineError as error:
            _send_error(sender, f"{error}.", pb_utils.TritonError.UNAVAILABLE)
        except Exception as fault:
            pb_utils.Logger.log_error(f"a request failed: {fault!r}")
            _send_error(sender, "The model failed on this request.", pb_utils.TritonError.INTERNAL)
        with suppress(D3EngineError):  # the engine may have ended
            self._metrics.update(await self._engine.stats())

    async def _send_answer(self, request: Any, sender: Any) -> None:
        stream = bool(_input(request, "stream", False))
        params = self._reader.params(
            _object(_input(request, "sampling_parameters", b"{}")),
            RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        allowed = "1 where stream is true, since a piece does not say whose it is"
        require(params.n == 1 or not stream, "n", params.n, allowed)
        excludes = bool(_input(request, "exclude_input_in_output", stream))
        require(excludes or not stream, "exclude_input_in_output", excludes, "true, or absent, where stream is true")
        prompt = _input(request, "text_input", b"").decode()
        async with aclosing(self._engine.generate(prompt, params)) as outputs:
            async for output in outputs:
                last = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if output.finished else 0
                sender.send(_response(request, output, "" if excludes else prompt), flags=last)


class _Metrics:
    """The engine's metrics in Triton's /metrics, under our server's names, as of the last update."""

    def __init__(self) -> None:
        families = pb_utils.MetricFamily
        gauges = {name: families(f"d3engine:{name}", text, families.GAUGE) for name, text, _ in GAUGES}
        counters = {name: families(f"d3engine:{name}_total", text, families.COUNTER) for name, text, _ in COUNTERS}
        self._families = gauges, counters  # which must outlive their metrics
        self._gauges = {name: family.Metric(labels={}) for name, family in gauges.items()}
        self._counters = {name: family.Metric(labels={}) for name, family in counters.items()}

    def update(self, stats: EngineStats) -> None:
        for name, _, of in GAUGES:
            self._gauges[name].set(float(of(stats) or 0))
        for name, _, of in COUNTERS:
            counter = self._counters[name]
            counter.increment(of(stats) - counter.value())


def _response(request: Any, output: RequestOutput, before: str) -> Any:
    """The requested parts of an output; `before` is put before each text."""
    answers = output.outputs
    found = {
        "text_output": _texts(before + answer.text for answer in answers),
        "finish_reason": _texts(answer.finish_reason or "" for answer in answers),
        "num_output_tokens": np.array([len(answer.token_ids) for answer in answers], dtype=np.uint32),
        "token_ids": np.array([token for answer in answers for token in answer.token_ids], dtype=np.int32),
        "depths": np.array([depth for answer in answers for depth in answer.depths], dtype=np.int32),
    }
    wanted = request.requested_output_names()
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, found[name]) for name in found if name in wanted])


def _texts(texts: Any) -> np.ndarray[Any, Any]:
    return np.array([text.encode() for text in texts], dtype=np.object_)


def _input(request: Any, name: str, default: Any) -> Any:
    """The single element of an optional input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _object(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError("sampling_parameters", text.decode(errors="replace"), f"JSON ({error})") from None


def _send_error(sender: Any, message: str, code: Any) -> None:
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

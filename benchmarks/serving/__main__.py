"""`python -m benchmarks.serving`: what it takes, and one run from its servers to its tables."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import serving
from benchmarks.report import Parser, settings_of, summary
from benchmarks.serving.processes import Place, d3engine_server, llama_server
from benchmarks.serving.rounds import OURS, PATTERNS, PEER, Settings, measure, num_rounds, weights_for_peer
from benchmarks.serving.tables import markdown, show
from benchmarks.serving.vllm_client import VllmClient

ROUND: dict[str, Any] = {"models": ("demo", "smollm2"), "arrivals": tuple(PATTERNS), "weight_dtype": "bfloat16"}
"""What `--round` stands for, where nothing else is given."""
ROUND_TOKENS = {"demo": 64, "smollm2": 32}
VLLM_STREAMS, VLLM_REQUESTS = 64, 256


def run(settings: Settings, vllm: str | None, budget: float) -> dict[str, Any]:
    """All that is asked for, model by model; what does not begin within `budget` seconds is left out by name."""
    began = time.monotonic()
    report: dict[str, Any] = {"benchmark": "serving", "settings": asdict(settings), "models": [], "left_out": []}
    by_model = [replace(settings, tokens=ROUND_TOKENS.get(model, settings.tokens)) for model in settings.models]
    with tqdm(unit="round", total=sum(map(num_rounds, by_model)) + 2 * bool(vllm)) as bar:
        for model, own in zip(settings.models, by_model, strict=True):
            if time.monotonic() - began > budget:
                report["left_out"].append(model)
                continue
            with _peer_file(model, settings) as file:
                report["models"].append(measure(own, model, file, bar))
                if vllm and model == settings.models[0]:
                    rows = report["models"][-1]["vllm_client"] = _by_vllm(own, model, file, vllm, bar)
                    report["left_out"] += _unanswered(rows)
    report["seconds"] = time.monotonic() - began
    return report


def _peer_file(model: str, settings: Settings) -> contextlib.AbstractContextManager[Path | None]:
    return weights_for_peer(model, settings.weight_dtype) if settings.peer else contextlib.nullcontext()


def _by_vllm(settings: Settings, model: str, file: Path | None, vllm: str, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """vLLM's own client before ours and before llama.cpp's."""
    from d3engine.engine.model_directory import model_directory

    bar.set_description(f"{model}, vllm bench serve")
    client = VllmClient(vllm, model_directory(model))
    place = Place(model, settings.weight_dtype, settings.threads)
    servers = {OURS: lambda: d3engine_server(place, VLLM_STREAMS)}
    if file is not None:
        servers[PEER] = lambda: llama_server(str(file), place, VLLM_STREAMS)
    rows = []
    for name, start in servers.items():
        with start() as server:
            before = server.cpu_seconds()
            found = client.streams(server.url, server.model_name(), VLLM_STREAMS, VLLM_REQUESTS, settings.tokens)
            found["cpu_per_token"] = (server.cpu_seconds() - before) / found["tokens"]
        if found["unanswered"] and name == OURS:
            raise SystemExit(f"vllm bench serve had no answer to {found['unanswered']:.0f} of {VLLM_REQUESTS} requests")
        values = {figure: summary([value]) for figure, value in found.items()}
        rows.append({"streams": VLLM_STREAMS, "system": name, "depth": "full", **values})
        bar.update()
    if len(rows) > 1:
        ours, peer = rows
        ours["over_peer"] = ours["tokens_per_second"]["median"] / peer["tokens_per_second"]["median"]
        ours["over_peer_cpu"] = peer["cpu_per_token"]["median"] / ours["cpu_per_token"]["median"]
    return rows


def _unanswered(rows: list[dict[str, Any]]) -> list[str]:
    """What the peer's figures leave out."""
    lost = {row["system"]: int(row["unanswered"]["median"]) for row in rows}
    return [f"{many} requests of vllm bench serve without an answer of {name}" for name, many in lost.items() if many]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = Parser("serving", serving.__doc__, arguments, Settings)
    parser.add_argument("--round", action="store_true", help="both models, streams and arrivals: all of the page")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp's server")
    parser.add_argument("--vllm", metavar="COMMAND", help="the `vllm` of an environment that has it, as second client")
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no model is begun")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    given = parser.given()
    has_peer = not given.no_peer and find_spec("xllamacpp") is not None
    usual = {name: value for name, value in ROUND.items() if given.round and not getattr(given, name)}
    settings = settings_of(Settings, given, **usual, peer=has_peer)
    report = run(settings, given.vllm, given.budget)
    if not has_peer:
        report["left_out"].append("llama.cpp's server (pip install xllamacpp)")
    parser.publish(report, show, width=180)
    if given.markdown:
        print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

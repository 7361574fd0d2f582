"""`python -m benchmarks.serving`: what it takes, and one run from its servers to its tables."""

from __future__ import annotations

import argparse
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
from benchmarks.report import environment, positive, summary, tell
from benchmarks.serving.asking import DEPTHS
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
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    assert serving.__doc__ is not None
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=serving.__doc__.splitlines()[0])
    parser.add_argument("--round", action="store_true", help="both models, streams and arrivals: all of the page")
    parser.add_argument("--models", nargs="+", help="what `d3engine serve` takes (demo)")
    parser.add_argument("--streams", nargs="+", type=positive, default=defaults.streams, help="requests at once")
    parser.add_argument("--depths", nargs="+", choices=list(DEPTHS), default=defaults.depths)
    parser.add_argument("--arrivals", nargs="+", choices=list(PATTERNS), help="requests at times of their own, as well")
    parser.add_argument("--load", type=float, default=defaults.load, help="their share of what the slowest can answer")
    parser.add_argument("--waves", type=positive, default=defaults.waves, help="steps of a wave of admission")
    parser.add_argument("--tokens", type=positive, default=defaults.tokens, help="new tokens per request")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="of a round at least")
    parser.add_argument("--repeats", type=positive, default=defaults.repeats, help="rounds")
    parser.add_argument("--threads", type=positive, default=defaults.threads, help="of each server")
    parser.add_argument("--weight-dtype", choices=["auto", "float32", "bfloat16"], help="of all of them (auto)")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp's server")
    parser.add_argument("--engine-process", action="store_true", help="also with the engine in a process of its own")
    parser.add_argument("--vllm", metavar="COMMAND", help="the `vllm` of an environment that has it, as second client")
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no model is begun")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to this file")
    given = parser.parse_args(arguments)
    has_peer = not given.no_peer and find_spec("xllamacpp") is not None
    chosen = {name: getattr(given, name) for name in ("models", "arrivals", "weight_dtype") if getattr(given, name)}
    own = ("streams", "depths", "load", "waves", "tokens", "seconds", "repeats", "threads")
    settings = Settings(
        **{**(ROUND if given.round else {}), **{name: _frozen(value) for name, value in chosen.items()}},
        **{name: _frozen(getattr(given, name)) for name in own},
        peer=has_peer,
        engine_process=given.engine_process,
    )
    report = run(settings, given.vllm, given.budget)
    if not has_peer:
        report["left_out"].append("llama.cpp's server (pip install xllamacpp)")
    report["environment"] = environment("benchmarks.serving", arguments)
    tell(report, show, width=180, file=given.json)
    if given.markdown:
        print(markdown(report))
    return 0


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())

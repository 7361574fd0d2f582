"""Greedy decode: our engine at full depth, the same under D3, and transformers' `generate`, interleaved in one run.

Every figure is a ratio of two neighbours in time. A round runs the three systems one after the other,
each from the same short prompt to the same fixed number of new tokens; ratios are taken within a round, and the median
over the rounds is reported. What is timed is the whole call for all systems, so the prompt pass is in it for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.peak_memory import memory, memory_in_subprocess
from benchmarks.report import Parser, positive, summary, write_json
from benchmarks.systems import (
    DECAY,
    FULL,
    MODELS,
    PEER,
    PROMPT_TOKENS,
    SYSTEMS,
    Answers,
    Generate,
    Settings,
    decay_for,
    model_at,
    new_engine,
    ours,
    prompts_for,
    rest,
    theirs,
    transformers_model,
    weights_of,
)
from d3engine.depth import FullDepth
from d3engine.depth.statistics import layer_bound
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights

# -- time ------------------------------------------------------------------------------------------------------


def measure(settings: Settings, *, with_memory: bool = True, show_progress: bool | None = None) -> dict[str, Any]:
    """Run all rounds and return the report, without its environment. Sets torch's number of threads."""
    torch.set_num_threads(settings.threads)
    with model_at(settings.model, PROMPT_TOKENS + settings.tokens) as directory:
        config = ModelConfig.from_directory(directory)
        weights = weights_of(directory, config)
        prompts = prompts_for(config, settings.batch)
        decay = decay_for(config.num_layers, settings.tokens)
        engine = new_engine(directory, weights, settings)
        peer = transformers_model(directory, config, weights)
        systems = {
            FULL: ours(engine, prompts, FullDepth(), settings.tokens),
            DECAY: ours(engine, prompts, decay, settings.tokens),
            PEER: theirs(peer, prompts, settings.tokens),
        }
        answers, seconds = run_rounds(systems, settings.repeats, show_progress)
    engine.close()
    report = {
        "benchmark": "decode",
        "settings": asdict(settings) | {"prompt_tokens": PROMPT_TOKENS, "dtype": "float32", "depth": decay.describe()},
        "model": describe(config, weights),
        "attention_of_transformers": peer.config._attn_implementation,
        **evaluate(settings, config, weights, answers, seconds),
    }
    del systems, engine, peer, weights
    gc.collect()
    if with_memory:
        for system in tqdm(SYSTEMS, "memory", disable=_hide(show_progress)):
            report["systems"][system]["memory"] = memory_in_subprocess(system, settings)
    return report


def run_rounds(
    systems: dict[str, Generate], repeats: int, show_progress: bool | None
) -> tuple[dict[str, Answers], dict[str, list[float]]]:
    """One warm-up of each system, whose answers are kept, then the rounds: seconds by system, one a round."""
    answers: dict[str, Answers] = {}
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    with tqdm(total=(repeats + 1) * len(systems), unit="run", disable=_hide(show_progress)) as bar:
        for turn in range(repeats + 1):
            for system, generate in systems.items():
                bar.set_description(system)
                rest()
                start = time.perf_counter()
                given = generate()
                elapsed = time.perf_counter() - start
                if turn == 0:
                    answers[system] = given
                else:
                    seconds[system].append(elapsed)
                    assert given == answers[system], f"{system} has given another answer to the same prompts"
                bar.update()
    return answers, seconds


def _hide(show_progress: bool | None) -> bool | None:
    """tqdm's `disable`: None hides the bar where there is no terminal."""
    return None if show_progress is None else not show_progress


def evaluate(
    settings: Settings,
    config: ModelConfig,
    weights: LlamaWeights,
    answers: dict[str, Answers],
    seconds: dict[str, list[float]],
) -> dict[str, Any]:
    """Rates, ratios within rounds, and the realisation ratio: the speed-up of D3 over what its bytes allow."""
    for system in SYSTEMS:
        lengths = {len(row) for row in answers[system].token_ids}
        assert lengths == {settings.tokens}, f"{system} was to generate {settings.tokens} tokens, not {lengths}"
    num_tokens = settings.tokens * settings.batch
    layer_bytes, head_bytes = _layer_bytes(weights), _head_bytes(weights)
    systems: dict[str, Any] = {}
    for system in SYSTEMS:
        depths = _depths_of_steps(answers[system]) or [config.num_layers] * settings.tokens
        moved = sum(depths) * layer_bytes + len(depths) * head_bytes
        systems[system] = {
            "seconds": summary(seconds[system]),
            "tokens_per_second": summary([num_tokens / s for s in seconds[system]]),
            "mean_layers": sum(depths) / len(depths),
            "weight_bytes_moved": moved,
            "gigabytes_per_second": summary([moved / s / 1e9 for s in seconds[system]]),
        }
    speedup = _ratio(seconds[FULL], seconds[DECAY])
    bound = layer_bound(
        _depths_of_steps(answers[DECAY]),
        num_layers=config.num_layers,
        layer_size=layer_bytes,
        head_size=head_bytes,
    )
    ours_tokens, peer_tokens = answers[FULL].token_ids, answers[PEER].token_ids
    return {
        "systems": systems,
        "full_depth_over_transformers": _ratio(seconds[PEER], seconds[FULL]),
        "d3_over_transformers": _ratio(seconds[PEER], seconds[DECAY]),
        "d3_over_full_depth": speedup,
        "layer_bound": bound,
        "realisation_ratio": speedup["median"] / bound,
        "tokens_equal": ours_tokens == peer_tokens,
        "first_difference": [_first_difference(*rows) for rows in zip(ours_tokens, peer_tokens, strict=True)],
    }


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, Any]:
    """How many times faster, round by round."""
    return summary([a / b for a, b in zip(slower, faster, strict=True)])


def _depths_of_steps(answers: Answers) -> list[int]:
    """Layers that each engine step ran: all rows start together, so they are of one depth."""
    if not answers.depths:
        return []
    assert all(row == answers.depths[0] for row in answers.depths), "the rows of the batch did not stay in step"
    return answers.depths[0]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def _layer_bytes(weights: LlamaWeights) -> int:
    return sum(tensor.nbytes for tensor in weights.layers[0].tensors())


def _head_bytes(weights: LlamaWeights) -> int:
    return weights.final_norm.nbytes + weights.lm_head.nbytes


def describe(config: ModelConfig, weights: LlamaWeights) -> dict[str, Any]:
    """The sizes that the figures depend on; the embedding is not read but for one row per token, so it is not moved."""
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "parameters": weights.nbytes // torch.float32.itemsize,
        "weight_bytes": weights.nbytes,
        "layer_bytes": _layer_bytes(weights),
        "head_bytes": _head_bytes(weights),
        "kv_bytes_per_token": 2 * config.num_layers * config.kv_size * torch.float32.itemsize,
    }


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print the model's card, one row a system, and the ratios."""
    settings, model = report["settings"], report["model"]
    console.print(
        f"{settings['model']}: {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers of"
        f" {model['layer_bytes'] / 1e6:.2f} MB, head {model['head_bytes'] / 1e6:.2f} MB,"
        f" KV {model['kv_bytes_per_token'] / 1024:.1f} KiB per token; float32, {settings['threads']} threads, batch"
        f" {settings['batch']}, {settings['prompt_tokens']} prompt + {settings['tokens']} new tokens,"
        f" {settings['repeats']} rounds"
    )
    depth = settings["depth"]
    names = {FULL: "full depth", DECAY: f"D3({depth['alpha']}, {depth['start']})", PEER: PEER}
    table = Table()
    for title in ("system", "tok/s", "min - max", "layers", "GB/s", "peak MiB"):
        table.add_column(title, justify="left" if title == "system" else "right", no_wrap=True)
    for system, row in report["systems"].items():
        rate = row["tokens_per_second"]
        peak = row["memory"]["peak_bytes"] / 2**20 if "memory" in row else None
        table.add_row(
            names[system],
            f"{rate['median']:.2f}",
            f"{rate['min']:.2f} - {rate['max']:.2f}",
            f"{row['mean_layers']:.2f}",
            f"{row['gigabytes_per_second']['median']:.2f}",
            "-" if peak is None else f"{peak:,.0f}",
        )
    console.print(table)
    ratios = Table("ratio", "median", "min - max")
    for name in ("full_depth_over_transformers", "d3_over_transformers", "d3_over_full_depth"):
        ratio = report[name]
        ratios.add_row(name.replace("_", " "), f"{ratio['median']:.3f}", f"{ratio['min']:.3f} - {ratio['max']:.3f}")
    ratios.add_row("layer bound of D3, head counted", f"{report['layer_bound']:.3f}", "")
    ratios.add_row("realisation ratio", f"{report['realisation_ratio']:.3f}", "")
    console.print(ratios)
    console.print("Timed: the whole call, prompt pass included, for every system alike. GB/s: weights read.")
    if report["tokens_equal"]:
        console.print("Full-depth tokens equal those of transformers.")
    else:
        console.print(f"[bold red]Full-depth tokens differ from transformers', first at {report['first_difference']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when the tokens differ from transformers'."""
    parser = Parser("decode", __doc__, arguments)
    parser.add_argument("--model", choices=MODELS, default="demo", help="demo: the bundled one; others are random")
    parser.add_argument("--tokens", type=positive, default=128, help="new tokens per prompt")
    parser.add_argument("--batch", type=positive, default=1, help="prompts at once")
    parser.add_argument("--repeats", type=positive, default=5, help="rounds")
    parser.add_argument("--threads", type=positive, default=2, help="torch's threads")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory (three more processes)")
    parser.add_argument("--memory-of", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.given()
    settings = Settings(options.model, options.tokens, options.batch, options.repeats, options.threads)
    if options.memory_of:
        print(json.dumps(memory(options.memory_of, settings)))
        return 0
    report = measure(settings, with_memory=not options.no_memory)
    report["environment"] = parser.environment()
    show(report, Console())
    if options.json:
        write_json(report, options.json)
    return 0 if report["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

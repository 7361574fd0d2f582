"""Greedy decode: our engine at full depth, the same under D3, and transformers' `generate`, interleaved in one run.

A round runs the three systems one after the other; ratios are taken within a round, and their median is reported.
Timed is the whole call of each, prompt pass included.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.children import checkout_environment
from benchmarks.report import Parser, print_table, ratios, settings_of, summary
from benchmarks.systems import (
    DECAY,
    FULL,
    PEER,
    PROMPT_TOKENS,
    SYSTEMS,
    Answers,
    Generate,
    Settings,
    decay_for,
    first_difference,
    in_rounds,
    model_at,
    new_engine,
    ours,
    prompts_for,
    theirs,
    transformers_model,
    weights_of,
)
from d3engine.depth import FullDepth
from d3engine.depth.statistics import layer_bound
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LlamaWeights
from d3engine.utils.children import python_command

# -- time ------------------------------------------------------------------------------------------------------


def measure(settings: Settings, *, with_memory: bool = True) -> dict[str, Any]:
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
        answers: dict[str, Answers] = {}
        turns = {name: partial(timed, name, generate, answers) for name, generate in systems.items()}
        with tqdm(total=(settings.repeats + 1) * len(turns), unit="run", disable=None) as bar:
            found = in_rounds(turns, settings.repeats, bar)
        seconds = {name: figures["seconds"]["rounds"] for name, figures in found.items()}
    engine.close()
    report = {
        "benchmark": "decode",
        "settings": asdict(settings) | {"prompt_tokens": PROMPT_TOKENS, "dtype": "float32", "depth": decay.describe()},
        "model": describe(config, weights),
        "attention_of_transformers": peer.config._attn_implementation,
        **evaluate(settings, config, weights, answers, seconds),
    }
    del systems, turns, engine, peer, weights
    gc.collect()
    if with_memory:
        for system in tqdm(SYSTEMS, "memory", disable=None):
            report["systems"][system]["memory"] = memory_in_subprocess(system, settings)
    return report


def timed(system: str, generate: Generate, answers: dict[str, Answers]) -> dict[str, float]:
    """The seconds of one call, whose answer is to be that of the warm-up, which `answers` keeps."""
    start = time.perf_counter()
    given = generate()
    elapsed = time.perf_counter() - start
    assert given == answers.setdefault(system, given), f"{system} has given another answer to the same prompts"
    return {"seconds": elapsed}


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
    speedup = summary(ratios(seconds[FULL], seconds[DECAY]))
    bound = layer_bound(
        _depths_of_steps(answers[DECAY]),
        num_layers=config.num_layers,
        layer_size=layer_bytes,
        head_size=head_bytes,
    )
    ours_tokens, peer_tokens = answers[FULL].token_ids, answers[PEER].token_ids
    return {
        "systems": systems,
        "full_depth_over_transformers": summary(ratios(seconds[PEER], seconds[FULL])),
        "d3_over_transformers": summary(ratios(seconds[PEER], seconds[DECAY])),
        "d3_over_full_depth": speedup,
        "layer_bound": bound,
        "realisation_ratio": speedup["median"] / bound,
        "tokens_equal": ours_tokens == peer_tokens,
        "first_difference": [first_difference(*rows) for rows in zip(ours_tokens, peer_tokens, strict=True)],
    }


def _depths_of_steps(answers: Answers) -> list[int]:
    """Layers that each engine step ran: all rows start together, so they are of one depth."""
    if not answers.depths:
        return []
    assert all(row == answers.depths[0] for row in answers.depths), "the rows of the batch did not stay in step"
    return answers.depths[0]


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


# -- memory ----------------------------------------------------------------------------------------------------


def memory_in_subprocess(system: str, settings: Settings) -> dict[str, Any]:
    """What `memory` returns, for one system alone in a fresh process."""
    options = [f"--{name}={getattr(settings, name)}" for name in ("model", "tokens", "batch", "threads")]
    command = python_command("-m", "benchmarks.decode", *options, f"--memory-of={system}")
    done = subprocess.run(command, env=checkout_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures the memory of {system} has failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory(system: str, settings: Settings) -> dict[str, Any]:
    """Resident bytes of this process with the model loaded, and at most while it answers twice.

    Where the kernel cannot forget an earlier peak (only Linux can), the peak is that of the whole process.
    """
    torch.set_num_threads(settings.threads)
    with model_at(settings.model, PROMPT_TOKENS + settings.tokens) as directory:
        config = ModelConfig.from_directory(directory)
        weights = weights_of(directory, config)
        prompts = prompts_for(config, settings.batch)
        if system == PEER:
            generate = theirs(transformers_model(directory, config, weights), prompts, settings.tokens)
        else:
            depth = FullDepth() if system == FULL else decay_for(config.num_layers, settings.tokens)
            generate = ours(new_engine(directory, weights, settings), prompts, depth, settings.tokens)
        del weights
        gc.collect()
        forgotten = _forget_peak()
        loaded = _resident_bytes("VmRSS") if forgotten else None
        for _ in range(2):
            generate()
    return {"loaded_bytes": loaded, "peak_bytes": _peak_bytes(), "peak_includes_loading": not forgotten}


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    if sys.platform == "linux":
        return _resident_bytes("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {field}")


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
    rows = []
    for system, row in report["systems"].items():
        rate = row["tokens_per_second"]
        peak = row["memory"]["peak_bytes"] / 2**20 if "memory" in row else None
        rows.append(
            (
                *(names[system], f"{rate['median']:.2f}", f"{rate['min']:.2f} - {rate['max']:.2f}"),
                *(f"{row['mean_layers']:.2f}", f"{row['gigabytes_per_second']['median']:.2f}"),
                "-" if peak is None else f"{peak:,.0f}",
            )
        )
    columns = ("system", "tok/s", "min - max", "layers", "GB/s", "peak MiB")
    print_table(console, columns, rows, left=("system",), no_wrap=True)
    table = Table("ratio", "median", "min - max")
    for name in ("full_depth_over_transformers", "d3_over_transformers", "d3_over_full_depth"):
        ratio = report[name]
        table.add_row(name.replace("_", " "), f"{ratio['median']:.3f}", f"{ratio['min']:.3f} - {ratio['max']:.3f}")
    table.add_row("layer bound of D3, head counted", f"{report['layer_bound']:.3f}", "")
    table.add_row("realisation ratio", f"{report['realisation_ratio']:.3f}", "")
    console.print(table)
    console.print("Timed: the whole call, prompt pass included, for every system alike. GB/s: weights read.")
    if report["tokens_equal"]:
        console.print("Full-depth tokens equal those of transformers.")
    else:
        console.print(f"[bold red]Full-depth tokens differ from transformers', first at {report['first_difference']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when the tokens differ from transformers'."""
    parser = Parser("decode", __doc__, arguments, Settings)
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory (three more processes)")
    parser.add_argument("--memory-of", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.given()
    settings = settings_of(Settings, options)
    if options.memory_of:
        print(json.dumps(memory(options.memory_of, settings)))
        return 0
    report = measure(settings, with_memory=not options.no_memory)
    parser.publish(report, show)
    return 0 if report["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

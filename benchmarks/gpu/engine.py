"""The engine as it is, on random weights: time a token over depth, and transformers beside it in the same process.

Time a decode step is fitted to a line over the layers that ran: its slope is a layer, its intercept what a step costs
whatever its depth. The limit is the time that the measured copy rate needs for the weights and the KV entries read.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decode import transformers_model
from benchmarks.gpu.common import Round, host_seconds, synchronize
from d3engine.depth import DepthPolicy, FullDepth, UnifiedSkip
from d3engine.engine import Engine
from d3engine.model.config import CONFIG_FILE, ModelConfig
from d3engine.model.weights import LlamaWeights, random_weights
from d3engine.request import SamplingParams

LLAMA2_7B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
TINY = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
PROMPT_TOKENS = 16
WARM_STEPS = 4
PEER_ROUNDS = 3
PEER_RESERVE_S = 90.0


def run(report: dict[str, Any], current: Round) -> None:
    """Fill in steps and fits of each batch size, then the comparison with transformers."""
    sizes = LLAMA2_7B if current.on_gpu else TINY
    depths = (32, 28, 24, 20, 16) if current.on_gpu else (6, 4, 3)
    steps = 48 if current.on_gpu else 6
    report.update(model=sizes, dtype=str(current.dtype), prompt_tokens=PROMPT_TOKENS, steps=steps, batches=[])
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / CONFIG_FILE).write_text(json.dumps({"model_type": "llama"} | sizes), encoding="utf-8")
        config = ModelConfig.from_directory(directory)
        weights = random_weights(config, dtype=current.dtype, device=current.device, seed=0)
        layer_bytes = sum(tensor.nbytes for tensor in weights.layers[0].tensors())
        head_bytes = weights.final_norm.nbytes + weights.lm_head.nbytes
        report.update(weight_bytes=weights.nbytes, layer_bytes=layer_bytes, head_bytes=head_bytes)
        engine = Engine(
            directory,
            weights=weights,
            device=current.device,
            dtype=current.dtype,
            max_model_len=PROMPT_TOKENS + WARM_STEPS + steps + 8,
            max_num_seqs=8,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        for batch in (1, 8):
            row: dict[str, Any] = {"batch": batch, "depths": []}
            report["batches"].append(row)
            for depth in depths:
                if current.left() < 10:
                    report["stopped"] = f"budget: before depth {depth} of batch {batch}"
                    return
                row["depths"].append(decode_at(engine, batch, depth, steps, report, current))
                current.keep(report)
            row["fit"] = fit(row["depths"])
        compare(report, engine, directory, config, weights, steps, current)
        engine.close()


def prompts_for(config: ModelConfig, batch: int) -> list[list[int]]:
    """Random prompts, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    drawn: list[list[int]] = torch.randint(3, config.vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()
    return drawn


def params_for(depth: DepthPolicy, num_tokens: int) -> SamplingParams:
    """Greedy, to exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, depth=depth)


def decode_at(
    engine: Engine, batch: int, depth: int, steps: int, report: dict[str, Any], current: Round
) -> dict[str, Any]:
    """Seconds of each decode step at a fixed depth, the whole of `step()` by the host's clock; warm steps left out."""
    layers = engine.config.num_layers
    policy: DepthPolicy = FullDepth() if depth == layers else UnifiedSkip(Fraction(layers, depth))
    params = params_for(policy, 1 + WARM_STEPS + steps)
    for index, prompt in enumerate(prompts_for(engine.config, batch)):
        engine.add_request(f"{depth}-{index}", prompt, params)
    seconds, ran, outputs = [], set(), []
    while engine.has_unfinished_requests():
        synchronize(current.device)
        start = time.perf_counter()
        outputs = engine.step()
        synchronize(current.device)
        seconds.append(time.perf_counter() - start)
    for output in outputs:
        ran |= set(output.outputs[0].depths[1:])
    if ran != {depth} or len(outputs) != batch:
        raise RuntimeError(f"{batch} sequences were to run {depth} layers a token; {len(outputs)} ran {ran}")
    measured = seconds[-steps:]
    median = statistics.median(measured)
    context = PROMPT_TOKENS + WARM_STEPS + steps // 2
    kv = 2 * depth * engine.config.kv_size * current.dtype.itemsize * context * batch
    moved = depth * report["layer_bytes"] + report["head_bytes"] + kv
    return {
        "depth": depth,
        "step_s": {"median": median, "min": min(measured), "max": max(measured)},
        "tokens_per_s": batch / median,
        "bytes_a_step": moved,
        "share_of_copy": current.share(moved, median),
    }


def fit(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The line through (depth, median step), and how far each point lies from it, as a part of itself."""
    depths = np.array([row["depth"] for row in rows], dtype=float)
    seconds = np.array([row["step_s"]["median"] for row in rows])
    slope, fixed = np.polyfit(depths, seconds, 1)
    off = (seconds - (slope * depths + fixed)) / seconds
    return {"layer_s": float(slope), "fixed_s": float(fixed), "largest_misfit": float(np.abs(off).max())}


def compare(
    report: dict[str, Any],
    engine: Engine,
    directory: Path,
    config: ModelConfig,
    weights: LlamaWeights,
    steps: int,
    current: Round,
) -> None:
    """Whole greedy calls of the engine and of transformers' `generate` (dynamic cache), in turn, same weights."""
    peer: dict[str, Any] = {"rows": []}
    report["transformers"] = peer
    if current.on_gpu:
        free, needed = torch.cuda.mem_get_info(current.device)[0], weights.nbytes // 2 + 2**32
        if current.left() < PEER_RESERVE_S or free < needed:
            peer["skipped"] = f"{current.left():.0f} s and {free} bytes left; wanted {PEER_RESERVE_S} s and {needed}"
            return
    from transformers import DynamicCache

    model = transformers_model(directory, config, weights).to(current.device)
    peer["attention"] = model.config._attn_implementation
    num_tokens = 1 + WARM_STEPS + steps
    for batch in (1, 8):
        prompts = prompts_for(config, batch)
        given = torch.tensor(prompts, device=current.device)
        tokens: dict[str, list[list[int]]] = {}

        def ours(prompts: list[list[int]] = prompts, tokens: dict[str, Any] = tokens) -> None:
            outputs = engine.generate(prompts, params_for(FullDepth(), num_tokens), use_tqdm=False)
            tokens["engine"] = [output.outputs[0].token_ids for output in outputs]

        def theirs(given: torch.Tensor = given, tokens: dict[str, Any] = tokens) -> None:
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                past_key_values=DynamicCache(config=model.config),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            tokens["transformers"] = out[:, given.shape[1] :].tolist()

        seconds: dict[str, list[float]] = {"engine": [], "transformers": []}
        for turn in range(PEER_ROUNDS + 1):
            for name, call in (("engine", ours), ("transformers", theirs)):
                elapsed = host_seconds(call, current.device)
                if turn > 0:  # the first is warm-up
                    seconds[name].append(elapsed)
        ratios = [b / a for a, b in zip(seconds["engine"], seconds["transformers"], strict=True)]
        peer["rows"].append(
            {
                "batch": batch,
                "tokens": num_tokens,
                "seconds": seconds,
                "tokens_per_s": {name: batch * num_tokens / statistics.median(s) for name, s in seconds.items()},
                "engine_over_transformers": statistics.median(ratios),
                "rows_with_equal_tokens": sum(a == b for a, b in zip(*tokens.values(), strict=True)),
            }
        )

"""`d3engine plan`: whether a model fits on devices, and how many sequences; loads nothing."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3engine.cli.commands import AsJson, new_app, note, print_json, print_table
from d3engine.cli.depth_options import AUTO, Depth, takes_depth
from d3engine.cli.engine_options import model_directory
from d3engine.depth import DepthPolicy, FullDepth
from d3engine.depth.labels import policy_in_words
from d3engine.depth.policy import POLICY_FILE, policy_from_directory
from d3engine.errors import InvalidValueError, require, require_number

if TYPE_CHECKING:
    from d3engine.engine.memory import Fit
    from d3engine.model.config import ModelConfig

app = new_app()

MOST_TOKENS = 10_000_000

_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}

_LLAMA_2 = {"model_type": "llama", "vocab_size": 32_000, "max_position_embeddings": 4096}
_LLAMA_3 = {"model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 8192}


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """The sizes of a model, as config.json has them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _LLAMA_2 | sizes(4096, 11008, 32, 32, 32),
    "llama-2-13b": _LLAMA_2 | sizes(5120, 13824, 40, 40, 40),
    "llama-2-70b": _LLAMA_2 | sizes(8192, 28672, 80, 64, 8),
    "llama-3-8b": _LLAMA_3 | sizes(4096, 14336, 32, 32, 8),
    "llama-3-70b": _LLAMA_3 | sizes(8192, 28672, 80, 64, 8),
}
"""Models whose sizes are known here, so that no file is needed."""


@app.command()
@takes_depth
def plan(
    depth: Depth,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"A model of any kind, a config.json, or one of {', '.join(KNOWN)}."),
    ],
    gpus: Annotated[str, typer.Option("--gpus", help="Memory of each device, such as 80GB,80GB (or GiB).")],
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of prompt and answer; 4096, or what the model holds if less."),
    ] = None,
    answer: Annotated[int, typer.Option("--answer", help="Of these, tokens generated.")] = 256,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences that are to run at once.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", help="Tokens computed in one step at most.")
    ] = 2048,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="auto for bfloat16 cache entries, or fp8: 8 bits with scales.")
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", help="Share of each device's memory to use.")
    ] = 0.9,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits on some devices, in bfloat16, int8 and int4, and for how many sequences at once.

    A packed file (GGUF, AWQ, GPTQ) has a row as it is, on one device.

    Needs no weights and no GPU: a calculation, with an estimate of what a step takes beside weights and KV cache.
    Without --depth it counts with the model's own, from its d3.json; where there is none, with full depth.
    """
    devices = [
        int(require_number("--gpu-memory-utilization", gpu_memory_utilization, 0, 1, open_low=True) * size)
        for size in _sizes_of(gpus)
    ]
    config, directory = _config_of(model)
    context = min(4096, config.max_length) if context is None else context
    require(context <= config.max_length, "--context", context, f"at most the {config.max_length} that the model holds")
    for flag, value in (
        ("--context", context),
        ("--answer", answer),
        ("--max-num-seqs", max_num_seqs),
        ("--max-num-batched-tokens", max_num_batched_tokens),
    ):
        require(1 <= value <= MOST_TOKENS, flag, value, f"an integer from 1 to {MOST_TOKENS}")
    require(answer < context, "--answer", answer, f"less than --context {context}, which has the prompt too")
    from d3engine.engine.memory import DTYPE, Demand, fit, named_dtype, split_bytes
    from d3engine.model.source import files_of

    policy = _own_depth(directory) if depth == AUTO else depth
    rule = policy.exit_rule(config.num_layers)
    owner = f"the one in the model's {POLICY_FILE}" if depth == AUTO else "this one"
    require(rule is None, "--depth", policy.name, f"a policy of fixed depths (under {owner} each token decides)")
    demand = Demand(
        context=context,
        answer=answer,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=16,
        schedule=policy.schedule(config.num_layers),
        kv_cache_dtype=named_dtype(kv_cache_dtype, DTYPE, "--kv-cache-dtype"),
    )
    schemes = (None, "int8", "int4") if config.quantization is None else (config.quantization,)
    fits = [fit(config, scheme, devices, demand) for scheme in schemes]
    files = None if directory is None else files_of(directory)
    if files is not None and len(devices) == 1 and files.packed_bytes() is not None:
        fits.insert(0, fit(config, None, devices, demand, split_bytes(files)))
    if as_json:
        print_json([asdict(found) | {"fits": found.fits, "depth": policy.describe()} for found in fits])
        return
    cache = "" if demand.kv_cache_dtype == DTYPE else ", an 8-bit cache"
    title = f"{model} on {gpus}: {context} tokens a sequence, {max_num_seqs} at once, {policy_in_words(policy)}{cache}"
    header = ("weights", "a device", "left for KV", "fits", "sequences", "of mixed ages")
    print_table(title, header, [_row(found, max_num_seqs) for found in fits])


def _row(found: Fit, wanted: int) -> tuple[str, ...]:
    if found.reason is not None:
        return found.weights, "", "", f"no: {found.reason}", "", ""
    if found.fits:
        verdict = "yes" if found.sequences >= wanted else f"not {wanted} at full length"
    else:
        verdict = f"no: {(found.sequence_bytes - found.room) / 2**30:.1f} GiB short of one sequence"
    room = f"{max(0, found.room) / 2**30:.1f} GiB"
    counts = f"{found.sequences}", f"{found.sequences_by_depth}"
    return found.weights, f"{found.weight_bytes / 2**30:.1f} GiB", room, verdict, *counts


def _sizes_of(gpus: str) -> list[int]:
    """Bytes of each device of "80GB,80GB"."""
    found = []
    for size in gpus.split(","):
        match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(GB|GiB|MB|MiB)", size.strip())
        if match is None or not float(match[1]):
            raise InvalidValueError("--gpus", gpus, "the memory of each device, such as 80GB,80GB or 24GiB")
        found.append(int(float(match[1]) * _UNITS[match[2]]))
    return found


def _config_of(model: str) -> tuple[ModelConfig, Path | None]:
    """The sizes of a model, and where it lies, if it does."""
    from d3engine.model.config import ModelConfig
    from d3engine.model.fields import read_json_object
    from d3engine.model.source import CONFIG_FILE

    if model in KNOWN:
        return ModelConfig.from_dict(KNOWN[model]), None
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        config = ModelConfig.from_dict(read_json_object(path))
        return config, path.parent if path.name == CONFIG_FILE else None
    directory = model_directory(model, f", a config.json, or one of {', '.join(KNOWN)}")
    return ModelConfig.from_directory(directory), directory


def _own_depth(directory: Path | None) -> DepthPolicy:
    """What an engine would take, told on stderr; that its weights are those it was found for is left to the engine,
    since none need be there."""
    if directory is None:
        return FullDepth()
    from d3engine.engine.depth import own_setting

    policy = policy_from_directory(directory)
    if (found := own_setting(policy, directory)) is not None:
        note(found)
    return policy

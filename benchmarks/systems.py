"""The systems that `decode` compares and the models they run: ours at any depth, and transformers on equal weights.

A system is a function without arguments that answers the same prompts with the same number of tokens.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import option, summary
from d3engine import InvalidValueError
from d3engine.cli.plan import sizes
from d3engine.depth import D3, DepthPolicy
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.model.checkpoint_formats import to_half_split
from d3engine.model.config import ModelConfig
from d3engine.model.family import NO_CAPS, Biases, LayerNorms, Multipliers
from d3engine.model.source import CONFIG_FILE
from d3engine.model.weights import LlamaWeights, load_weights, random_weights
from d3engine.request.params import SamplingParams

TARGET_SPEEDUP_IN_LAYERS = 1.5
"""D3 is set so that the mean depth over the generated tokens is as near as can be to L divided by this."""

PROMPT_TOKENS = 16
FULL, DECAY, PEER = "full_depth", "d3", "transformers"
SYSTEMS = (FULL, DECAY, PEER)

RANDOM_MODELS = {
    "large": sizes(1024, 2816, 24, 16, 16) | {"vocab_size": 32000},
    "tiny": sizes(64, 96, 6, 4, 2) | {"vocab_size": 256},
}
MODELS = ("demo", *RANDOM_MODELS)


@dataclass(frozen=True)
class Settings:
    """What is run; `tokens` are generated for each of `batch` equally long prompts, `repeats` times by each system."""

    model: str = option("demo", "demo: the bundled one; others are random", choices=MODELS)
    tokens: int = option(128, "new tokens per prompt")
    batch: int = option(1, "prompts at once")
    repeats: int = option(5, "rounds")
    threads: int = option(2, "torch's threads")


@dataclass(frozen=True)
class Answers:
    """What one call generated, by row of the batch; `depths` are empty for a system that does not count layers."""

    token_ids: list[list[int]]
    depths: list[list[int]]


Generate = Callable[[], Answers]


# -- the models ------------------------------------------------------------------------------------------------


@contextmanager
def model_at(name: str, num_positions: int) -> Iterator[Path]:
    """The directory of a named model; for a random one a temporary directory with nothing but its config.json."""
    if name not in RANDOM_MODELS:
        yield model_directory(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = RANDOM_MODELS[name] | {"model_type": "llama", "max_position_embeddings": max(2048, num_positions)}
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def weights_of(directory: Path, config: ModelConfig) -> LlamaWeights:
    """Float32 weights: those of the directory, or random ones where it has none."""
    if any(directory.glob("*.safetensors")):
        return load_weights(directory, config, dtype=torch.float32, device="cpu", show_progress=False)
    return random_weights(config, dtype=torch.float32, device="cpu", seed=0)


def need_llama(config: ModelConfig) -> None:
    """Raise `InvalidValueError` for a model with more than a Llama's layers, which a peer would compute otherwise."""
    others = {
        "biases": config.biases != Biases(),
        "norms of queries and keys": config.has_head_norms or config.has_projection_norms,
        "other norms": config.tensor_names.norms != LayerNorms() or config.norm_offset != 0,
        "factors": config.multipliers != Multipliers() or config.embedding_scale != 1,
        "windows": any(config.windows),
        "layers without rope": bool(config.layers_without_rope),
        "another activation": config.activation != "silu",
        "soft caps": config.soft_caps != NO_CAPS,
    }
    found = [name for name, has in others.items() if has]
    if found:
        raise InvalidValueError("model", f"one with {', '.join(found)}", "a plain Llama, which the peers are")


def prompts_for(config: ModelConfig, batch: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random prompts of a given number of ordinary tokens, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, config.vocab_size, (batch, tokens), generator=generator)
    return [[int(token) for token in row] for row in drawn]


def rest() -> None:
    """Before a system's turn: OpenMP's threads of the one before in this process spin for some milliseconds after it,
    on cores that the next one is to have."""
    time.sleep(0.05)


def in_rounds(turns: dict[str, Callable[[], dict[str, float]]], repeats: int, bar: tqdm[Any]) -> dict[str, Any]:
    """One turn of each that counts for nothing, then the rounds: the summary of every figure, by system."""
    figures: dict[str, dict[str, list[float]]] = {system: {} for system in turns}
    for number in range(repeats + 1):
        for system, turn in turns.items():
            bar.set_description(system)
            rest()
            found = turn()
            for name, value in found.items() if number else ():
                figures[system].setdefault(name, []).append(value)
            bar.update()
    return {system: {name: summary(values) for name, values in own.items()} for system, own in figures.items()}


def decay_for(num_layers: int, num_tokens: int) -> D3:
    """The D3 setting whose mean depth over `num_tokens` is nearest to L / 1.5.

    Starts from 0.2 to 0.8 by 0.05, alphas from 0.8 to 0.9999; of equal ones the first, which decays fastest.
    """
    alphas = (0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
    settings = [D3(alpha, round(start / 20, 2)) for alpha in alphas for start in range(4, 17)]
    wanted = num_layers / TARGET_SPEEDUP_IN_LAYERS
    return min(settings, key=lambda d3: abs(float(d3.schedule(num_layers).depths(num_tokens).mean()) - wanted))


# -- the systems -----------------------------------------------------------------------------------------------


def new_engine(directory: Path, weights: LlamaWeights, settings: Settings) -> Engine:
    """Our engine with a cache for exactly these requests; they share nothing, so the prefix cache is off."""
    return Engine(
        directory,
        weights=weights,
        device="cpu",
        dtype="float32",
        max_model_len=PROMPT_TOKENS + settings.tokens,
        max_num_seqs=settings.batch,
        max_num_batched_tokens=max(2048, PROMPT_TOKENS * settings.batch),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def ours(engine: Engine, prompts: list[list[int]], depth: DepthPolicy, num_tokens: int) -> Generate:
    """Our engine's whole call, from token ids to token ids."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, depth=depth)

    def generate() -> Answers:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return Answers([o.outputs[0].token_ids for o in outputs], [o.outputs[0].depths for o in outputs])

    return generate


def transformers_model(directory: Path, config: ModelConfig, weights: LlamaWeights) -> Any:
    """transformers' Llama with the same weights; it shares memory with the matrices that both lay out alike."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    peer_config = LlamaConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(peer_config)
    model.model.rotary_emb = LlamaRotaryEmbedding(peer_config)
    model.load_state_dict(_transformers_state(config, weights), strict=True, assign=True)
    model.generation_config.eos_token_id = None  # so that exactly max_new_tokens are generated
    return model.eval()


def _transformers_state(config: ModelConfig, weights: LlamaWeights) -> dict[str, torch.Tensor]:
    need_llama(config)
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.lm_head,
    }
    for index, layer in enumerate(weights.layers):
        query, key, value = layer.qkv.split([config.q_size, config.kv_size, config.kv_size])
        gate, up = layer.gate_up.chunk(2)
        matrices = {
            "self_attn.q_proj": to_half_split(query, config.num_heads),
            "self_attn.k_proj": to_half_split(key, config.num_kv_heads),
            "self_attn.v_proj": value.clone(),  # a view would keep the whole of our qkv alive
            "self_attn.o_proj": layer.output,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }
        state |= {f"model.layers.{index}.{name}.weight": matrix for name, matrix in matrices.items()}
    return state


def generated(model: Any, given: torch.Tensor, num_tokens: int, cache: Any, **options: Any) -> list[list[int]]:
    """transformers' greedy tokens behind each of the prompts `given` [B, T], with its default attention."""
    tokens = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        past_key_values=cache,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    found: list[list[int]] = tokens[:, given.shape[1] :].tolist()
    return found


def theirs(model: Any, prompts: list[list[int]], num_tokens: int) -> Generate:
    """transformers' whole call: greedy `generate` with its dynamic cache."""
    from transformers import DynamicCache

    given = torch.tensor(prompts)
    return lambda: Answers(generated(model, given, num_tokens, DynamicCache(config=model.config)), [])


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first place at which two answers of the same length differ."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)

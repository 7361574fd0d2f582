"""Tiny random Llamas: small enough to run in milliseconds, with weights so large that no two logits come close."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

TINY: dict[str, Any] = (
    {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    | {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.2}
)


class TinyLlama(NamedTuple):
    """A model twice: as a directory for the engine, and as transformers' model in memory."""

    directory: Path
    model: LlamaForCausalLM


TARGET: dict[str, Any] = {"vocab_size": 40, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48}
"""What the model of the fixture `target` changes, for which that of `draft` drafts."""


def save_tiny_llama(directory: Path, *, seed: int = 0, max_shard_size: str = "1GB", **config: Any) -> TinyLlama:
    """Make a random Llama of `TINY` with `config`'s changes and save it as transformers does, in float32."""
    torch.manual_seed(seed)
    return save_random(directory, LlamaForCausalLM(LlamaConfig(**(TINY | config))), max_shard_size)


def save_random(directory: Path, model: PreTrainedModel, max_shard_size: str = "1GB") -> TinyLlama:
    """Save a model that transformers has just made at random; its biases and norms become random too."""
    model.eval()
    with torch.no_grad():  # transformers starts biases at zero and norms at one (or zero), which would prove nothing
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=float(parameter[0]), std=0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return TinyLlama(directory, model)


def save_sure_llama(directory: Path, *, num_layers: int) -> TinyLlama:
    """A model whose parts add little, so that drafts are often right, and which is sure of itself now and then."""
    tiny = save_tiny_llama(directory, num_hidden_layers=num_layers, hidden_size=32, intermediate_size=48)
    with torch.no_grad():
        tiny.model.lm_head.weight *= 2
        for layer in tiny.model.model.layers:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    tiny.model.save_pretrained(directory)
    return tiny


def random_prompts(lengths: list[int], *, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> list[list[int]]:
    """One prompt of random token ids for each length; equal arguments give equal prompts."""
    numbers = random.Random(seed)
    return [[numbers.randrange(vocab_size) for _ in range(length)] for length in lengths]


def save_without_layer(tiny: TinyLlama, layer: int, directory: Path) -> str:
    """The model without one of its layers: a smaller one of the same vocabulary, often right and often wrong."""
    model = type(tiny.model)(tiny.model.config)
    model.load_state_dict(tiny.model.state_dict())
    del model.model.layers[layer]
    changed = tiny.model.config.to_dict() | {"num_hidden_layers": len(model.model.layers)}
    model.config = type(model.config)(**changed)
    model.save_pretrained(directory)
    return str(directory)

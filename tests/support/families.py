"""Tiny random models of each family by transformers' own classes, and whether an engine answers as they do."""

import math
from collections.abc import Container
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tiny_models import TINY, TinyLlama, random_prompts, save_random
from transformers import AutoConfig, AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM, PreTrainedModel
from transformers_oracle import Answer, assert_same_tokens

from d3engine import Engine, SamplingParams


class MiniCPMConfig(GraniteConfig):
    """transformers has no such class: a Granite, whose multipliers follow from MiniCPM's as in its authors' code."""

    model_type = "minicpm"
    tie_word_embeddings: bool = True
    scale_emb: float | int = 1
    scale_depth: float | int = 1
    dim_model_base: float | int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.embedding_multiplier = self.scale_emb
        self.attention_multiplier = (self.hidden_size // self.num_attention_heads) ** -0.5
        self.residual_multiplier = self.scale_depth / math.sqrt(self.num_hidden_layers)
        self.logits_scaling = self.hidden_size / self.dim_model_base


class MiniCPMForCausalLM(GraniteForCausalLM):
    config_class = MiniCPMConfig


AutoConfig.register("minicpm", MiniCPMConfig)
AutoModelForCausalLM.register(MiniCPMConfig, MiniCPMForCausalLM)

TIED: dict[str, Any] = {"tie_word_embeddings": True}
NO_PAD: dict[str, Any] = {"pad_token_id": None}
"""For families whose padding token would lie beyond the vocabulary of `TINY`."""
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
MUP: dict[str, Any] = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
MINISTRAL_3: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rope_parameters": YARN
    | {"original_max_position_embeddings": 512, "beta_fast": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    | {"llama_4_scaling_beta": 0.1},
}
"""Whose queries grow from position 512 on."""
DENSE: dict[str, Any] = {"shared_intermediate_size": 80, "num_local_experts": 0, "mamba_n_heads": 4}
DENSE |= {"position_embedding_type": "rope", "layer_types": ["full_attention"] * 3}
"""What makes a Granite 4 a model of attention and one MLP."""
OWN_HEAD_DIM = (
    *("seed_oss", "qwen3", "ministral", "ministral3", "gemma", "gemma2", "gemma3_text"),
    *("glm", "glm4", "ernie4_5", "exaone4"),
)
"""Families whose config has a head_dim, whatever the hidden size."""


def granite(attention: float, residual: float, logits: float) -> dict[str, Any]:
    """The multipliers of a Granite."""
    multipliers = {"embedding_multiplier": 12.0, "attention_multiplier": attention}
    return multipliers | {"residual_multiplier": residual, "logits_scaling": logits}


def longrope(pairs: int, original: int, step: float, **changes: Any) -> dict[str, Any]:
    """A Phi-3's longrope, whose long factors hold for texts of `original` tokens and more."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10_000.0}
    for name, by in (("short_factor", step), ("long_factor", 1.5)):
        rope[name] = [1 + by * pair for pair in range(pairs)]
    return NO_PAD | {"original_max_position_embeddings": original, "rope_parameters": rope | changes}


def make_family(
    directory: Path, family: tuple[str, dict[str, Any]], own_head_dim: Container[str] = OWN_HEAD_DIM, **sizes: Any
) -> TinyLlama:
    """A model of a family's `model_type` with changes of its config, as a directory and in memory."""
    model_type, changes = family
    given = {name: value for name, value in TINY.items() if name != "head_dim" or model_type in own_head_dim}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **deepcopy(given | sizes | changes))
    return save_random(directory, AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@torch.inference_mode()
def assert_answers_as(
    model: PreTrainedModel,
    source: Path,
    *,
    held: Any = object,
    tolerance: float = 1.1e-5,
    **options: Any,
) -> None:
    """Greedy tokens are transformers', and log-probabilities within `tolerance` times the largest logit.

    transformers sees an answer in one pass: where each token is its choice after those before, so is the whole.
    Matrices of the engine are of a type in `held`.
    """
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=-1)
    options = {"dtype": "float32", "max_model_len": 512} | options
    with Engine(source, skip_tokenizer_init=True, **options) as engine:
        assert isinstance(engine.executor.model.weights.layers[0].qkv, held)
        (output,) = engine.generate(random_prompts([23]), params, use_tqdm=False)
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    logits = model(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    assert_same_tokens(completion.token_ids, Answer.of_logits(logits))
    found = [[row[token].logprob for token in range(TINY["vocab_size"])] for row in completion.logprobs]
    within = tolerance * float(logits.abs().max())
    torch.testing.assert_close(torch.tensor(found), logits.log_softmax(-1), rtol=0, atol=within)

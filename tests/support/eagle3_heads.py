"""A random EAGLE-3 head for a tiny model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import TinyLlama
from transformers import LlamaConfig

EAGLE3_TARGET: dict[str, Any] = {"vocab_size": 24, "num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 48}
DRAFT_VOCAB = 18
READ = (1, 2, 4)
"""Of 6 layers a head that does not say where it reads would read twice at the same."""


def save_head(target: TinyLlama, directory: Path) -> Path:
    """A head for `target`, in the published layout; returns `directory`."""
    config = target.model.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READ)},
    }
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    own = LlamaConfig(**config)
    hidden, inner, queries = own.hidden_size, own.intermediate_size, own.num_attention_heads * own.head_dim
    keys = own.num_key_value_heads * own.head_dim
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (DRAFT_VOCAB, hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    weights = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    norms = ("norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    weights |= {f"{name}.weight": 1 + torch.randn(hidden) * 0.1 for name in norms}
    chosen = torch.randperm(own.vocab_size)[:DRAFT_VOCAB].sort().values
    # As the target reads its own states: so drafts are right now and then.
    weights["fc.weight"][:, 2 * hidden :] += 3 * torch.eye(hidden)
    weights["lm_head.weight"] += 9 * target.model.lm_head.weight.detach()[chosen]
    t2d = torch.zeros(own.vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    save_file(weights | {"d2t": chosen - torch.arange(DRAFT_VOCAB), "t2d": t2d}, directory / "model.safetensors")
    return directory

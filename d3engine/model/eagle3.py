"""EAGLE-3 heads: one decoder layer that drafts from three hidden states of its target (Li et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3engine.errors import ModelFormatError, require
from d3engine.model.checkpoint import SINGLE_FILE
from d3engine.model.config import ModelConfig
from d3engine.model.source import CONFIG_FILE, ModelFiles, files_of

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER = "midlayer."
NUM_STATES = 3


@dataclass(frozen=True)
class Eagle3Head:
    """The weights of a head, and where in its target it reads.

    Attributes:
        config: of its layer, as a Llama of one layer.
        layers: the target's layers whose input it reads, three.
        weights: by their names in the checkpoint, with `LAYER` before those of the layer.
        token_ids: int64 [draft vocabulary], the target's ids of its tokens.
    """

    config: ModelConfig
    layers: tuple[int, ...]
    weights: dict[str, Tensor]
    token_ids: Tensor


def is_eagle3(directory: Path) -> bool:
    """Whether a model directory holds an EAGLE-3 head."""
    files = files_of(directory)
    named = files.read_json_object(CONFIG_FILE).get("architectures") if files.has(CONFIG_FILE) else None
    return isinstance(named, list) and any(named[:1] == [one] for one in ARCHITECTURES)


def load_eagle3(directory: Path, target: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """The head in a directory, for a target of this config.

    Raises `InvalidValueError` naming `draft_model` where it does not fit its target, and `ModelFormatError` naming the
    file for what is missing or not supported.
    """
    files = files_of(directory)
    given = files.read_json_object(CONFIG_FILE)
    plain = {**given, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    config = ModelConfig.from_dict(plain)
    path = f"{files.path / CONFIG_FILE}"
    if config.num_layers != 1:
        raise ModelFormatError(f"{path}: num_hidden_layers must be 1 of an EAGLE-3 head; got {config.num_layers}")
    for name in ("norm_before_residual", "norm_before_fc"):
        if given.get(name):
            raise ModelFormatError(f"{path}: {name} must be absent or false; got {given[name]!r}")
    for name, allowed in (("vocab_size", "vocabulary"), ("hidden_size", "width")):
        own, wanted = getattr(config, name), getattr(target, name)
        require(own == wanted, "draft_model", str(directory), f"a head with the {allowed} of its target, {wanted}")
    layers = _layers(given, target.num_layers)
    fits = len(set(layers)) == NUM_STATES and all(0 <= layer < target.num_layers for layer in layers)
    require(fits, "draft_model", str(directory), f"a head of a model with more than {target.num_layers} layers")
    tensors = _tensors(files)
    token_ids = _token_ids(tensors, config.vocab_size, path)
    shapes = _shapes(config, len(token_ids))
    tensors.pop("t2d", None)
    unused = sorted(tensors.keys() - shapes.keys() - {"embed_tokens.weight"})  # the target's own, where it is there
    if unused:
        raise ModelFormatError(f"{files.path / SINGLE_FILE}: a tensor that no EAGLE-3 head has: {unused[0]!r}")
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            found = list(tensors[name].shape) if name in tensors else "none"
            raise ModelFormatError(f"{files.path / SINGLE_FILE}: {name} must be {list(shape)}; got {found}")
    weights = {name: tensors[name].to(device=device, dtype=dtype) for name in shapes}
    return Eagle3Head(config, layers, weights, token_ids.to(device))


def _layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Where a head reads: after the second layer, in the middle and before the last three, unless it says so."""
    of_head = config.get("eagle_config")
    named = of_head.get("eagle_aux_hidden_state_layer_ids") if isinstance(of_head, dict) else None
    if isinstance(named, list) and all(isinstance(layer, int) for layer in named):
        return tuple(named)
    return (2, num_layers // 2, num_layers - 3)


def _tensors(files: ModelFiles) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not files.has(SINGLE_FILE):
        raise ModelFormatError(f"{files.path}: {SINGLE_FILE} is missing (convert pytorch_model.bin to safetensors)")
    try:
        return load_file(files.place(SINGLE_FILE))
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{files.path / SINGLE_FILE} cannot be read: {error}") from error


def _token_ids(tensors: dict[str, Tensor], vocab_size: int, path: str) -> Tensor:
    """The target's ids of the head's tokens: each is its own and what `d2t` adds to it."""
    offsets = tensors.pop("d2t", None)
    if offsets is None:
        return torch.arange(vocab_size)
    ids = offsets.flatten().to(torch.int64)
    ids += torch.arange(len(ids))
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < len(ids):
        raise ModelFormatError(f"{path}: d2t must lead to different tokens of the target")
    return ids


def _shapes(config: ModelConfig, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    of_layer: dict[str, tuple[int, ...]] = {
        "hidden_norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (config.q_size, 2 * hidden),
        "self_attn.k_proj.weight": (config.kv_size, 2 * hidden),
        "self_attn.v_proj.weight": (config.kv_size, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, config.q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {
        "fc.weight": (hidden, NUM_STATES * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        **{LAYER + name: shape for name, shape in of_layer.items()},
    }

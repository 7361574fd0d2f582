"""Fields of a config.json, of which tests change one or two."""

from typing import Any


def llama_config(layers: int, **changes: Any) -> dict[str, Any]:
    """A small Llama of four heads over two; `changes` are further fields, or other values."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": "llama"} | sizes | heads | {"max_position_embeddings": 64} | changes


def llama3_rope(original: int, **changes: Any) -> dict[str, Any]:
    """Llama 3's RoPE, that scales a model trained on texts of `original` tokens."""
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": "llama3"} | factors | {"original_max_position_embeddings": original} | changes

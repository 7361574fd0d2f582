"""A plain PyTorch Llama with a static KV cache: what torch.compile makes of the model when nothing else is in the way.

It reads the engine's own weights, so both move the same bytes; a step is one call on static buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.systems import need_llama
from d3engine.model.config import ModelConfig
from d3engine.model.llama import Rope
from d3engine.model.weights import LayerWeights, LlamaWeights


class PlainLayer(nn.Module):
    """One layer and its cache [batch, kv heads, length, head_dim]; queries look at what `mask` [T, length] allows."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, batch: int, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.channels = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps
        for name in ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down"):
            self.register_buffer(name, getattr(weights, name))
        cache = weights.qkv.new_zeros(batch, self.kv_heads, length, self.channels)
        self.register_buffer("keys", cache)
        self.register_buffer("values", cache.clone())

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """`hidden` [B, T, H] at `positions` [T], which are written into the cache."""
        batch, tokens, width = hidden.shape
        normed = F.rms_norm(hidden, (width,), self.attention_norm, self.eps)
        projected = F.linear(normed, self.qkv).view(batch, tokens, -1, self.channels).transpose(1, 2)
        queries, keys, values = projected.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        self.keys.index_copy_(2, positions, rotate(keys, cos, sin))
        self.values.index_copy_(2, positions, values)
        attended = F.scaled_dot_product_attention(
            rotate(queries, cos, sin),
            self.keys,
            self.values,
            attn_mask=mask,
            enable_gqa=self.heads != self.kv_heads,
        )
        hidden = hidden + F.linear(attended.transpose(1, 2).reshape(batch, tokens, -1), self.output)
        gate, up = F.linear(F.rms_norm(hidden, (width,), self.mlp_norm, self.eps), self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of `heads` [B, N, T, D], channels in adjacent pairs, by `cos` and `sin` [T, D / 2], in float32."""
    first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.flatten(-2).to(heads.dtype)


class PlainLlama(nn.Module):
    """Greedy decoding of `batch` prompts of one length, to `length` tokens in all; shares memory with `weights`."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, *, batch: int, length: int) -> None:
        super().__init__()
        need_llama(config)
        self.eps, self.batch, self.length = config.rms_norm_eps, batch, length
        self.register_buffer("embedding", weights.embedding)
        self.register_buffer("final_norm", weights.final_norm)
        self.register_buffer("lm_head", weights.lm_head)
        self.layers = nn.ModuleList(PlainLayer(config, layer, batch, length) for layer in weights.layers)
        places = torch.arange(length, device=weights.embedding.device)
        rotations = Rope(config, length, places.device).rotations(places)
        self.register_buffer("cos", rotations.real.float().contiguous())
        self.register_buffer("sin", rotations.imag.float().contiguous())
        self.register_buffer("places", places)

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, T, V] of `tokens` [B, T] at `positions` [T]."""
        hidden = self._hidden(tokens, positions)
        return F.linear(F.rms_norm(hidden, hidden.shape[-1:], self.final_norm, self.eps), self.lm_head)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The next token of each row, [B, 1]."""
        last = self._hidden(tokens, positions)[:, -1:]
        logits = F.linear(F.rms_norm(last, last.shape[-1:], self.final_norm, self.eps), self.lm_head)
        return logits.argmax(dim=-1)

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        mask = self.places <= positions[:, None]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, positions, mask)
        return hidden

    @torch.no_grad()
    def generate(self, prompts: Tensor, num_tokens: int, step: Callable[[Tensor, Tensor], Tensor]) -> list[list[int]]:
        """`num_tokens` greedy tokens of each of `prompts` [B, T]; `step` is `forward`, or what was compiled of it."""
        length = prompts.shape[1]
        answers = prompts.new_empty(self.batch, num_tokens)
        token, position = self(prompts, self.places[:length]), self.places[length : length + 1].clone()
        answers[:, :1] = token
        for place in range(1, num_tokens):
            torch.compiler.cudagraph_mark_step_begin()
            token.copy_(step(token, position))  # a graph's output is overwritten by its next run
            answers[:, place : place + 1] = token
            position += 1
        found: list[list[int]] = answers.tolist()
        return found


def compiled(model: PlainLlama, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The model's step under torch.compile, whole; attention too is the compiler's, which is best for one row."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    run = torch.compile(model, fullgraph=True, dynamic=False, **options)

    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            out: Tensor = run(tokens, positions)
        return out

    return step

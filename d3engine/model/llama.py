"""The Llama forward pass over a plan's rows: embed, the layers of a span, logits.

A layer is five operations of the kernel table. Which rows it runs, and where their entries go, is the
caller's; a layer knows neither sequences nor depth.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from d3engine.kernels.kv_pool import KVPool
from d3engine.kernels.matrices import Weight, looked_up
from d3engine.kernels.sampling import SamplingRows
from d3engine.model.config import ModelConfig
from d3engine.model.parallel import Ranks
from d3engine.model.weights import LlamaWeights


class Llama:
    """The weights of one model and the operations that run it; with `ranks`, of the part of it that is this rank's.

    What comes out of the methods is the whole model's: every rank calls them alike, with the same rows.
    """

    def __init__(self, config: ModelConfig, weights: LlamaWeights, kernels: Any, ranks: Ranks | None = None) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.ranks = ranks
        self._scale = config.attention_scale

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [T, H] of int64 `token_ids` [T]."""
        if self.ranks is not None:
            return self.ranks.embed(token_ids, self.weights.embedding, self.weights.dtype)
        return looked_up(self.weights.embedding, token_ids, self.weights.dtype)

    def layer(
        self,
        index: int,
        hidden: Tensor,
        rotations: Tensor,
        pool: KVPool,
        entries: Tensor,
        attention: Any,
        num_rows: Tensor | None = None,
    ) -> None:
        """Run layer `index` over `hidden` [T, H] in place, and write the rows' KV entries into `pool`.

        `rotations` [T, D / 2], `entries` [T, 2]; `attention` is what the kernels prepared for this layer. `num_rows`
        int32 [1] on the device: rows from there on are left as they are.
        """
        self.attention(index, hidden, rotations, pool, entries, attention, num_rows)
        self.mlp(index, hidden, num_rows)

    def attention(
        self,
        index: int,
        hidden: Tensor,
        rotations: Tensor,
        pool: KVPool,
        entries: Tensor,
        attention: Any,
        num_rows: Tensor | None = None,
    ) -> None:
        """The first part of `layer`, as it says."""
        weights = self.weights.layers[index]
        queries = self._qkv(index, hidden, rotations, pool, entries, num_rows)
        attended = self.kernels.paged_attention(queries, pool, attention, self._scale, num_rows=num_rows)
        self._add(attended, weights.output, weights.output_bias, hidden, num_rows)

    def mlp(self, index: int, hidden: Tensor, num_rows: Tensor | None = None) -> None:
        """The second part of `layer`, over `hidden` [T, H] in place."""
        weights, eps = self.weights.layers[index], self.config.rms_norm_eps
        gated = self.kernels.gate_up(
            hidden, weights.mlp_norm, eps, weights.gate_up, weights.gate_up_bias, num_rows=num_rows
        )
        self._add(gated, weights.down, weights.down_bias, hidden, num_rows)

    def _add(self, x: Tensor, weight: Weight, bias: Tensor | None, hidden: Tensor, num_rows: Tensor | None) -> None:
        """Add `x` [T, K] times `weight` [H, K] transposed, of all ranks, to the residual stream `hidden` [T, H]."""
        if self.ranks is None:
            self.kernels.linear_residual(x, weight, bias, hidden, num_rows=num_rows)
            return
        self.ranks.begin_term_(hidden)
        self.kernels.linear_residual(x, weight, bias, hidden, num_rows=num_rows)
        self.ranks.collectives.sum_(hidden)

    def project(self, index: int, hidden: Tensor, rotations: Tensor, pool: KVPool, entries: Tensor) -> None:
        """Write only the KV entries that layer `index` would have for `hidden` [T, H] (CALM's rule for an exit)."""
        self._qkv(index, hidden, rotations, pool, entries)

    def _qkv(
        self,
        index: int,
        hidden: Tensor,
        rotations: Tensor,
        pool: KVPool,
        entries: Tensor,
        num_rows: Tensor | None = None,
    ) -> Tensor:
        """A layer's queries [T, N, D]; its keys and values are written into `pool`."""
        weights = self.weights.layers[index]
        queries: Tensor = self.kernels.qkv(
            hidden,
            weights.attention_norm,
            self.config.rms_norm_eps,
            weights.qkv,
            weights.qkv_bias,
            rotations,
            pool,
            entries,
            self.config.num_heads,
            head_norms=weights.head_norms,
            num_rows=num_rows,
        )
        return queries

    def likeliest(self, hidden: Tensor, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The likeliest token int64 [T] of final hidden states [T, H], and its logit float32 [T]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        best: tuple[Tensor, Tensor] = self.kernels.lm_head_argmax(
            hidden, weights.final_norm, eps, weights.lm_head, num_rows=num_rows
        )
        return best if self.ranks is None else self.ranks.best(*best)

    def draw(
        self, hidden: Tensor, rows: SamplingRows, steps: Tensor, num_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A draw int64 [T] at each row's temperature for its step, and the score float32 [T] with which it won."""
        weights, eps = self.weights, self.config.rms_norm_eps
        drawn: tuple[Tensor, Tensor] = self.kernels.lm_head_sample(
            hidden,
            weights.final_norm,
            eps,
            weights.lm_head,
            rows.temperature,
            rows.seeds,
            rows.indices,
            steps,
            first_token=0 if self.ranks is None else self.ranks.part.tokens.start,
            num_rows=num_rows,
        )
        return drawn if self.ranks is None else self.ranks.best(*drawn)

    def logits(self, hidden: Tensor, num_rows: Tensor | None = None) -> Tensor:
        """Float32 logits [T, V] of final hidden states [T, H]."""
        weights, eps = self.weights, self.config.rms_norm_eps
        logits: Tensor = self.kernels.lm_head(hidden, weights.final_norm, eps, weights.lm_head, num_rows=num_rows)
        return logits if self.ranks is None else self.ranks.logits(logits)

"""Draft & Verify on transformers' own attentions and MLPs, one token at a time, written from the published rules.
Nothing here is shared with the engine. Full depth's cache and a draft's are plain lists; a draft's ends with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

Entries = list[tuple[Tensor, Tensor]]


class _Cache:
    """What one layer's attention calls `update` on: those of `before`, which stay as they are, and its own."""

    def __init__(self, before: Entries) -> None:
        self.entries = list(before)

    def update(self, key: Tensor, value: Tensor, layer_index: int, **further: object) -> tuple[Tensor, Tensor]:
        self.entries.append((key, value))
        keys, values = zip(*self.entries, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


@dataclass
class Drafts:
    """What came of an answer: its tokens, and of each verification how many were drafted and how many accepted."""

    token_ids: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)  # the stop probability after each of them


@torch.inference_mode()
def draft_and_verify(
    model: LlamaForCausalLM,
    prompt: list[int],
    num_tokens: int,
    skip_attention: set[int],
    skip_mlp: set[int],
    *,
    longest: int,
    stop: float,
    target: float | None,
) -> Drafts:
    """Greedy answers by the rules of the paper's section 3.4 with the constants of its code: the share of a draft that
    was accepted goes into a mean by a half; the threshold takes a tenth of a step of 0.01."""
    caches: list[Entries] = [[] for _ in model.model.layers]
    logits = torch.empty(0)
    for position, token in enumerate(prompt):
        logits, caches = _run(model, token, position, caches, set(), set())
    known, found, mean = list(prompt), Drafts([int(logits.argmax())]), 0.0
    known.append(found.token_ids[0])
    while len(found.token_ids) < num_tokens:
        room = num_tokens - len(found.token_ids) - 1  # what verification adds must have room as well
        drafted: list[int] = []
        draft = caches
        while len(drafted) < min(longest, room):
            token = drafted[-1] if drafted else known[-1]
            logits, draft = _run(model, token, len(known) - 1 + len(drafted), draft, skip_attention, skip_mlp)
            drafted.append(int(logits.argmax()))
            if float(logits.softmax(dim=-1).max()) < stop:
                break
        accepted = 0
        logits, caches = _run(model, known[-1], len(known) - 1, caches, set(), set())
        while accepted < len(drafted) and int(logits.argmax()) == drafted[accepted]:
            known.append(drafted[accepted])
            logits, caches = _run(model, known[-1], len(known) - 1, caches, set(), set())
            accepted += 1
        known.append(int(logits.argmax()))
        found.token_ids = known[len(prompt) :]
        if not drafted:
            continue
        mean = 0.5 * mean + 0.5 * accepted / len(drafted)
        if target is not None:
            moved = stop + 0.01 if mean < target else stop if len(drafted) == longest else stop - 0.01
            stop = 0.9 * stop + 0.1 * moved
        found.drafted.append(len(drafted))
        found.accepted.append(accepted)
        found.stops.append(stop)
    return found


Norm = Callable[[Tensor], Tensor]


class _Norms(NamedTuple):
    """A layer's norms before and behind its sublayers; identities where it has none."""

    attention: Norm
    attention_post: Norm
    mlp: Norm
    mlp_post: Norm

    @classmethod
    def of(cls, layer: nn.Module) -> _Norms:
        none: Norm = nn.Identity()
        behind = hasattr(layer, "post_feedforward_layernorm")  # OLMo 2 has these alone, Gemma 2 both
        second = layer.post_attention_layernorm
        return cls(
            getattr(layer, "input_layernorm", none),
            second if behind else none,
            getattr(layer, "pre_feedforward_layernorm", none if behind else second),
            layer.post_feedforward_layernorm if behind else none,
        )


def _run(
    model: LlamaForCausalLM,
    token: int,
    position: int,
    caches: list[Entries],
    skip_attention: set[int],
    skip_mlp: set[int],
) -> tuple[Tensor, list[Entries]]:
    """The logits [V] of a token, and the caches with its entries where its attention ran."""
    llama = model.model
    hidden = llama.embed_tokens(torch.tensor([[token]]))
    rotation = llama.rotary_emb(hidden, position_ids=torch.tensor([[position]]))
    after = []
    for index, layer in enumerate(llama.layers):
        cache, norms = _Cache(caches[index]), _Norms.of(layer)
        if index not in skip_attention:
            attended, _ = layer.self_attn(norms.attention(hidden), rotation, None, cache)
            hidden = hidden + norms.attention_post(attended)
        if index not in skip_mlp:
            hidden = hidden + norms.mlp_post(layer.mlp(norms.mlp(hidden)))
        after.append(cache.entries)
    return model.lm_head(llama.norm(hidden))[0, -1].float(), after

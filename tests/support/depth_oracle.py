"""The slow oracle of every depth schedule: transformers' own layers, token by token, straight from the definition.
Nothing here is shared with the engine: the layers, the norm, the rotary embedding and the LM head are transformers',
the formulas of the policies are written out again in exact arithmetic, and each layer's cache is a plain list of the
entries that some token left there."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers_oracle import Answer

ActiveLayers = Callable[[int], set[int]]
"""Which layers run at generation step i >= 1. The prompt, which yields token 0, always runs all of them."""


Maps = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""(first, stop) of layers left out -> weight [H, H] and offset [H] of `h + weight h + offset`."""


# -- the policies, from their formulas ---------------------------------------------------------------------------------


def d3(num_layers: int, alpha: float, start: float, tail: int = 0) -> ActiveLayers:
    """keep_i = max(floor(L alpha**i), floor(start L) + tail); skipped is [first, first + L - keep_i)."""
    first = math.floor(Fraction(str(start)) * num_layers)

    def active(step: int) -> set[int]:
        keep = max(math.floor(num_layers * alpha**step), first + tail)
        return set(range(num_layers)) - set(range(first, first + num_layers - keep))

    return active


def nested(num_layers: int, alpha: float, windows: Sequence[Sequence[int]]) -> ActiveLayers:
    """Windows go whole, in order, while floor(L alpha**i) layers are left without them."""

    def active(step: int) -> set[int]:
        layers = set(range(num_layers))
        for first, stop in windows:
            if len(layers) - (stop - first) < math.floor(num_layers * alpha**step):
                break
            layers -= set(range(first, stop))
        return layers

    return active


def skip_decode(
    num_layers: int, max_tokens: int, min_layers: int, max_layers: int | None = None, warmup: int = 1
) -> ActiveLayers:
    """n_i falls in a line from `max_layers` to `min_layers`; skipped is [warmup, warmup + L - n_i)."""
    highest = num_layers if max_layers is None else max_layers

    def active(step: int) -> set[int]:
        line = highest - Fraction((highest - min_layers) * step, max_tokens - 1)
        layers = max(min_layers, math.floor(line + Fraction(1, 2)))
        return set(range(num_layers)) - set(range(warmup, warmup + num_layers - layers))

    return active


def unified_skip(num_layers: int, speedup: float) -> ActiveLayers:
    """floor(L / speedup) layers, the same at every step: both ends, and from below those in whole intervals."""
    count = math.floor(num_layers / Fraction(str(speedup)))
    interval = num_layers // (count - 1)
    inner = [layer for layer in range(1, num_layers - 1) if layer % interval == 0]
    return lambda step: {0, num_layers - 1, *inner[: count - 2]}


def tail_skip(num_layers: int, max_tokens: int, mean_layers: float) -> ActiveLayers:
    """The lowest layers, as many at each step >= 1 as the budget of `mean_layers` a step leaves, first ones first."""
    budget = math.floor(Fraction(str(mean_layers)) * max_tokens + Fraction(1, 2)) - num_layers
    shares = [0] * (max_tokens - 1)
    for run in range(budget):  # one layer run after the other, dealt out like cards
        shares[run % len(shares)] += 1
    return lambda step: set(range(shares[min(step, len(shares)) - 1]))


def layer_table(rows: list[list[int]]) -> ActiveLayers:
    """Row i is step i; the last row holds from there on."""
    return lambda step: set(rows[min(step, len(rows) - 1)])


@dataclass(frozen=True)
class Exit:
    """A token leaves after a layer >= min_layer (each `every`-th from there) where its confidence is high enough."""

    confidence: str
    threshold: float
    decay: float = 4.0
    min_layer: int = 0
    every: int = 1

    def wanted(self, step: int, max_tokens: int) -> float:
        return 0.9 * self.threshold + 0.1 * self.threshold * math.exp(-self.decay * step / max_tokens)

    def of(self, before: Tensor, after: Tensor, logits: Tensor) -> float:
        """From a layer's input and output [H] and the LM head's logits [V] for the output."""
        if self.confidence == "cosine":
            return float(before @ after / (before.norm() * after.norm()))
        probabilities = sorted(logits.exp().div(logits.exp().sum()).tolist(), reverse=True)
        return probabilities[0] if self.confidence == "softmax_max" else probabilities[0] - probabilities[1]


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthAnswer(Answer):
    """An answer and how many layers ran for each of its tokens."""

    depths: list[int] = field(default_factory=list)


@torch.inference_mode()
def greedy_at_depth(
    model: LlamaForCausalLM,
    prompt: list[int],
    num_tokens: int,
    active: ActiveLayers,
    on_skip: str = "none",
    maps: Maps | None = None,
    kept: Callable[[Tensor], Tensor] = lambda heads: heads,
    student: Callable[[int], LlamaForCausalLM] | None = None,
) -> DepthAnswer:
    """`num_tokens` greedy tokens, token i >= 1 of which ran the layers `active(i)` alone, of `student(i)` if given.

    With `maps`, what it left out between two layers that ran was crossed by the map of just these layers. `kept` is
    what caches hold of keys and values `[1, kv_heads, entries, head_dim]`.
    """
    num_layers = len(model.model.layers)
    everything = set(range(num_layers))
    run = _Run(model, on_skip, [_Entries(kept, window_of(layer)) for layer in model.model.layers], maps or {})
    rows, depths = [run.tokens(prompt, 0, everything)], [num_layers]
    for step in range(1, num_tokens):
        if student is not None:
            run = replace(run, model=student(step))
        layers = active(step)
        rows.append(run.tokens([int(rows[-1].argmax())], len(prompt) + step - 1, layers))
        depths.append(len(layers))
    answer = Answer.of_logits(torch.stack(rows))
    return DepthAnswer(answer.token_ids, answer.gaps, answer.logprobs, depths)


@torch.inference_mode()
def greedy_with_exits(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    num_tokens: int,
    rule: Exit,
    on_skip: str,
    *,
    batch_min: bool = False,
) -> list[DepthAnswer]:
    """Greedy tokens of all prompts in step with one another, each token leaving by `rule` for itself."""
    # With `batch_min` no row leaves before the least confident of all may.
    num_layers = len(model.model.layers)
    windows = [window_of(layer) for layer in model.model.layers]
    runs = [_Run(model, on_skip, [_Entries(window=window) for window in windows]) for _ in prompts]
    rows = [[run.tokens(prompt, 0, set(range(num_layers)))] for run, prompt in zip(runs, prompts, strict=True)]
    depths = [[num_layers] for _ in prompts]
    for step in range(1, num_tokens):
        wanted = rule.wanted(step, num_tokens)
        going = {
            nth: _Token(run, int(rows[nth][-1].argmax()), len(prompts[nth]) + step - 1) for nth, run in enumerate(runs)
        }
        for layer in range(num_layers):
            seen = {nth: token.run_layer(layer) for nth, token in going.items()}
            if layer == num_layers - 1:
                leaving = set(seen)
            elif layer < rule.min_layer or (layer - rule.min_layer) % rule.every:
                leaving = set()
            else:
                leaving = {nth for nth, states in seen.items() if rule.of(*states) >= wanted}
                if batch_min and len(leaving) < len(seen):
                    leaving = set()
            for nth in leaving:
                going.pop(nth).leave_after(layer)
                rows[nth].append(seen[nth][2])
                depths[nth].append(layer + 1)
    answers = [Answer.of_logits(torch.stack(row)) for row in rows]
    return [DepthAnswer(a.token_ids, a.gaps, a.logprobs, d) for a, d in zip(answers, depths, strict=True)]


class _Entries:
    """One layer's cache: keys and values `[1, kv_heads, entries, head_dim]` of the tokens that left one, in order."""

    # A layer of transformers calls `update` with those of the tokens that run, and attends to all that comes back. Only
    # the prompt runs more than one token at a time, with nothing before it, so transformers' own causal rule is enough;
    # a later token of a layer with a sliding window is given the last entries alone.

    def __init__(self, kept: Callable[[Tensor], Tensor] = lambda heads: heads, window: int | None = None) -> None:
        self._kept = kept
        self._window = window
        self._entries: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, layer_index: int, **further: object) -> tuple[Tensor, Tensor]:
        key, value = self._kept(key), self._kept(value)
        if self._entries is None:
            self._entries = key, value
        else:
            keys, values = self._entries
            self._entries = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
            if self._window is not None:
                keys, values = self._entries
                return keys[:, :, -self._window :], values[:, :, -self._window :]
        return self._entries

    def last(self) -> tuple[Tensor, Tensor]:
        """The entry of the newest token."""
        assert self._entries is not None
        keys, values = self._entries
        return keys[:, :, -1:], values[:, :, -1:]


def window_of(layer: LlamaDecoderLayer) -> int | None:
    """The sliding window of a layer, in tokens; None without one."""
    return getattr(layer.self_attn, "sliding_window", None)


def _mask(count: int, layer: LlamaDecoderLayer) -> Tensor | None:
    """Where the tokens of a prompt look in a layer; None of one token, and where the layer sees to it."""
    window, is_added = window_of(layer), layer.self_attn.config._attn_implementation == "eager"
    if count == 1 or (window is None and not is_added):
        return None
    seen = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf) if is_added else seen


def _rotations(model: LlamaForCausalLM, hidden: Tensor, positions: list[int]) -> list[tuple[Tensor, Tensor]]:
    """The rotation of each layer, by its kind of attention where the kinds have ropes of their own."""
    rope, places = model.model.rotary_emb, torch.tensor([positions])
    if not hasattr(rope, "layer_types"):
        return [rope(hidden, position_ids=places)] * len(model.model.layers)
    return [rope(hidden, places, kind) for kind in model.config.layer_types]


def _run_layer(
    layer: LlamaDecoderLayer, hidden: Tensor, mask: Tensor | None, cache: _Entries, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """A layer's output; the name of the cache is another in transformers 5.24."""
    name = "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"
    places = torch.zeros(hidden.shape[:2])  # from which a Ministral 3 scales queries, beyond its trained length alone
    return layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=rotation, **{name: cache})


def _logits(model: LlamaForCausalLM, hidden: Tensor) -> Tensor:
    """The LM head's logits, with the soft cap of a Gemma 2."""
    logits = model.lm_head(model.model.norm(hidden)).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass
class _Run:
    """One sequence on its way through the model."""

    model: LlamaForCausalLM
    on_skip: str
    caches: list[_Entries]
    maps: Maps = field(default_factory=dict)

    def tokens(self, token_ids: list[int], position: int, active: set[int]) -> Tensor:
        """Run a token, or the prompt, through the layers in `active`; returns the logits [V] of the last one."""
        llama = self.model.model
        hidden = llama.embed_tokens(torch.tensor([token_ids]))
        rotations = _rotations(self.model, hidden, list(range(position, position + len(token_ids))))
        for index, layer in enumerate(llama.layers):
            if self.maps and index not in active and (index == 0 or index - 1 in active):
                stop = min(other for other in (*active, len(llama.layers)) if other > index)
                weight, offset = self.maps[index, stop]
                hidden = hidden + hidden @ weight.T + offset
            if index in active:
                mask = _mask(len(token_ids), layer)
                hidden = _run_layer(layer, hidden, mask, self.caches[index], rotations[index])
            elif self.on_skip == "copy":
                nearest = max(other for other in active if other < index)
                self.caches[index].update(*self.caches[nearest].last(), index)
            elif self.on_skip == "project":
                self.caches[index].update(*_projected(layer, hidden, rotations[index]), index)
        return _logits(self.model, hidden)[0, -1]


class _Token:
    """One token that goes through the layers one by one, and may leave after any."""

    def __init__(self, run: _Run, token_id: int, position: int) -> None:
        llama = run.model.model
        self.run = run
        self.hidden = llama.embed_tokens(torch.tensor([[token_id]]))
        self.rotations = _rotations(run.model, self.hidden, [position])

    def run_layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's input and output [H], and the LM head's logits [V] for the output."""
        model, before = self.run.model, self.hidden
        layer = model.model.layers[index]
        self.hidden = _run_layer(layer, before, None, self.run.caches[index], self.rotations[index])
        return before[0, 0], self.hidden[0, 0], _logits(model, self.hidden)[0, 0]

    def leave_after(self, last: int) -> None:
        """Leave an entry in every layer above `last`."""
        caches, layers = self.run.caches, self.run.model.model.layers
        for index in range(last + 1, len(caches)):
            if self.run.on_skip == "copy":
                caches[index].update(*caches[last].last(), index)
            elif self.run.on_skip == "project":
                caches[index].update(*_projected(layers[index], self.hidden, self.rotations[index]), index)


def _projected(layer: LlamaDecoderLayer, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The key and value that `layer` would have for a hidden state that passes it by."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden) if hasattr(layer, "input_layernorm") else hidden
    shape = (1, 1, -1, attention.head_dim)
    key = attention.k_proj(normed)
    value = attention.v_proj(normed).view(shape).transpose(1, 2)
    has_norm = hasattr(attention, "k_norm")
    if has_norm and attention.k_norm.weight.numel() == key.shape[-1]:  # OLMo
        key = attention.k_norm(key).view(shape)
    else:
        key = key.view(shape)
        key = attention.k_norm(key) if has_norm else key  # Qwen3, Gemma 3
    key = key.transpose(1, 2)
    if getattr(attention, "use_rope", True):  # SmolLM3 has layers without
        turn = vars(sys.modules[type(attention).__module__])["apply_rotary_pos_emb"]  # the family's own pairs
        _, key = turn(key, key, *rotation)
    return key, value

"""An EAGLE-3 head drafts what a slow reference on transformers' parts drafts, and answers stay full depth's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import EAGLE3_TARGET, READ, save_head
from fixture_types import MakeLlama
from safetensors.torch import load_file, save_file
from stepping import see_steps
from tiny_models import TinyLlama, random_prompts
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from d3engine import Engine, SamplingParams
from d3engine.errors import InvalidValueError, ModelFormatError

LENGTH = 3


@pytest.fixture(scope="module")
def target(tiny_llama: MakeLlama) -> TinyLlama:
    return tiny_llama(**EAGLE3_TARGET)


@pytest.fixture(scope="module")
def head(target: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(target, tmp_path_factory.mktemp("head"))


class Reference:
    """The head on transformers' own parts, which computes all rows again for each token."""

    def __init__(self, target: TinyLlama, head: Path) -> None:
        self.model = target.model
        self.config = LlamaConfig(**json.loads((head / "config.json").read_text()))
        self.weights = load_file(head / "model.safetensors")
        self.rope = LlamaRotaryEmbedding(self.config)
        self.mlp = LlamaMLP(self.config)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(self.mlp, name).weight.data = self.weights[f"midlayer.mlp.{name}.weight"]

    def norm(self, name: str, states: Tensor) -> Tensor:
        made = LlamaRMSNorm(states.shape[-1], self.config.rms_norm_eps)
        made.weight.data = self.weights[f"{name}.weight"]
        return made(states)

    def linear(self, name: str, states: Tensor) -> Tensor:
        return states @ self.weights[f"{name}.weight"].T

    @torch.no_grad()
    def draft(self, text: list[int], count: int) -> list[int]:
        """Greedy drafts behind a text of which all but the last token has gone through the target."""
        seen = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        states = self.linear("fc", torch.cat([seen[layer][0] for layer in READ], dim=-1))
        tokens = list(text)
        for _ in range(count):
            out = self.layer(states, self.model.model.embed_tokens(torch.tensor(tokens[1:])))
            own = int(self.linear("lm_head", self.norm("norm", out[-1])).argmax())
            tokens.append(own + int(self.weights["d2t"][own]))
            states = torch.cat((states, out[-1:]))
        return tokens[len(text) :]

    def layer(self, states: Tensor, embedded: Tensor) -> Tensor:
        both = torch.cat(
            (self.norm("midlayer.input_layernorm", embedded), self.norm("midlayer.hidden_norm", states)), dim=-1
        )
        queries, keys, values = (
            self.linear(f"midlayer.self_attn.{name}_proj", both).view(1, len(both), -1, self.config.head_dim)
            for name in "qkv"
        )
        turns = self.rope(both[None], torch.arange(len(both))[None])
        queries, keys = apply_rotary_pos_emb(queries.transpose(1, 2), keys.transpose(1, 2), *turns)
        times = self.config.num_attention_heads // self.config.num_key_value_heads
        keys, values = (one.repeat_interleave(times, dim=1) for one in (keys, values.transpose(1, 2)))
        scores = queries @ keys.transpose(2, 3) / self.config.head_dim**0.5
        scores += torch.full(scores.shape[-2:], -torch.inf).triu(1)
        attended = (scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2)[0]
        states = states + self.linear("midlayer.self_attn.o_proj", attended)
        return states + self.mlp(self.norm("midlayer.post_attention_layernorm", states))


def new_engine(target: TinyLlama, **changes: Any) -> Engine:
    given = {"max_num_seqs": 4, "block_size": 4, "max_model_len": 64, "device": "cpu", "backend": "torch"} | changes
    return Engine(target.directory, skip_tokenizer_init=True, **given)


def config_of(head: Path, **further: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": LENGTH, **further}


def verified(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """The texts and drafts that the engine verifies from here on."""
    found: list[tuple[list[int], list[int]]] = []

    def look(plan: Any) -> None:
        for place in () if plan.drafts is None else plan.drafts.judging:
            sequence = plan.sequences[plan.sampled[place]]
            found.append((sequence.all_token_ids().tolist(), list(sequence.draft.token_ids)))

    see_steps(engine, look)
    return found


PROMPTS = random_prompts([1, 2, 9, 17, 5, 26], vocab_size=24)


def test_it_drafts_what_the_reference_drafts(target: TinyLlama, head: Path) -> None:
    reference = Reference(target, head)
    with new_engine(target, speculative_config=config_of(head), max_num_batched_tokens=11) as engine:
        found = verified(engine)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        engine.generate(PROMPTS, params, use_tqdm=False)
        stats = engine.stats()
    assert len(found) > 40
    for text, drafted in found:
        assert drafted == reference.draft(text, len(drafted)), text
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def changed(head: Path, directory: Path, config: dict[str, Any], weights: Callable[[dict[str, Tensor]], None]) -> Path:
    """The head with another config and other tensors."""
    given = json.loads((head / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(given))
    tensors = load_file(head / "model.safetensors")
    weights(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any], Callable[[dict[str, Tensor]], Any]]] = {
    "two layers": (ModelFormatError, "num_hidden_layers must be 1", {"num_hidden_layers": 2}, lambda t: None),
    "another vocabulary": (InvalidValueError, "with the vocabulary of its target", {"vocab_size": 25}, lambda t: None),
    "another width": (InvalidValueError, "with the width of its target", {"hidden_size": 64}, lambda t: None),
    "layers that are not there": (InvalidValueError, "more than 6 layers", {"eagle_config": {}}, lambda t: None),
    "another order of norms": (ModelFormatError, "norm_before_residual", {"norm_before_residual": True}, lambda t: 0),
    "no fusion": (ModelFormatError, "fc.weight must be", {}, lambda t: t.pop("fc.weight")),
    "a bias": (ModelFormatError, "that no EAGLE-3 head has", {}, lambda t: t.update(bias=torch.ones(1))),
    "a map to nowhere": (ModelFormatError, "d2t must lead", {}, lambda t: t["d2t"].add_(100)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_by_name(target: TinyLlama, head: Path, tmp_path: Path, name: str) -> None:
    error, message, config, weights = WRONG[name]
    with pytest.raises(error, match=message):
        new_engine(target, speculative_config=config_of(changed(head, tmp_path, config, weights)))


def test_where_no_head_runs_it_is_refused_by_name(target: TinyLlama, head: Path, native_library: None) -> None:
    with pytest.raises(InvalidValueError, match=r'draft_model must be a whole model, or .* beside backend="torch"'):
        new_engine(target, backend="native", speculative_config=config_of(head))
    with pytest.raises(InvalidValueError, match="prefix_cache_file must be None with an EAGLE-3 head"):
        new_engine(target, prefix_cache_file=head / "prefixes", speculative_config=config_of(head))
    with pytest.raises(InvalidValueError, match=r"must be the directory of an EAGLE-3 head"):
        new_engine(target, speculative_config=config_of(target.directory))

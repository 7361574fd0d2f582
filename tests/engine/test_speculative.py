"""A second model drafts and the answers stay full depth's, whatever it proposes and however its work is cut."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixture_types import MakeLlama
from safetensors.torch import load_file, save_file
from tiny_models import TARGET, TinyLlama, random_prompts

from d3engine import Engine, FullDepth, PromptLookup, SamplingParams, Speculative
from d3engine.cli.depth_options import parse_depth
from d3engine.depth import policy_from_dict
from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError, ModelFormatError


def new_engine(target: TinyLlama, depth: Any, **changes: Any) -> Engine:
    arguments: dict[str, Any] = {"max_num_seqs": 6, "block_size": 4, "max_model_len": 80, "device": "cpu"}
    return Engine(target.directory, depth=depth, skip_tokenizer_init=True, **(arguments | changes))


@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_draft_model_that_is_the_target_itself_is_always_right(target: TinyLlama, length: int) -> None:
    engine = new_engine(target, Speculative(str(target.directory), length), max_num_batched_tokens=17)
    prompts = random_prompts([1, 9, 33, 4, 18, 2, 25], vocab_size=40)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
        engine.generate(prompts, params, use_tqdm=False)
    stats = engine.stats()
    assert stats.acceptance_rate == 1
    assert stats.realised_mean_layers == 4  # every row that full depth ran yielded a token


def test_draft_model_that_does_not_fit_is_refused_by_name(
    target: TinyLlama, draft: str, tiny_llama: MakeLlama, tmp_path: Path
) -> None:
    """A draft model that does not fit its target is refused by name."""
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*vocabulary of its target, 40 tokens and not"):
        new_engine(target, Speculative(str(tiny_llama().directory)))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*a directory"):
        new_engine(target, Speculative(str(tmp_path / "nothing")))
    short = tiny_llama(**TARGET, max_position_embeddings=64)
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*a model for 80 tokens"):
        new_engine(target, Speculative(str(short.directory)))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*; got ''"):
        Speculative("")
    params = SamplingParams(max_tokens=2, depth=Speculative(draft))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*the engine's own draft model, None"):
        new_engine(target, FullDepth()).generate([1], params, use_tqdm=False)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_draft_model_may_lack_the_last_tokens(
    tiny_llama: MakeLlama, backend: str, tmp_path: Path, native_library: None
) -> None:
    """Small models of a family may have fewer rows of padding: drafts are of the tokens that both have."""
    target = tiny_llama(**TARGET | {"vocab_size": 400})
    shutil.copytree(target.directory, tmp_path / "draft")
    config, weights = (tmp_path / "draft" / name for name in ("config.json", "model.safetensors"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 396}))
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: one[:396].contiguous() if name in tables else one for name, one in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    prompts = [[399, *prompt] for prompt in random_prompts([5, 9, 3, 12], vocab_size=400)]
    asked = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, allowed_token_ids=[1, 2, 3, 397, 399])
    params = [replace(asked, temperature=temperature) for temperature in (0.0, 0.0, 1.0, 1.0)]
    with new_engine(target, FullDepth(), backend=backend) as engine:
        wanted = [one.outputs[0].token_ids for one in engine.generate(prompts, params, use_tqdm=False)]
    with new_engine(target, Speculative(str(tmp_path / "draft"), 3), backend=backend) as engine:
        found = [one.outputs[0].token_ids for one in engine.generate(prompts, params, use_tqdm=False)]
        assert engine.stats().accepted_tokens > 0
    assert found == wanted
    assert any(token >= 396 for answer in wanted for token in answer), "none that the draft model lacks"


def test_a_policy_file_names_no_draft_model(target: TinyLlama, draft: str, tmp_path: Path) -> None:
    """A d3.json cannot have a second model loaded; the engine's own argument can."""
    directory = tmp_path / "model"
    shutil.copytree(target.directory, directory)
    (directory / "d3.json").write_text(json.dumps({"depth": Speculative(draft).describe()}))
    own: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 80, "device": "cpu"}
    with pytest.raises(ModelFormatError, match=r"d3\.json: draft_model must be absent there"):
        Engine(directory, **own)
    with Engine(directory, draft_model=draft, **own) as engine:
        assert engine.depth == Speculative(draft)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(model_directory("demo"), tmp_path / "model")
    Engine("demo", device="cpu", depth=Speculative(str(tmp_path / "model"))).close()
    (tmp_path / "model" / "tokenizer.json").unlink()
    model = (tmp_path / "model" / "tokenizer.model").read_bytes()
    (tmp_path / "model" / "tokenizer.model").write_bytes(model.replace(b"the", b"hte", 1))
    with pytest.raises(InvalidValueError, match=r"^draft_model must be .*1 tokens differ"):
        Engine("demo", device="cpu", depth=Speculative(str(tmp_path / "model")))


def test_policy_with_a_draft_model_survives_json_and_options() -> None:
    """A policy with a draft model survives JSON and has options on the command line."""
    policy = Speculative("some/model", 3, stop_probability=0.25, adaptive=True)
    assert policy_from_dict(json.loads(json.dumps(policy.describe()))) == policy
    line = "speculative draft-model=some/model draft-length=3 stop-probability=0.25 adaptive=true"
    assert parse_depth(line) == policy
    with pytest.raises(InvalidValueError, match="must be given with draft-model"):
        parse_depth("speculative")


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_open_length_ends_with_the_cache_beside_a_draft_model(
    target: TinyLlama, draft: str, backend: str, native_library: None
) -> None:
    """A request without max_tokens runs as far as the KV cache has room, beside a draft model too."""
    blocks = 5 * target.model.config.num_hidden_layers
    with new_engine(target, FullDepth(), backend=backend) as engine:
        memory = blocks * engine.settings.block_bytes
    with new_engine(target, Speculative(draft, 3), backend=backend, kv_cache_memory_bytes=memory) as engine:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (output,) = engine.generate([1, 2, 3], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5 * 4 + 1 - 3  # the last one is never fed


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_open_length_is_what_a_small_step_has_room_for(target: TinyLlama, backend: str, native_library: None) -> None:
    """A step that verifies two drafted tokens at most gets no first draft of more."""
    prompts = [[1, 2, 3] * 4, [4, 5] * 6]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, allowed_token_ids=[1, 2, 3, 4, 5])
    with new_engine(target, FullDepth(), backend=backend) as engine:
        expected = [one.outputs[0].token_ids for one in engine.generate(prompts, params, use_tqdm=False)]
    lookups = replace(params, depth=PromptLookup())
    with new_engine(target, FullDepth(), backend=backend, max_num_seqs=2, max_num_batched_tokens=4) as engine:
        found = [one.outputs[0].token_ids for one in engine.generate(prompts, lookups, use_tqdm=False)]
        assert engine.stats().accepted_tokens > 0
    assert found == expected

"""In float32 the engine's greedy tokens are transformers' own, one for one, whatever the layout of the model.
The models are tiny and random: what would be a small error in a trained model changes their text within a few
tokens."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import llama3_rope
from fixture_types import MakeLlama, MakePrompts
from stepping import generated
from stepping import greedy as asked
from transformers import LlamaForCausalLM
from transformers_oracle import assert_same_tokens, greedy, greedy_after, prompt_logprobs

from d3engine import Engine, FullDepth, RequestOutput, SamplingParams
from d3engine.engine.model_directory import model_directory

NUM_TOKENS = 48
GREEDY = asked(NUM_TOKENS)

LAYOUTS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped-query": {"num_key_value_heads": 2},
    "grouped-query in threes": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "heads as wide as hidden / heads": {"head_dim": None},
    "heads narrower than hidden / heads": {"head_dim": 6},
    "heads wider than hidden / heads": {"head_dim": 20},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "both biases, multi-query": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "a large norm epsilon": {"rms_norm_eps": 0.1},
    "one layer": {"num_hidden_layers": 1},
    "odd sizes": {"vocab_size": 123, "hidden_size": 45, "intermediate_size": 53, "num_attention_heads": 5}
    | {"num_key_value_heads": 5, "head_dim": 14},
}

# Trained lengths so short that prompt and answer go well beyond them.
LLAMA3 = llama3_rope(32)
YARN = {"rope_type": "yarn", "factor": 4.0}
SHORT = {"original_max_position_embeddings": 32, "rope_theta": 10_000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default, large theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    "llama3": LLAMA3 | SHORT,
    "yarn": YARN | SHORT,
    "yarn with mscale": YARN | SHORT | {"mscale": 1.0, "mscale_all_dim": 0.5},
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}

MODELS = LAYOUTS | {f"{name} rope": {"rope_parameters": rope} for name, rope in ROPES.items()}


def assert_equals_transformers(outputs: list[RequestOutput], model: LlamaForCausalLM, tie: float = 0.0) -> None:
    """In one pass, which takes no time; `assert_equals_generate` goes through the loop of transformers."""
    for output in outputs:
        (completion,) = output.outputs
        answer = greedy_after(model, output.prompt_token_ids, completion.token_ids)
        assert_same_tokens(completion.token_ids, answer, tie)


def assert_equals_generate(outputs: list[RequestOutput], model: LlamaForCausalLM) -> None:
    for output in outputs:
        (completion,) = output.outputs
        answer = greedy(model, output.prompt_token_ids, len(completion.token_ids))
        assert_same_tokens(completion.token_ids, answer)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str, tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """So do the log-probabilities of the prompts."""
    directory, model = tiny_llama(**MODELS[name])
    prompts = make_prompts([1, 16, 39], vocab_size=model.config.vocab_size)
    outputs = generated(directory, prompts, replace(GREEDY, prompt_logprobs=64))
    answers = [output.outputs[0].token_ids for output in outputs]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * 3
    assert_equals_transformers(outputs, model)
    for output in outputs[1:]:
        assert_prompt_logprobs(output, prompt_logprobs(model, output.prompt_token_ids))


def test_logprobs_of_a_chunked_prompt_equal_transformers(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """Log probabilities of a prompt computed in pieces equal transformers."""
    directory, model = tiny_llama()
    prompts = make_prompts([50, 33, 8], seed=2)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=64)
    for output in generated(directory, prompts, params, max_num_seqs=2, max_num_batched_tokens=7):
        assert_prompt_logprobs(output, prompt_logprobs(model, output.prompt_token_ids))


def assert_prompt_logprobs(output: RequestOutput, expected: torch.Tensor) -> None:
    """The 64 likeliest tokens of every position, and the token that came, have transformers' log-probabilities."""
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for position, found in enumerate(output.prompt_logprobs[1:]):
        assert found is not None
        assert output.prompt_token_ids[position + 1] in found
        assert len(found) >= 64
        values = torch.tensor([logprob.logprob for logprob in found.values()])
        torch.testing.assert_close(values, expected[position, list(found)], rtol=0, atol=1e-4)


def logprobs_of(output: RequestOutput, token_ids: list[int]) -> list[float]:
    """Of the generated tokens, which must be these."""
    (completion,) = output.outputs
    assert completion.token_ids == token_ids
    assert completion.logprobs is not None
    return [row[token].logprob for row, token in zip(completion.logprobs, token_ids, strict=True)]


def test_logprobs_of_generated_tokens_equal_transformers(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """Log probabilities of generated tokens equal transformers."""
    directory, model = tiny_llama()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=3)
    for output in generated(directory, make_prompts([4, 30], seed=3), params):
        answer = greedy(model, output.prompt_token_ids, NUM_TOKENS)
        assert logprobs_of(output, answer.token_ids) == pytest.approx(answer.logprobs, abs=1e-4)
        assert output.outputs[0].cumulative_logprob == pytest.approx(sum(answer.logprobs), abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 4, "max_num_batched_tokens": 9}], ids=["whole", "in pieces"])
def test_dynamic_rope_across_the_trained_length_is_transformers(
    options: dict[str, int], tiny_llama: MakeLlama, make_prompts: MakePrompts
) -> None:
    """Dynamic rope equals transformers across the trained length."""
    trained = 48
    directory, model = tiny_llama(rope_parameters=DYNAMIC, max_position_embeddings=trained)
    lengths = [20, trained - 1, trained, trained + 1, 77]  # answers that cross it, prompts on either side of it
    outputs = generated(directory, make_prompts(lengths), GREEDY, max_model_len=160, **options)
    assert_equals_generate(outputs, model)  # whose frequencies change from token to token


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_positions_past_8192_are_the_same(
    rope: dict[str, Any], tiny_llama: MakeLlama, make_prompts: MakePrompts
) -> None:
    directory, model = tiny_llama(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=16_384,
        rope_parameters=rope | {"original_max_position_embeddings": 4096, "rope_theta": 500_000.0},
    )
    (prompt,) = make_prompts([8200])
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    (output,) = generated(directory, [prompt], params, max_num_batched_tokens=1024, max_num_seqs=1)
    answer = greedy(model, prompt, 24)
    assert logprobs_of(output, answer.token_ids) == pytest.approx(answer.logprobs, abs=1e-3)


@pytest.mark.parametrize(("budget", "block_size"), [(3, 1), (3, 16), (8, 5), (23, 4), (16, 16)])
def test_prompts_computed_in_pieces_equal_transformers(
    budget: int, block_size: int, tiny_llama: MakeLlama, make_prompts: MakePrompts
) -> None:
    directory, model = tiny_llama()
    prompts = make_prompts([61, 2, 30, 9], seed=4)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": budget, "block_size": block_size}
    params = SamplingParams(temperature=0, max_tokens=24)
    assert_equals_transformers(generated(directory, prompts, params, **options), model)


def test_batch_that_requests_join_and_leave_is_transformers(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """A batch that requests join and leave equals transformers."""
    directory, model = tiny_llama()
    prompts = make_prompts([3, 50, 17, 1, 33, 8, 25, 64, 12, 5], seed=5)
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (64, 9, 30, 70, 1, 64, 20, 2, 40, 66)]
    outputs = generated(directory, prompts, params, max_num_seqs=4)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    assert_equals_transformers(outputs, model)


def test_prompt_beginning_like_an_earlier_one_is_transformers(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """A prompt that begins like an earlier one equals transformers."""
    directory, model = tiny_llama()
    first, other = make_prompts([48, 20], seed=6)
    with Engine(directory, skip_tokenizer_init=True, block_size=8) as engine:
        engine.generate([first], GREEDY, use_tqdm=False)
        outputs = engine.generate([first, first[:30] + other, first + other], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [40, 24, 48]
    assert_equals_transformers(outputs, model)


@pytest.mark.parametrize("tied", [False, True])
def test_shards_give_the_tokens_of_a_single_file(tied: bool, tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    directory, model = tiny_llama(max_shard_size="30KB", tie_word_embeddings=tied)
    assert not (directory / "model.safetensors").exists()
    assert len(list(directory.glob("model-*.safetensors"))) > 3
    assert_equals_transformers(generated(directory, make_prompts([9]), GREEDY), model)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("name", ["default, large theta", "linear", "llama3", "yarn"])
def test_both_spellings_of_the_config_give_the_same_tokens(
    name: str, type_key: str, tiny_llama: MakeLlama, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    directory, model = tiny_llama(rope_parameters=ROPES[name])
    prompts = make_prompts([40])
    outputs = generated(directory, prompts, GREEDY)
    old = tmp_path / "old"
    shutil.copytree(directory, old)
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    assert rope["rope_type"] == ROPES[name]["rope_type"]
    config["rope_theta"] = rope.pop("rope_theta")
    rope[type_key] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope[type_key] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    (old / "config.json").write_text(json.dumps(config))
    assert generated(old, prompts, GREEDY)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert_equals_transformers(outputs, model)


# In bfloat16 the engine and transformers round at different places, so both are held against float32: a different
# token is right only where float32 itself finds the two likeliest tokens this close. Logits are about 1.4 wide here.
BFLOAT16_TIE = 0.15


def bfloat16_and_float32(directory: Path, model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The float32 model whose weights are those the engine has in bfloat16."""
    rounded = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    return rounded.float().eval()


def test_bfloat16_tokens_differ_only_at_near_ties(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    directory, model = tiny_llama(num_hidden_layers=2)
    outputs = generated(directory, make_prompts([5, 12, 30, 18, 40, 7], seed=7), GREEDY, dtype="bfloat16")
    assert_equals_transformers(outputs, bfloat16_and_float32(directory, model), tie=BFLOAT16_TIE)


def test_bfloat16_ranks_prompt_tokens_as_float32_does(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """bfloat16 ranks every token of a prompt as float32 does but for near ties."""
    directory, model = tiny_llama(num_hidden_layers=2)
    (prompt,) = make_prompts([400], seed=8)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = generated(directory, [prompt], params, dtype="bfloat16", max_num_batched_tokens=64)
    expected = prompt_logprobs(bfloat16_and_float32(directory, model), prompt)
    best = expected.topk(2, dim=-1)
    clear = (best.values[:, 0] - best.values[:, 1] >= BFLOAT16_TIE).tolist()
    assert output.prompt_logprobs is not None
    assert sum(clear[:-1]) > 200
    for position, found in enumerate(output.prompt_logprobs[1:]):
        assert found is not None
        likeliest = next(token for token, logprob in found.items() if logprob.rank == 1)
        assert likeliest == best.indices[position, 0] or not clear[position]


def test_the_demo_model_answers_as_in_transformers() -> None:
    directory = model_directory("demo")
    if not (directory / "model.safetensors").exists():
        pytest.skip("the demo model has not been trained yet: its folder has no weights")
    with Engine("demo", depth=FullDepth()) as engine:
        questions = [
            "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:",
            "Question: A box holds 12 pens. Anna takes 5.",
            "Hello",
        ]
        outputs = engine.generate(questions, GREEDY, use_tqdm=False)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert_equals_transformers(outputs, model)


def test_converted_llama2c_checkpoint_tells_its_story(shared_data: Path, tmp_path: Path) -> None:
    """A converted llama2.c checkpoint tells its published story."""
    from d3engine.weights_tools.convert import convert_llama2c

    folder = shared_data / "stories260K"
    story = [int(token) for token in (folder / "greedy_from_bos.txt").read_text().split()]
    assert len(story) == 129
    convert_llama2c(folder / "stories260K.bin", tmp_path / "model", show_progress=False)
    (output,) = generated(tmp_path / "model", [[1]], asked(len(story)))
    assert output.outputs[0].token_ids == story

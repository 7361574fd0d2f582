"""Which steps the native executor takes, and that they are the eager executor's."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fixture_types import MakeLlama
from multi_step import greedy, unread

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.engine.device import num_tokens_ahead
from d3engine.errors import InvalidValueError
from d3engine.executor.native import MAX_ROWS
from d3engine.model.config import ModelConfig
from d3engine.model.weights import LayerWeights, LlamaWeights, load_weights
from d3engine.scheduling.multi_step import longest_run, shorter_and_shorter
from d3engine.scheduling.running import Chunks, RunningTable, Trait

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
MODEL: dict[str, Any] = {"seed": 11, "max_position_embeddings": 1024}

pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture(scope="module")
def engines(tiny_llama: MakeLlama) -> Iterator[tuple[Engine, Engine]]:
    directory = tiny_llama(**MODEL).directory
    with Engine(directory, **OPTIONS) as native, Engine(directory, enforce_eager=True, **OPTIONS) as eager:
        yield native, eager


@pytest.mark.parametrize("length", [1, 2, 17, 65, MAX_ROWS + 70])
def test_a_prompt_is_native_and_answers_as_an_eager_one(engines: tuple[Engine, Engine], length: int) -> None:
    native, eager = engines
    prompt = [(7 * token + length) % 250 + 3 for token in range(length)]
    before = native.stats().eager_steps
    for policy in (FullDepth(), D3(0.8, 0.3)):
        params = greedy(policy, prompt_logprobs=1)
        found, wanted = (engine.generate([prompt], params, use_tqdm=False)[0] for engine in engines)
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].depths == wanted.outputs[0].depths
        for mine, theirs in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            token = next(iter(theirs))
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
    assert native.stats().eager_steps == before
    assert eager.stats().native_steps == 0


def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(
    engines: tuple[Engine, Engine], tiny_llama: MakeLlama
) -> None:
    """Those of its tokens' log-probabilities, and those of the answers that follow."""
    native, _ = engines
    prompts = [[(11 * token + start) % 250 + 3 for token in range(length)] for start, length in ((1, 150), (2, 90))]
    params = greedy(D3(0.9, 0.3), 6, prompt_logprobs=1, logprobs=1)
    wanted = native.generate(prompts, params, use_tqdm=False)
    for size in (16, 100):
        with Engine(tiny_llama(**MODEL).directory, max_num_batched_tokens=size, max_num_seqs=2, **OPTIONS) as chunked:
            found = chunked.generate(prompts, params, use_tqdm=False)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.prompt_logprobs == theirs.prompt_logprobs
            assert mine.outputs[0].logprobs == theirs.outputs[0].logprobs


def test_no_step_is_taken_after_the_last_answer_ends(tiny_llama: MakeLlama) -> None:
    """No step is taken after the last answer has ended."""
    prompts = [[5, 9, 200, 31], [7] * 20]
    with Engine(tiny_llama(**MODEL).directory, num_scheduler_steps=16, **OPTIONS) as engine:
        free = [o.outputs[0].token_ids for o in engine.generate(prompts, greedy(FullDepth(), 16), use_tqdm=False)]
        params = [unread(greedy(FullDepth(), 16, stop_token_ids=[tokens[5]])) for tokens in free]
        before = engine.stats()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        after = engine.stats()
    lengths = [tokens.index(tokens[5]) + 1 for tokens in free]
    assert [output.outputs[0].token_ids for output in outputs] == [
        tokens[:length] for tokens, length in zip(free, lengths, strict=True)
    ]
    assert after.num_steps - before.num_steps == max(lengths)
    assert after.native_steps - before.native_steps == max(lengths)
    assert after.step_seconds.count - before.step_seconds.count == max(lengths)


def test_a_small_model_takes_longer_runs_of_few_answers(tiny_llama: MakeLlama) -> None:
    with Engine(tiny_llama(**MODEL).directory, **OPTIONS) as engine:
        for count, steps in ((1, 128), (2, 64), (4, 32), (8, 16), (9, 16)):
            for number in range(count):
                engine.add_request(str(number), [5, 9, 31], unread(greedy(FullDepth(), 160)))
            before = engine.stats().native_steps
            engine.step()  # the prompts' among them
            assert engine.stats().native_steps - before == steps
            engine.abort_request(map(str, range(count)))
            engine.step()


def test_run_is_short_where_a_text_may_end_it(tiny_llama: MakeLlama) -> None:
    """A run is short where a text may end it or memory is short."""
    # Of no more than 16 steps; and where these have no room either, of one.
    table = RunningTable(2, 2, 512)
    for slot, stop in enumerate((None, "end")):
        table.sequences[slot] = cast(Any, SimpleNamespace(params=greedy(FullDepth(), stop=stop)))
    alone, both = (Chunks(*np.zeros((4, n), np.int64), np.ones((n, 2), bool), traits=0) for n in (1, 2))
    assert longest_run(alone, table, 16, 64) == 64
    assert longest_run(replace(both, slots=np.arange(2)), table, 16, 64) == 16
    assert longest_run(alone, table, 1, 64) == 1
    # Whoever reads along ends a run when the text says so.
    read = replace(alone, slots=np.ones(1, np.int64), traits=Trait.STREAMS)
    assert longest_run(replace(both, slots=np.arange(2), traits=Trait.STREAMS), table, 16, 64) == 128
    assert longest_run(replace(both, slots=np.arange(2), traits=Trait.STREAMS), table, 16, 20) == 64
    assert longest_run(read, table, 16, 64) == 256
    assert longest_run(alone, table, 16, 64) == 64
    assert longest_run(read, table, 16, 0) == 16
    assert [[*shorter_and_shorter(longest, 16)] for longest in (256, 100, 16)] == [[256, 64, 16], [100, 25, 16], [16]]
    with Engine(tiny_llama(**MODEL).directory, max_num_seqs=2, **OPTIONS) as engine:
        found = []
        for spare in (8, 2, 1, 0):  # blocks of each layer that are free behind the first 128 tokens
            engine.add_request("one", [5, 9, 31], unread(greedy(FullDepth(), 300)))
            engine.step()
            pool = engine.scheduler.cache.pool
            engine.reset_prefix_cache()
            held = pool.allocate(pool.num_free - spare * engine.config.num_layers)
            before = engine.stats().native_steps
            engine.step()
            found.append(engine.stats().native_steps - before)
            pool.release(held)
            engine.abort_request("one")
            engine.step()
    assert found == [128, 32, 16, 1]


def test_a_large_model_takes_no_longer_runs_than_it_is_told() -> None:
    def tokens(given: int | None, executor: str, **sizes: int) -> int:
        config: Any = SimpleNamespace(**{"num_layers": 16, "layer_parameters": 2**17, "hidden_size": 128, **sizes})
        config.vocab_size = 2048
        return num_tokens_ahead(given, executor, config)

    assert tokens(None, "native") == 128
    assert 16 < tokens(None, "native", layer_parameters=2**18) < 128
    assert tokens(None, "native", layer_parameters=2**21) == 0
    assert tokens(16, "native") == tokens(None, "graphs") == tokens(None, "eager") == 0


def test_step_in_parts_chooses_in_each_of_them(engines: tuple[Engine, Engine]) -> None:
    """A step that goes through the layers in parts chooses in each of them."""
    # Rows that yield a token lie in its first, its second and its third part.
    lengths, draws = (MAX_ROWS - 200, 300, MAX_ROWS + 70), {"temperature": 1.5, "top_k": 7, "logprobs": 1}
    prompts = [[(7 * token + length) % 250 + 3 for token in range(length)] for length in lengths]
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True, seed=nth, **(draws if nth else {"temperature": 0}))
        for nth in range(len(prompts))
    ]
    found, wanted = (engine.generate(prompts, params, use_tqdm=False) for engine in engines)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        for row, other in zip(mine.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True):
            assert {token: place.logprob for token, place in row.items()} == pytest.approx(
                {token: place.logprob for token, place in other.items()}, abs=1e-4
            )


def with_last_layer(weights: LlamaWeights, change: Callable[[LayerWeights], dict[str, Any]]) -> LlamaWeights:
    *others, last = weights.layers
    return replace(weights, layers=[*others, replace(last, **change(last))])


STRANGE: dict[str, tuple[dict[str, Any], Callable[[LlamaWeights], LlamaWeights]]] = {
    "knows no torch.float64 matrices": ({}, lambda w: with_last_layer(w, lambda layer: {"qkv": layer.qkv.double()})),
    "is not contiguous torch.float32": ({}, lambda w: replace(w, lm_head=w.lm_head.t().contiguous().t())),
    "the sizes of the model do not fit": (  # more heads to one than it has room for
        {"hidden_size": 130, "num_attention_heads": 65, "num_key_value_heads": 1, "head_dim": 2},
        lambda w: w,
    ),
}


@pytest.mark.parametrize("said", STRANGE)
def test_weights_unknown_to_the_library_decode_by_pytorch(
    tiny_llama: MakeLlama, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    """Weights unknown to the library decode by PyTorch, said once with the reason."""
    sizes, change = STRANGE[said]
    directory = tiny_llama(seed=12, **sizes).directory
    usual = load_weights(
        directory,
        ModelConfig.from_directory(directory),
        dtype=torch.float32,
        weight_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    options = OPTIONS | {"weights": change(usual)}
    with caplog.at_level(logging.WARNING), Engine(directory, **options) as engine:
        assert engine.stats().executor == "eager"
        (answer,) = engine.generate([[5, 9, 200]], greedy(FullDepth()), use_tqdm=False)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "PyTorch alone, which takes several times longer" in warning
    assert said in warning
    with Engine(directory, enforce_eager=True, **options) as asked_for:
        (wanted,) = asked_for.generate([[5, 9, 200]], greedy(FullDepth()), use_tqdm=False)
    assert answer.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_who_asks_for_the_library_is_told_why_it_cannot_decode(
    tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("D3ENGINE_KERNELS", "native")
    sizes, _ = STRANGE["the sizes of the model do not fit"]
    with pytest.raises(InvalidValueError, match=r"D3ENGINE_KERNELS.*the sizes of the model do not fit each other"):
        Engine(tiny_llama(seed=12, **sizes).directory, **OPTIONS)
    monkeypatch.delenv("D3ENGINE_KERNELS")
    with pytest.raises(InvalidValueError, match=r"backend must be another than native, .*do not fit each other"):
        Engine(tiny_llama(seed=12, **sizes).directory, backend="native", **OPTIONS)
    with Engine(tiny_llama(seed=12, **sizes).directory, **OPTIONS) as engine:
        assert engine.stats().backend == "torch"

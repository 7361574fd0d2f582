"""An 8-bit cache: an oracle's tokens at every depth, the same answers whoever shares it, and every byte counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import LAYERS, block_bytes
from depth_oracle import ActiveLayers, d3, greedy_at_depth, layer_table
from e4m3 import kept
from fixture_types import MakeEngine, MakeLlama
from stepping import generated, greedy
from tiny_models import random_prompts, save_without_layer
from transformers_oracle import assert_answers

from d3engine import D3, Engine, FullDepth, LayerTable, Lossless, SamplingParams, Speculative
from d3engine.depth import DepthPolicy
from d3engine.engine.memory import resolve_kv_cache_dtype
from d3engine.errors import InvalidValueError
from d3engine.kernels.kv_pool import FP8, Fp8Pool

ALL = list(range(LAYERS))
WAKING = [ALL, ALL[:4], ALL[:2], [0, 1, 5], [0, 5], ALL, [0, 2, 4], [0], ALL]
CASES: dict[str, tuple[DepthPolicy, ActiveLayers, str]] = {
    "full depth": (FullDepth(), lambda step: set(ALL), "none"),
    "D3": (D3(0.9, 0.5), d3(LAYERS, 0.9, 0.5), "none"),
    "layers that wake, copied": (LayerTable(WAKING, on_skip="copy"), layer_table(WAKING), "copy"),
    "layers that wake, projected": (LayerTable(WAKING, on_skip="project"), layer_table(WAKING), "project"),
}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("case", CASES)
def test_tokens_over_8_bits_are_transformers(tiny_llama: MakeLlama, case: str) -> None:
    """Tokens are those of transformers with a cache rounded number by number."""
    tiny = tiny_llama(num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=48)
    policy, active, on_skip = CASES[case]
    prompts = random_prompts([1, 21], seed=4)
    answers = [greedy_at_depth(tiny.model, prompt, 32, active, on_skip, kept=kept) for prompt in prompts]
    for backend in ("auto", "torch"):
        outputs = generated(tiny.directory, prompts, greedy(32), depth=policy, backend=backend, **OPTIONS)
        assert_answers(outputs, answers, tie=1e-3)


def test_drafts_answer_as_full_depth_does_over_the_same_cache(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    tiny = tiny_llama(num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=48)
    second = save_without_layer(tiny, 2, tmp_path)
    prompts = random_prompts([3, 18, 9], seed=2)
    found = []
    for policy in (FullDepth(), Lossless(D3(0.8, 0.5), 4), Speculative(str(second), 3)):
        with Engine(tiny.directory, depth=policy, skip_tokenizer_init=True, **OPTIONS) as engine:
            outputs = engine.generate(prompts, greedy(24), use_tqdm=False)
            found.append([one.outputs[0].token_ids for one in outputs])
            if isinstance(policy, Speculative):
                assert isinstance(engine.executor._draft_model.pool, Fp8Pool)  # type: ignore[attr-defined]
    assert found[0] == found[1] == found[2]


def test_ranks_answer_as_one(tiny_llama: MakeLlama) -> None:
    tiny = tiny_llama(num_hidden_layers=4)
    prompts = random_prompts([3, 17, 9], seed=2)
    found = []
    for ranks in (1, 2):
        options: dict[str, Any] = {"max_model_len": 64, "tensor_parallel_size": ranks} | OPTIONS
        outputs = generated(tiny.directory, prompts, greedy(12), depth=D3(0.8, 0.3), **options)
        found.append([one.outputs[0].token_ids for one in outputs])
    assert found[0] == found[1]


def test_same_memory_holds_more_8_bit_blocks(make_engine: MakeEngine) -> None:
    """The same memory holds more blocks and every byte is counted."""
    memory = 200 * block_bytes()
    small = block_bytes(cache="fp8")
    wide, narrow = (make_engine(kv_cache_memory_bytes=memory, kv_cache_dtype=name) for name in ("auto", "fp8"))
    assert (wide.stats().kv_blocks_total, narrow.stats().kv_blocks_total) == (200, memory // small)
    pool = narrow.executor.pool
    assert isinstance(pool, Fp8Pool)
    assert pool.dtype == FP8
    assert pool.nbytes == (narrow.stats().kv_blocks_total + 1) * small
    narrow.add_request("one", list(range(10)), SamplingParams(max_tokens=4, ignore_eos=True))
    narrow.step()
    stats = narrow.stats()
    assert stats.kv_bytes_in_use == stats.kv_blocks_in_use * small == LAYERS * 3 * small


def test_native_library_decodes_by_either_name(make_engine: MakeEngine, native_library: None) -> None:
    """The native library decodes on a CPU by whichever name it is asked for."""
    answers = []
    for name in ("fp8", "fp8_e4m3"):
        engine = make_engine(kv_cache_dtype=name, num_scheduler_steps=4)
        answers.append(engine.generate([5, 6, 7], greedy(9), use_tqdm=False)[0].outputs[0].token_ids)
        stats = engine.stats()
        assert stats.executor.startswith("native")
        assert stats.native_steps > 0
        assert stats.eager_steps == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("given", ["int8", "fp8_e5m2", "", None, torch.float8_e4m3fn])
def test_another_name_is_refused(make_engine: MakeEngine, given: object) -> None:
    with pytest.raises(InvalidValueError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3; got"):
        make_engine(kv_cache_dtype=given)


@pytest.mark.parametrize(
    ("capability", "is_refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)]
)
def test_gpu_without_the_conversion_is_refused(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that cannot convert it is refused by its capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    asked: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    assert resolve_kv_cache_dtype("auto", **asked) == torch.bfloat16
    if is_refused:
        with pytest.raises(InvalidValueError, match=rf"auto on a GPU of compute capability 8\.{capability[1]}"):
            resolve_kv_cache_dtype("fp8", **asked)
    else:
        assert resolve_kv_cache_dtype("fp8", **asked) == FP8

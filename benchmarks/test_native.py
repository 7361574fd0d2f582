"""The native library on one thread: layers, attention, LM head, drafts, bridges and adapters; and what an engine adds.

The layers have the sizes of Qwen2.5-1.5B; there are four, since a cache may hold one.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.native_steps import FORMATS, NativeSteps, Sizes, runs_here
from benchmarks.systems import weights_of
from d3engine import AsyncEngine, Engine, SamplingParams
from d3engine.engine.model_directory import model_directory
from d3engine.kernels.native.library import LibraryMissing, library
from d3engine.model.config import ModelConfig

LAYERS = Sizes(layers=4, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128)
ATTENTION = Sizes(layers=1, hidden=64, intermediate=32, heads=12, kv_heads=2, head_dim=128, rows=8, context=8192)
HEAD = Sizes(layers=1, hidden=1536, intermediate=32, heads=1, kv_heads=1, head_dim=64, vocab=65536, rows=8)
SMALL = Sizes(layers=4, hidden=256, intermediate=256, heads=4, kv_heads=2, head_dim=64, vocab=64)
SKIPPED = (1, 2)
DRAFT = 4
HIT = 256


@pytest.fixture(autouse=True, scope="module")
def _native_library() -> None:
    try:
        library()
    except LibraryMissing as error:
        pytest.skip(str(error))


@lru_cache(maxsize=1)
def steps_of(sizes: Sizes, weight_format: str, **options: str) -> NativeSteps:
    return NativeSteps(sizes, weight_format, **options)


def describe(benchmark: BenchmarkFixture, group: str, rows: int, bytes_read: int) -> None:
    benchmark.group = f"{group}, rows: {rows}"
    benchmark.extra_info.update(rows=rows, bytes_read=bytes_read)


@pytest.mark.parametrize("rows", [1, 5, 8, 32])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_layers(benchmark: BenchmarkFixture, small: bool, weight_format: str, rows: int) -> None:
    if not runs_here(weight_format):
        pytest.skip("this processor has no instructions for 8-bit activations")
    steps = steps_of(SMALL if small else LAYERS, weight_format)
    describe(benchmark, f"{steps.sizes.layers} layers", rows, steps.bytes_read(rows))
    benchmark(steps.step, steps.rows(rows))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("context", [1024, 8192])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "fp8"])
def test_attention(benchmark: BenchmarkFixture, kv_cache_dtype: str, context: int, rows: int) -> None:
    steps = steps_of(ATTENTION, "float32", kv_cache_dtype=kv_cache_dtype)
    describe(benchmark, f"attention, context: {context}", rows, steps.bytes_read(rows, context=context))
    benchmark(steps.step, steps.rows(rows, context=context))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "Q6_K"])
def test_head(benchmark: BenchmarkFixture, small: bool, weight_format: str, rows: int) -> None:
    steps = steps_of(SMALL if small else HEAD, "float32", head_format=weight_format)
    skipped = range(steps.sizes.layers)
    describe(benchmark, "LM head", rows, steps.bytes_read(rows, skipped=skipped))
    benchmark(steps.step, steps.rows(rows, skipped=skipped))


@pytest.mark.parametrize("cycle", ["a step", "a draft and its verification"])
def test_drafts(benchmark: BenchmarkFixture, small: bool, cycle: str) -> None:
    steps = steps_of(SMALL if small else LAYERS, "bfloat16")
    full, drafted = steps.bytes_read(1), steps.bytes_read(1, skipped=SKIPPED)
    if cycle == "a step":
        describe(benchmark, f"drafts of {DRAFT} tokens", 1, full)
        benchmark(steps.step, steps.rows(1))
    else:
        describe(benchmark, f"drafts of {DRAFT} tokens", 1, full + DRAFT * drafted)
        benchmark(steps.draft_and_verify, 1, DRAFT, SKIPPED)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", ["nothing", "bridge", "bridge of rank 64", "adapter of rank 16"])
def test_linear_maps(benchmark: BenchmarkFixture, small: bool, kind: str, rows: int) -> None:
    steps = steps_of(SMALL if small else LAYERS, "bfloat16")
    further: dict[str, Any] = {}
    of_maps, hidden = 0, steps.sizes.hidden
    if kind.startswith("bridge"):
        rank = 64 if "rank" in kind else None
        further["bridges"] = [steps.bridges(SKIPPED[0], SKIPPED[-1] + 1, rank)] * rows
        of_maps = 4 * hidden * (2 * rank if rank else hidden)
    elif kind.startswith("adapter"):
        adapter = steps.adapter(16)
        further["adapters"] = [adapter] * rows
        of_maps = sum(one.nbytes for one in adapter.maps if one is not None) * (4 - len(SKIPPED)) // 4
    describe(benchmark, "layers and linear maps", rows, steps.bytes_read(rows, skipped=SKIPPED) + of_maps)
    benchmark(steps.step, steps.rows(rows, skipped=SKIPPED, **further))


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.benchmark(group=f"the first token of a prompt of {HIT} tokens, demo")
@pytest.mark.parametrize("prefix_cache", ["hit", "miss"])
def test_prefix_cache(benchmark: BenchmarkFixture, prefix_cache: str) -> None:
    prompt = {"prompt_token_ids": [3 + place % 97 for place in range(HIT)]}
    with Engine("demo", device="cpu", num_threads=1, max_num_seqs=1) as engine:

        def answer() -> Any:
            return engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)

        def prepare() -> None:
            if prefix_cache == "miss":
                engine.reset_prefix_cache()

        answer()
        (output,) = benchmark.pedantic(answer, setup=prepare, rounds=50, warmup_rounds=1)
    assert bool(output.num_cached_tokens) == (prefix_cache == "hit")


@pytest.mark.benchmark(group="loading an engine, demo")
@pytest.mark.parametrize("file", ["safetensors", "GGUF, Q8_0"])
def test_loading(benchmark: BenchmarkFixture, tmp_path: Path, file: str) -> None:
    model = directory = model_directory("demo")
    files = list(directory.glob("*.safetensors"))
    if file != "safetensors":
        pytest.importorskip("gguf", reason="the extra gguf is not installed")
        from benchmarks.gguf_writing import write_gguf

        config, model = ModelConfig.from_directory(directory), tmp_path / "demo.gguf"
        write_gguf(model, config, weights_of(directory, config), "8-bit", directory)
        files = [model]
    benchmark.extra_info.update(bytes_read=sum(path.stat().st_size for path in files))

    def load() -> None:
        Engine(model, device="cpu", num_threads=1, max_num_seqs=1).close()

    benchmark.pedantic(load, rounds=10, warmup_rounds=1)


@pytest.mark.benchmark(group="a request of 8 tokens, demo")
@pytest.mark.parametrize("caller", ["server", "engine"])
def test_request(benchmark: BenchmarkFixture, caller: str) -> None:
    """From the server's application on: no socket is part of it."""
    testclient = pytest.importorskip("starlette.testclient", reason="the extra serve is not installed")
    from d3engine.server.app import create_app
    from d3engine.server.settings import ServerSettings

    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 1}
    prompt, params = "Question: 5 + 3?\nAnswer:", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    if caller == "engine":
        with Engine("demo", **options) as engine:
            benchmark(engine.generate, [prompt], params, use_tqdm=False)
        return
    asked = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    client = AsyncEngine("demo", **options)
    try:
        app = create_app(client, ServerSettings(model_names=("demo",)))
        with testclient.TestClient(app, base_url="http://127.0.0.1:8000") as http:
            answer = benchmark(http.post, "/v1/completions", json=asked)
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        asyncio.run(client.close())

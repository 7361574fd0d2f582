"""LoRA adapters: answers are those of PEFT's merged model, and nothing depends on who shares a batch."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import DENSE, NO_PAD, make_family
from loops import HANG_SECONDS, assert_second_ends_first, looping, on_a_loop
from peft_adapters import ADAPTERS, Adapted, save_adapter, save_all
from tiny_models import random_prompts, save_tiny_llama

from d3engine import (
    D3,
    AsyncEngine,
    EarlyExit,
    Engine,
    InvalidValueError,
    LayerTable,
    LoRARequest,
    Lossless,
    PromptLookup,
    RequestOutput,
    SamplingParams,
    Speculative,
)
from d3engine.async_engine import wire
from d3engine.depth import DepthPolicy
from d3engine.engine import resolve
from d3engine.executor import adapters

NAMES = [None, *ADAPTERS]
TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
REPORTING = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3)
PROMPTS = random_prompts([5, 37, 9], seed=3)
PROMPTS[2] *= 2  # lookups find a draft in it
MIX = [(prompt, name) for prompt in PROMPTS for name in NAMES]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return save_all(tmp_path_factory.mktemp("adapted"))


def engine_of(adapted: Adapted, **changes: Any) -> Engine:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    options |= {"kv_cache_memory_bytes": 2**22, "lora_modules": adapted.paths, "num_threads": 2}
    return Engine(adapted.model, **(options | changes))


@pytest.fixture(scope="module")
def native(adapted: Adapted, native_library: None) -> Iterator[Engine]:
    with engine_of(adapted) as engine:
        assert engine.stats().executor.startswith("native")
        yield engine


@pytest.fixture(scope="module")
def alone(native: Engine) -> list[RequestOutput]:
    """Each of `MIX` by itself, its prompt computed anew."""
    found = []
    for prompt, name in MIX:
        native.reset_prefix_cache()
        found += native.generate([prompt], REPORTING, use_tqdm=False, lora_request=name)
    return found


def together(engine: Engine, params: SamplingParams = REPORTING) -> list[RequestOutput]:
    prompts, names = [prompt for prompt, _ in MIX], [name for _, name in MIX]
    return engine.generate(prompts, params, use_tqdm=False, lora_request=names)


def assert_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """To the last bit of every log-probability."""
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_mixed_batch_answers_as_pefts_merged_models(adapted: Adapted, native_library: None) -> None:
    expected = [adapted.answer(name, prompt, TOKENS) for prompt, name in MIX]
    for backend in ("native", "torch"):
        with engine_of(adapted, backend=backend) as engine:
            assert [output.outputs[0].token_ids for output in together(engine, GREEDY)] == expected
    assert len(set(map(tuple, expected))) == len(MIX), "equal answers of two adapters would prove little"


def test_graphs_serve_adapters(adapted: Adapted, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    from d3engine.executor.cuda_graph import GraphExecutor

    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "graphs")
    with engine_of(adapted) as engine:
        assert isinstance(engine.executor, GraphExecutor)
        found = together(engine, GREEDY)
        captured = engine.stats().graphs_captured
        # Other adapters with maps for the same matrices, on the same rows: the graphs that are there serve them.
        names = ["some" if name == "patterns" else "all" if name == "some" else name for _, name in MIX]
        engine.generate([prompt for prompt, _ in MIX], GREEDY, use_tqdm=False, lora_request=names)
        assert engine.stats().graphs_captured == captured
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in alone]


@pytest.mark.parametrize("has_model", [False, True], ids=["lookups", "draft model"])
def test_drafts_with_adapters_are_verified_in_graphs(
    adapted: Adapted, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, has_model: bool
) -> None:
    """Each row of a draft runs with the adapter of its sequence."""
    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "graphs")
    policy = Speculative(str(adapted.model), 3) if has_model else PromptLookup(4)
    with engine_of(adapted, depth=policy) as engine:
        found = together(engine, GREEDY)
        stats = engine.stats()
        assert stats.drafted_tokens > 0
        assert stats.eager_steps == 1, "the prompts'"
        assert stats.graph_steps > 5
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in alone]


def test_prompt_blocks_are_shared_within_an_adapter_alone(native: Engine) -> None:
    native.reset_prefix_cache()
    prompt = random_prompts([40], seed=9)[0]
    cached = []
    for name in ("all", "some", None, "all", "some", None):
        (output,) = native.generate([prompt], GREEDY, use_tqdm=False, lora_request=name)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32]


@pytest.mark.parametrize("kind", ["second model", "lookup", "own layers"])
def test_drafts_change_no_token_of_an_adapted_answer(
    adapted: Adapted, alone: list[RequestOutput], tmp_path: Path, kind: str
) -> None:
    depth = {
        "second model": lambda: Speculative(str(save_tiny_llama(tmp_path, num_hidden_layers=1).directory), 3),
        "lookup": lambda: PromptLookup(draft_length=3),
        "own layers": lambda: Lossless(D3(0.8, 0.4), 3),
    }[kind]()
    with engine_of(adapted, depth=depth) as engine:
        assert_equal(together(engine), alone)
        assert engine.stats().drafted_tokens > 0


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral with a window": ("mistral", {"sliding_window": 12}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Phi-3, whose matrices are fused": ("phi3", NO_PAD),
    "Granite": ("granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.11, "logits_scaling": 5.0}),
    "Gemma 2": ("gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16}),
    "OLMo 2": ("olmo2", NO_PAD),
    "Phi-3 of which part of a head is turned": ("phi3", NO_PAD | {"partial_rotary_factor": 0.5}),
    "GLM-4": ("glm", NO_PAD),
    "GLM-4 of 2025": ("glm4", NO_PAD),
    "EXAONE 4": ("exaone4", {"sliding_window": 12}),
    "ERNIE 4.5": ("ernie4_5", NO_PAD),
    "Granite 4": ("granitemoehybrid", DENSE | {"residual_multiplier": 0.22, "logits_scaling": 5.0}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_other_families_answer_as_merged_models(family: str, tmp_path: Path, native_library: None) -> None:
    """Adapters of other families answer as PEFT's merged models."""
    make_family(tmp_path / "model", FAMILIES[family])
    made = save_adapter(tmp_path / "model", tmp_path / "own", 1, r=4, lora_alpha=8, target_modules="all-linear")
    adapted = Adapted(tmp_path / "model", {"own": tmp_path / "own"}, {"own": made.merge_and_unload()})
    prompts = PROMPTS[:2]
    expected = [adapted.answer("own", prompt, TOKENS) for prompt in prompts]
    for backend in ("native", "torch"):
        with engine_of(adapted, backend=backend) as engine:
            with_it = engine.generate(prompts, GREEDY, use_tqdm=False, lora_request="own")
            without = engine.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in with_it] == expected
        assert [output.outputs[0].token_ids for output in without] != expected


PACKED = {"weight_dtype": "bfloat16", "weight_compression": "bf12"}


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "fp8"}, {"weight_dtype": "bfloat16"}, PACKED], ids=str)
def test_adapters_go_with_any_weights_and_cache(
    adapted: Adapted, native_library: None, changes: dict[str, Any]
) -> None:
    with engine_of(adapted, **changes) as engine:
        alone = [engine.generate([prompt], REPORTING, use_tqdm=False, lora_request=name)[0] for prompt, name in MIX]
        engine.reset_prefix_cache()
        assert_equal(together(engine), alone)
        assert len({tuple(output.outputs[0].token_ids) for output in alone}) == len(MIX)


@pytest.mark.parametrize(
    "depth",
    [
        D3(0.8, 0.4),
        D3(0.8, 0.4, on_skip="copy"),
        LayerTable([[0, 1, 2], [0, 2], [0, 1, 2]], on_skip="project"),
        EarlyExit(0.5),
    ],
    ids=["D3", "copied entries", "projected entries", "early exit"],
)
def test_adapters_follow_any_depth(adapted: Adapted, native_library: None, depth: DepthPolicy) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, depth=depth)
    answers = []
    for backend in ("native", "torch"):
        with engine_of(adapted, backend=backend) as engine:
            answers.append([output.outputs[0].token_ids for output in together(engine, params)])
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == len(MIX)


def test_a_request_finishes_with_the_adapter_it_began_with(adapted: Adapted, tmp_path: Path) -> None:
    other = save_adapter(adapted.model, tmp_path / "other", seed=9, **ADAPTERS["all"]).merge_and_unload()
    prompt = PROMPTS[1]
    with engine_of(adapted) as engine:
        engine.add_request("first", prompt, GREEDY, lora_request="all")
        engine.step()
        engine.unload_lora_adapter("all")
        with pytest.raises(InvalidValueError, match="lora_request must be the name of a loaded adapter"):
            engine.add_request("late", prompt, GREEDY, lora_request="all")
        engine.load_lora_adapter("all", tmp_path / "other")
        engine.add_request("second", prompt, GREEDY, lora_request="all")
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step()}
    assert done["first"].outputs[0].token_ids == adapted.answer("all", prompt, TOKENS)
    expected = Adapted(adapted.model, {}, {"other": other}).answer("other", prompt, TOKENS)
    assert done["second"].outputs[0].token_ids == expected


def test_adapters_named_by_path_are_loaded_and_make_room(adapted: Adapted, alone: list[RequestOutput]) -> None:
    expected = {name: output.outputs[0].token_ids for (_, name), output in zip(MIX[:4], alone[:4], strict=True)}
    with engine_of(adapted, lora_modules=None, max_loras=1) as engine:
        for number, name in enumerate(ADAPTERS, 1):
            asked = LoRARequest(name, number, adapted.paths[name] if number % 2 else str(adapted.paths[name]))
            for one in (asked, adapted.paths[name]):
                (output,) = engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=one)
                assert output.outputs[0].token_ids == expected[name]
        assert engine.lora_adapters == {}
        unread = {"lora_name": "new", "lora_path": "/nowhere"}
        with pytest.raises(InvalidValueError, match="lora_path must be an adapter of this model"):
            engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=unread)
        assert engine.adapters.is_loaded(adapted.paths[name])  # what cannot be read takes no other's place
        engine.load_lora_adapter("kept", adapted.paths["all"])
        with pytest.raises(InvalidValueError, match="1 adapters are loaded, max_loras at once"):
            engine.load_lora_adapter("more", adapted.paths["some"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("unknown", "lora_request must be the name of a loaded adapter"),
        (5, "lora_request must be None, the name of an adapter, a path, or LoRARequest"),
        ({"lora_name": "all", "lora_path": "/elsewhere"}, "lora_path must be"),
        ({"lora_name": "new", "lora_path": "/nowhere"}, "lora_path must be an adapter of this model"),
        (["all"], "lora_request must be one, or 2"),
    ],
)
def test_what_names_no_adapter_is_refused(native: Engine, asked: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        native.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=asked)


@pytest.mark.parametrize("transport", ["thread", "process"])
@on_a_loop
async def test_async_engine_loads_and_unloads_at_work(
    adapted: Adapted, alone: list[RequestOutput], transport: str
) -> None:
    expected = {(len(prompt), name): one.outputs[0].token_ids for (prompt, name), one in zip(MIX, alone, strict=True)}

    async def answer(engine: AsyncEngine, prompt: list[int], name: str | None) -> None:
        *_, last = [output async for output in engine.generate(prompt, GREEDY, lora_request=name)]
        assert last.outputs[0].token_ids == expected[len(prompt), name]

    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**22}
    modules = {name: str(adapted.paths[name]) for name in ("all", "some")}
    engine = AsyncEngine(adapted.model, device="cpu", transport=transport, lora_modules=modules, **options)
    async with engine:
        others = [asyncio.create_task(answer(engine, *one)) for one in MIX if one[1] != "patterns"]
        await engine.load_lora_adapter("patterns", adapted.paths["patterns"])
        assert set(engine.lora_adapters) == set(ADAPTERS)
        for prompt in PROMPTS:
            await answer(engine, prompt, "patterns")
        await asyncio.gather(*others)
        await engine.unload_lora_adapter("patterns")
        brought = LoRARequest("brought", 7, str(adapted.paths["patterns"]))
        *_, last = [output async for output in engine.generate(PROMPTS[0], GREEDY, lora_request=brought)]
        assert last.outputs[0].token_ids == expected[len(PROMPTS[0]), "patterns"]
        with pytest.raises(InvalidValueError, match="lora_request must be"):
            await answer(engine, PROMPTS[0], "patterns")


@on_a_loop
async def test_event_loop_goes_on_while_an_adapter_is_read(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, native_library: None
) -> None:
    """Other requests are answered meanwhile, those that name an adapter among them, and adapters are unloaded."""
    begun, goes_on = held_reading(monkeypatch)
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**22}
    modules = {"all": str(adapted.paths["all"])}
    async with AsyncEngine(adapted.model, device="cpu", transport="thread", lora_modules=modules, **options) as engine:
        begun.clear()
        goes_on.clear()
        loading = asyncio.create_task(engine.load_lora_adapter("some", adapted.paths["some"]))
        assert await asyncio.to_thread(begun.wait, HANG_SECONDS)
        assert list(engine.lora_adapters) == ["all"]
        # More of them than threads read the requests of adapters that are not there yet.
        waiting = [asyncio.create_task(engine.prepare(PROMPTS[0], GREEDY, lora_request="some")) for _ in range(3)]
        async with asyncio.timeout(HANG_SECONDS / 2):
            *_, last = [output async for output in engine.generate(PROMPTS[0], GREEDY, lora_request="all")]
            await engine.unload_lora_adapter("all")
        assert last.finished
        goes_on.set()
        await asyncio.gather(loading, *waiting)
        assert list(engine.lora_adapters) == ["some"]


def held_reading(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """What is set when an adapter begins to be read, and what lets it be read while it is set, as it is now."""
    begun, goes_on, read = threading.Event(), threading.Event(), adapters.read_adapter
    goes_on.set()

    def wait_and_read(*given: Any, **named: Any) -> Any:
        begun.set()
        assert goes_on.wait(HANG_SECONDS)
        return read(*given, **named)

    monkeypatch.setattr(adapters, "read_adapter", wait_and_read)
    return begun, goes_on


@pytest.mark.parametrize("message", ["load", "first use"])
def test_a_process_steps_and_takes_while_it_reads_an_adapter(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """The loop and the inbox of an engine's process wait for no adapter that others load."""
    begun, goes_on = held_reading(monkeypatch)
    with engine_of(adapted, lora_modules=None, backend="torch") as engine, looping(engine) as (inbox, replies):
        try:
            goes_on.clear()
            named, params = ("some", str(adapted.paths["some"])), wire.plain_params(GREEDY)
            asked = {
                "load": wire.Ask(1, "load_lora_adapter", named),
                "first use": wire.Add(1, None, None, PROMPTS[0], params, 0, adapter=named),
            }
            inbox.take(asked[message])
            assert begun.wait(HANG_SECONDS)
            inbox.take(wire.Add(2, None, None, PROMPTS[0], params, 0))
            assert_second_ends_first(replies, goes_on)
        finally:
            goes_on.set()


@on_a_loop
async def test_cancelled_loading_leaves_no_adapter_half_loaded(adapted: Adapted, native_library: None) -> None:
    """An engine and its process agree on what is loaded, whenever the caller leaves: it can be unloaded, and loaded."""
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**22}
    async with AsyncEngine(adapted.model, device="cpu", transport="process", **options) as engine:
        ask = engine._dispatcher.ask

        def ask_and_leave(*arguments: Any) -> Any:
            loading.cancel()  # which its next wait raises
            return ask(*arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine._dispatcher, "ask", ask_and_leave)
            loading = asyncio.create_task(engine.load_lora_adapter("some", adapted.paths["some"]))
            with pytest.raises(asyncio.CancelledError):
                await loading
        await engine.unload_lora_adapter("some")
        await engine.load_lora_adapter("some", adapted.paths["some"])
        assert list(engine.lora_adapters) == ["some"]
        await engine.prepare(PROMPTS[0], GREEDY, lora_request=LoRARequest("brought", 7, str(adapted.paths["all"])))
        await engine.unload_lora_adapter("brought")  # which the process has never had

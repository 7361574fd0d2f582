"""Captured hidden states are transformers', steering is a forward hook there, and neither depends on the batch."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from bad_values import assert_refused
from batches import assert_same
from kinds_of_engine import same_bits
from safetensors.numpy import load_file
from stepping import finish
from tiny_models import TINY, TinyLlama, random_prompts, save_random, save_tiny_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2Config

from d3engine import (
    D3,
    AsyncEngine,
    Capture,
    EarlyExit,
    Engine,
    InvalidValueError,
    LayerTable,
    Lossless,
    PromptLookup,
    RequestOutput,
    SamplingParams,
    Steer,
)
from d3engine.depth import DepthPolicy
from d3engine.engine import resolve
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.request.hidden_states import Positions

LAYERS, HIDDEN, TOKENS, BLOCK = 4, 48, 12, 16
EVERY = list(range(LAYERS + 1))
PROMPTS = random_prompts([1, 5, 40, 40], seed=5)
PROMPTS[3][:32] = PROMPTS[2][:32]  # two blocks that may be shared
NUMBERS = np.random.default_rng(0)
VECTOR = NUMBERS.normal(size=HIDDEN).astype(np.float32)
DOWN, UP = (0.2 * NUMBERS.normal(size=shape).astype(np.float32) for shape in ((3, HIDDEN), (HIDDEN, 3)))
CHANGES = {0: VECTOR, 2: (DOWN, UP), 3: VECTOR[::-1].copy()}

FloatArray = npt.NDArray[np.floating[Any]]


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **given)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


def engine_of(tiny: TinyLlama, **changes: Any) -> Engine:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "block_size": BLOCK}
    return Engine(tiny.directory, **(options | {"kv_cache_memory_bytes": 2**22, "num_threads": 2} | changes))


@pytest.fixture(scope="module")
def native(tiny: TinyLlama, native_library: None) -> Iterator[Engine]:
    with engine_of(tiny) as engine:
        assert engine.stats().executor.startswith("native")
        yield engine


def answer(engine: Engine, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return engine.generate(list(prompts), params, use_tqdm=False)


def states_of(output: RequestOutput) -> list[FloatArray]:
    """Of each layer in turn."""
    states = output.outputs[0].hidden_states
    assert states is not None
    return [states[layer] for layer in states.layers]


def tokens_of(output: RequestOutput) -> list[int]:
    return output.prompt_token_ids + output.outputs[0].token_ids


@contextmanager
def hooked(model: Any, steer: Steer, prompt_length: int) -> Iterator[None]:
    """Forward pre-hooks of PyTorch at the layers of transformers' model, for tokens at the positions of `steer`."""
    positions = steer.at(prompt_length)

    def add(change: Any, states: Tensor) -> Tensor:
        where = torch.from_numpy(positions.among(np.arange(states.shape[1])))[:, None]
        down_up = [torch.from_numpy(np.array(one)) for one in change] if isinstance(change, tuple) else None
        added = torch.tensor(change) if down_up is None else states @ down_up[0].t() @ down_up[1].t()
        return torch.where(where, states + added, states)

    def hook(change: Any) -> Callable[..., Any]:
        return lambda _, arguments: (add(change, arguments[0]), *arguments[1:])

    handles = [model.model.layers[at].register_forward_pre_hook(hook(change)) for at, change in steer.changes.items()]
    yield
    for handle in handles:
        handle.remove()


def inputs_of_layers(model: Any, token_ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """What reaches each layer behind its hooks, what the final norm makes, and the logits."""
    found: list[Tensor] = []
    keep = lambda _, arguments: found.append(arguments[0][0].clone())  # noqa: E731
    handles = [layer.register_forward_pre_hook(keep) for layer in model.model.layers]
    handles.append(model.model.norm.register_forward_hook(lambda _, __, output: found.append(output[0])))
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    for handle in handles:
        handle.remove()
    return found, logits


def assert_close(found: FloatArray, expected: Tensor) -> None:
    """To 1e-5 of the largest value."""
    largest = float(expected.abs().max())
    assert found.shape == tuple(expected.shape)
    assert float(np.abs(found - expected.numpy()).max()) <= 1e-5 * max(1.0, largest)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_captured_states_are_transformers_hidden_states(tiny: TinyLlama, backend: str, native_library: None) -> None:
    with engine_of(tiny, backend=backend) as engine:
        outputs = answer(engine, PROMPTS, greedy(capture=EVERY))
        assert engine.stats().executor.startswith(("native", "eager"))
    for output in outputs:
        tokens = tokens_of(output)[:-1]
        with torch.inference_mode():
            expected = tiny.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        states = output.outputs[0].hidden_states
        assert states is not None
        assert states.positions.tolist() == list(range(len(tokens)))
        assert states.layers == tuple(EVERY)
        for layer in EVERY:
            assert_close(states[layer], expected[layer][0])


@pytest.mark.parametrize("config", [Qwen2Config, Gemma2Config])
def test_other_families_have_transformers_hidden_states(tmp_path: Path, config: Any, native_library: None) -> None:
    sizes = {key: TINY[key] for key in TINY if key not in ("bos_token_id", "eos_token_id")}
    torch.manual_seed(1)
    family = save_random(tmp_path, AutoModelForCausalLM.from_config(config(**sizes)))
    steer = Steer({1: VECTOR})
    with engine_of(family) as engine:
        plain, steered = (answer(engine, PROMPTS[:3], greedy(capture=range(4), steer=one)) for one in (None, steer))
    for one, other in zip(plain, steered, strict=True):
        expected, _ = inputs_of_layers(family.model, tokens_of(one)[:-1])
        for found, layer in zip(states_of(one), expected, strict=True):
            assert_close(found, layer)
        with hooked(family.model, steer, len(other.prompt_token_ids)):
            expected, logits = inputs_of_layers(family.model, tokens_of(other)[:-1])
        for found, layer in zip(states_of(other), expected, strict=True):
            assert_close(found, layer)
        assert logits.argmax(-1).tolist()[-TOKENS:] == other.outputs[0].token_ids


POSITIONS = ["all", "prompt", "generated", "last", slice(3, None, 2), slice(-2, 9)]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_steering_is_a_forward_hook_in_transformers(
    tiny: TinyLlama, positions: Any, backend: str, native_library: None
) -> None:
    steer = Steer(CHANGES, positions)
    with engine_of(tiny, backend=backend) as engine:
        outputs = answer(engine, PROMPTS, greedy(capture=EVERY, steer=steer))
        plain = answer(engine, PROMPTS, greedy())
    for output in outputs:
        with hooked(tiny.model, steer, len(output.prompt_token_ids)):
            expected, logits = inputs_of_layers(tiny.model, tokens_of(output)[:-1])
        for layer, found in enumerate(states_of(output)):
            assert_close(found, expected[layer])
        assert logits.argmax(-1).tolist()[-TOKENS:] == output.outputs[0].token_ids
    assert [tokens_of(one) for one in outputs] != [tokens_of(one) for one in plain]


def test_decoding_takes_several_steps_in_one_call(native: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    run = native.executor.run
    monkeypatch.setattr(native.executor, "run", lambda plan: steps.append(plan.num_steps) or run(plan))
    answer(native, PROMPTS[:2], greedy(capture=EVERY, steer=CHANGES))
    assert max(steps) >= TOKENS - 1


def test_captured_prompts_take_no_hits_from_the_first_position(native: Engine) -> None:
    """Captured prompts take no hits from the first position on."""
    cached = []
    answer(native, PROMPTS[2:3], greedy())
    for positions in ("all", slice(20, None), "last", "generated"):
        (output,) = answer(native, PROMPTS[2:3], greedy(capture=Capture([1], positions)))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 16, 32, 32]


def test_prompt_blocks_are_shared_by_equal_steering_alone(native: Engine) -> None:
    native.reset_prefix_cache()
    cached = []
    salts = (CHANGES, None, {0: VECTOR}, Steer({0: VECTOR}, slice(3)), Steer({0: VECTOR}, "generated"))
    for _ in range(2):
        for steer in salts:
            (output,) = answer(native, PROMPTS[2:3], greedy(steer=steer))
            cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 0, 32, 32, 32, 32, 32, 32]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("depth", [Lossless(D3(alpha=0.7, start=0.3)), PromptLookup(3)], ids=repr)
def test_hooked_requests_do_not_draft(tiny: TinyLlama, depth: DepthPolicy, backend: str, native_library: None) -> None:
    """Hooked requests do not draft and have full depth's states."""
    few = {"allowed_token_ids": [7, 8, 9]} if backend == "torch" else {}  # lookups will find a draft
    given = {"capture": EVERY, "steer": {1: VECTOR}} | few
    with engine_of(tiny, backend=backend) as engine:
        (expected,) = answer(engine, PROMPTS[1:2], greedy(**given))
        plain, hooked = answer(engine, [PROMPTS[1]] * 2, [greedy(depth=depth, **few), greedy(depth=depth, **given)])
        (drafting,) = answer(engine, PROMPTS[1:2], greedy(depth=depth, **few))
    for found, states in zip(states_of(hooked), states_of(expected), strict=True):
        assert np.array_equal(found, states) if backend == "native" else np.allclose(found, states, atol=1e-4)
    assert hooked.outputs[0].token_ids == expected.outputs[0].token_ids
    assert hooked.metrics.num_drafted_tokens == 0
    assert drafting.metrics.num_drafted_tokens > 0 or (backend == "native" and isinstance(depth, PromptLookup))
    assert drafting.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "depth", [D3(alpha=0.7, start=0.3), EarlyExit(0.3), LayerTable([[0, 1, 2, 3], [0, 3], [0, 2, 3]])]
)
def test_skipped_layer_passes_state_on(tiny: TinyLlama, depth: DepthPolicy, backend: str, native_library: None) -> None:
    with engine_of(tiny, backend=backend, depth=depth) as engine:
        outputs = answer(engine, PROMPTS, greedy(capture=EVERY))
    skipped = 0
    for output in outputs:
        states = states_of(output)
        moved = np.array([(states[layer] != states[layer + 1]).any(axis=1) for layer in range(LAYERS)])
        first = len(output.prompt_token_ids)
        # The state of the token at step i is what yields token i + 1.
        assert moved[:3, first:].sum(axis=0).tolist() == [
            min(layers, 3) if isinstance(depth, EarlyExit) else len(set(_runs(depth, step)) - {3})
            for step, layers in enumerate(output.outputs[0].depths[1:], start=1)
        ]
        skipped += int((~moved[:3]).sum())
    assert skipped > 0


def _runs(depth: DepthPolicy, step: int) -> list[int]:
    return np.nonzero(depth.schedule(LAYERS).active(step))[0].tolist()


def test_d3_steers_in_front_of_layers_that_a_token_skips(native: Engine) -> None:
    """Behind a skipped layer the state is that before it, and what is added in front of the next one."""
    depth = D3(alpha=0.5, start=0.25)
    assert _runs(depth, 3) == [0]
    (output,) = answer(native, PROMPTS[1:2], greedy(capture=EVERY, steer={2: VECTOR}, depth=depth))
    states = states_of(output)
    assert np.array_equal(states[2][-1], states[1][-1] + VECTOR)
    assert np.array_equal(states[3][-1], states[2][-1])


def test_graphs_leave_hooked_steps_to_the_eager_executor(
    tiny: TinyLlama, native: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "graphs")
    given = greedy(capture=EVERY, steer=CHANGES, logprobs=2)
    with engine_of(tiny) as engine:
        assert isinstance(engine.executor, GraphExecutor)
        outputs = answer(engine, PROMPTS, given)
        assert engine.stats().graph_steps == 0
        answer(engine, PROMPTS, greedy())
        assert engine.stats().graph_steps > 0
    for output, expected in zip(outputs, answer(native, PROMPTS, given), strict=True):
        assert_same(output, expected)


def test_a_path_gets_a_file_and_float16_halves_it(native: Engine, tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    (expected,) = answer(native, PROMPTS[1:2], greedy(capture=Capture([1, 4], "generated")))
    given = Capture([4, 1], "generated", "float16", path)
    (output,) = answer(native, PROMPTS[1:2], greedy(capture=given))
    states, wanted = output.outputs[0].hidden_states, expected.outputs[0].hidden_states
    assert states is not None
    assert wanted is not None
    assert states.path == str(path)
    tensors = load_file(path)
    assert set(tensors) == {"hidden_states.1", "hidden_states.4", "positions", "token_ids"}
    assert tensors["positions"].tolist() == list(range(5, 5 + TOKENS - 1))
    assert tensors["token_ids"].tolist() == output.outputs[0].token_ids[:-1]
    for layer in (1, 4):
        assert states[layer].dtype == np.float16
        assert np.array_equal(states[layer], wanted[layer].astype(np.float16))
        assert np.array_equal(states[layer], tensors[f"hidden_states.{layer}"])
    with pytest.raises(KeyError, match="layer 2 was not captured; those that were: 1, 4"):
        states[2]


def test_a_file_that_cannot_be_written_ends_its_request_alone(native: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    native.add_request("file", PROMPTS[0], greedy(capture=Capture(1, path=folder / "states")))
    native.add_request("other", PROMPTS[1], greedy())
    folder.rmdir()
    outputs = {}
    while native.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in native.step() if output.finished}
    assert outputs["file"].finish_reason == "abort"
    assert "states cannot be written: No such file or directory" in str(outputs["file"].stop_reason)
    assert outputs["other"].finish_reason == "length"


def test_generate_arguments_fill_what_prompts_lack(native: Engine, tmp_path: Path) -> None:
    """Arguments of generate are those of prompts that have none."""
    own = greedy(capture=Capture([2], "last"))
    outputs = native.generate(PROMPTS[:2], [greedy(), own], use_tqdm=False, capture=3, steer={1: VECTOR})
    expected = answer(native, PROMPTS[:1], greedy(capture=Capture(3), steer=Steer({1: torch.from_numpy(VECTOR)})))
    same_bits(outputs[0], expected[0])
    assert [states.shape for states in states_of(outputs[1])] == [(1, HIDDEN)]
    with pytest.raises(InvalidValueError, match="capture must be another path for each prompt"):
        native.generate(PROMPTS, greedy(), use_tqdm=False, capture=Capture(3, path=tmp_path / "states"))


def test_each_of_several_answers_has_its_states(native: Engine) -> None:
    params = SamplingParams(n=2, temperature=2.0, seed=1, max_tokens=5, ignore_eos=True, capture=[4])
    (output,) = answer(native, PROMPTS[1:2], params)
    one, other = (answer.hidden_states for answer in output.outputs)
    assert one is not None
    assert other is not None
    assert one[4].shape == other[4].shape == (9, HIDDEN)
    assert np.array_equal(one[4][:5], other[4][:5])
    assert not np.array_equal(one[4][5:], other[4][5:])


def test_an_aborted_id_is_free_while_its_run_goes_on(native: Engine) -> None:
    """States of steps that the device had begun reach no later request of the same id."""
    both = SamplingParams(n=2, temperature=2.0, seed=1, max_tokens=60, ignore_eos=True, capture=[4])
    native.add_request("same", PROMPTS[1], both)
    native.add_request("other", PROMPTS[0], replace(greedy(), max_tokens=60))
    while not native.is_ahead():
        native.step()
    run = native.scheduler._under_way._control
    assert run is not None
    while run.num_begun < 5:
        time.sleep(0)
    native.abort_request("same")
    last = {output.request_id: output for output in native.step()}
    native.add_request("same", PROMPTS[1], greedy(capture=[4]))
    last |= finish(native)
    assert len(last["other"].outputs[0].token_ids) == 60
    same_bits(last["same"], answer(native, PROMPTS[1:2], greedy(capture=[4]))[0])


def test_answer_that_ends_early_has_its_tokens_states_alone(native: Engine) -> None:
    """An answer that ends early has the states of its tokens alone."""
    (whole,) = answer(native, PROMPTS[1:2], greedy(capture=[1]))
    stop = whole.outputs[0].token_ids[3]
    (output,) = answer(native, PROMPTS[1:2], greedy(capture=[1], stop_token_ids=[stop]))
    count = len(tokens_of(output)) - 1
    assert count < len(tokens_of(whole)) - 1
    assert np.array_equal(states_of(output)[0], states_of(whole)[0][:count])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"capture": [5]}, "capture must be of layers from 0 to 4; got 'layer 5'"),
        ({"steer": {4: VECTOR}}, "steer must be of layers from 0 to 3; got 'layer 4'"),
        ({"steer": {1: VECTOR[1:]}}, "steer must be of the model's 48 channels; got '47 channels at layer 1'"),
        ({"steer": {1: (DOWN[:, 1:], UP[1:])}}, "steer must be of the model's 48 channels; got '47, 47 channels"),
        ({"steer": {1: VECTOR}, "depth": EarlyExit(0.5)}, "steer must be None with a depth policy whose tokens leave"),
        ({"capture": Capture(1, path="/nowhere/states")}, "capture must be of a path that can be written; got '/no"),
    ],
)
def test_what_the_model_has_not_is_refused(native: Engine, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        answer(native, PROMPTS[:1], greedy(**given))
    assert str(caught.value).startswith(words)


def test_too_many_bytes_are_refused_with_their_product(tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d3engine.request.hidden_states.MAX_BYTES", 16 * HIDDEN * 4)
    with engine_of(tiny) as engine:
        answer(engine, PROMPTS[1:2], greedy(capture=[1]))  # 5 + 12 - 1 tokens
        with pytest.raises(InvalidValueError, match=r"1 layers x 17 tokens x 48 x 4 bytes\); got '3,264 bytes'"):
            answer(engine, PROMPTS[1:2], SamplingParams(max_tokens=13, capture=[1]))
        answer(engine, PROMPTS[1:2], SamplingParams(max_tokens=13, capture=Capture([1], dtype="float16")))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Capture([1], "some"), "positions"),
        (lambda: Capture([1], slice(0, 4, 0)), "positions"),
        (lambda: Capture([1], slice(0, 4.0)), "positions"),
        (lambda: Capture([1], [1, 2]), "positions"),  # type: ignore[arg-type]
        (lambda: Capture([1], dtype="bfloat16"), "dtype"),
        (lambda: Capture([1], path=""), "path"),
        (lambda: Capture([-1]), "layers"),
        (lambda: Steer({1: [np.inf]}), "layers"),
        (lambda: Steer({1: [1.0]}, "first"), "positions"),
        (lambda: greedy(capture=Capture(1, path="x"), n=2), "n"),
        (lambda: SamplingParams(max_tokens=1, pooling="mean", capture=1), "capture"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(make: Callable[[], object], field: str) -> None:
    with assert_refused(field):
        make()


@pytest.mark.parametrize("which", [*POSITIONS, slice(None), slice(2, 3), slice(-3, -1), slice(7, 2)], ids=str)
def test_positions_are_counted_as_they_are_found(which: Any) -> None:
    positions = Positions.of(which, 6)
    everywhere = np.arange(20)
    for start in range(20):
        for stop in range(start, 20):
            inside = positions.among(everywhere[start:stop])
            assert positions.count_in(start, stop) == inside.sum()
    if isinstance(which, slice) and all(end is None or end >= 0 for end in (which.start, which.stop)):
        assert everywhere[positions.among(everywhere)].tolist() == everywhere[which].tolist()


@pytest.mark.parametrize(
    ("which", "first", "stop"), [("all", 0, 9), ("prompt", 0, 6), ("generated", 6, 9), ("last", 5, 6)]
)
def test_named_positions_are_parts_of_prompt_and_answer(which: str, first: int, stop: int) -> None:
    """Of a prompt of six tokens and an answer of three; "last" is the prompt's."""
    everywhere = np.arange(9)
    assert everywhere[Positions.of(which, 6).among(everywhere)].tolist() == list(range(first, stop))


def test_an_engine_on_a_thread_gives_them(tiny: TinyLlama, native_library: None) -> None:
    engine = AsyncEngine.from_engine(engine_of(tiny))
    output = list(engine.sync().generate(PROMPTS[1], greedy(capture=[1], steer={1: VECTOR})))[-1]
    asyncio.run(engine.close())
    assert [states.shape for states in states_of(output)] == [(5 + TOKENS - 1, HIDDEN)]


def test_an_engine_in_another_process_refuses_both(native: Engine) -> None:
    pytest.importorskip("msgspec", reason="an engine in another process needs the extra serve")
    from d3engine.async_engine.engine_process import ProcessFront
    from d3engine.async_engine.process_main import _ready

    front = ProcessFront(_ready(native), {"skip_tokenizer_init": True})
    for name, params in (("capture", greedy(capture=[1])), ("steer", greedy(steer={1: VECTOR}))):
        with assert_refused(name, "None, since the engine runs in another process"):
            front.prepare(PROMPTS[1], params)

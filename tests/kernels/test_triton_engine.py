"""The engine on Triton kernels, token for token what it is on the reference: eagerly, and decoding by itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import CONFIG, Request, assert_same
from fixture_types import MakeEngine, MakeLlama
from tiny_models import TINY, random_prompts, save_random, save_without_layer
from trained_students import LAYERS as NUM_LAYERS
from trained_students import SIZE, Trained
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)
from transformers_oracle import assert_same_tokens

import d3engine.kernels.triton as kernels
from d3engine import D3, Engine, FullDepth, SamplingParams, Speculative, UnifiedSkip, Width
from d3engine.depth import DepthPolicy
from d3engine.engine import resolve
from d3engine.kernels import reference
from d3engine.kernels.decode_rows import DecodeRows
from d3engine.kernels.triton import products

# Long and short prompts, so that steps mix pieces of prompts with rows of many ages.
POLICIES: list[DepthPolicy] = [UnifiedSkip(2, on_skip="copy"), FullDepth(), D3(0.7, 0.2), D3(0.7, 0.2)]
REQUESTS = [
    Request(
        tuple(range(20 + nth, 24 + 5 * nth)),
        SamplingParams(temperature=0, max_tokens=3 + nth, ignore_eos=True, depth=policy),
    )
    for nth, policy in enumerate(POLICIES)
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as for a device of two processors, and wide ones for a single row: the same paths, less waiting."""
    narrow = products._single_row_tile

    def wide(*arguments: Any) -> products.Tile:
        return replace(narrow(*arguments), outputs=64)

    monkeypatch.setattr(products, "MIN_PROGRAMS", 2)
    monkeypatch.setattr(products, "_single_row_tile", wide)


@pytest.fixture
def triton_engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """`triton_engine(graphs, **arguments)`: the tiny engine, on Triton's kernels."""

    def make(graphs: bool, **arguments: Any) -> Engine:
        monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs" if graphs else "eager")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        engine = make_engine(backend="triton", block_size=16, max_num_batched_tokens=16, device=device, **arguments)
        assert engine.executor.model.kernels is kernels
        return engine

    return make


def test_hidden_states_are_those_of_the_reference(triton_engine: MakeEngine, make_engine: MakeEngine) -> None:
    """Hidden states are captured and steered as on the reference."""
    capture, steer = range(int(CONFIG["num_hidden_layers"]) + 1), {1: [0.5] * int(CONFIG["hidden_size"])}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, capture=capture, steer=steer)
    prompts = [list(range(20, 26)), list(range(30, 33))]
    engine = triton_engine(True)
    found, wanted = (one.generate(prompts, params, use_tqdm=False) for one in (engine, make_engine(block_size=16)))
    assert engine.stats().graph_steps == 0  # such steps run eagerly
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].hidden_states is not None
        assert_same(one, other)


def test_width_decay_answers_as_the_oracle(
    tiny_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Steps before the first student decode in graphs, and rows of different students share the steps behind it."""
    monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs")
    tiny = tiny_llama(num_hidden_layers=NUM_LAYERS, hidden_size=SIZE, intermediate_size=48)
    trained, prompts = Trained(tiny, tmp_path / "model"), random_prompts([5, 3], seed=2)
    tables = [[3, 4, 5], [3, 5, 6]]
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 7, "ignore_eos": True}
    params = [SamplingParams(depth=Width(trained.ladder, steps=steps), **given) for steps in tables]
    kind: dict[str, Any] = {"backend": "triton", "dtype": "float32", "device": device.type, "max_model_len": 64}
    with Engine(trained.directory, depth=params[0].depth, skip_tokenizer_init=True, **kind) as engine:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        assert engine.stats().graph_steps == 2
    for prompt, steps, output in zip(prompts, tables, outputs, strict=True):
        levels = [None] * steps[0] + [0] * (steps[1] - steps[0]) + [1] * (steps[2] - steps[1]) + [2] * 7
        assert_same_tokens(output.outputs[0].token_ids, trained.on_ladder(prompt, levels.__getitem__, 7), tie=1e-3)


def test_drafts_in_graphs_answer_as_on_the_reference(
    tiny_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A draft model and the verification of its drafts, in a batch with lengths of their own."""
    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "eager" if eager else "graphs")
    tiny = tiny_llama(num_hidden_layers=3, hidden_size=SIZE, intermediate_size=48)
    policy = Speculative(save_without_layer(tiny, 1, tmp_path / "draft"), 3)
    prompts = random_prompts([5, 3, 9], seed=2)
    drawn = SamplingParams(temperature=0.7, seed=3, max_tokens=6, ignore_eos=True)
    params = [drawn, replace(drawn, temperature=0, max_tokens=8), replace(drawn, top_k=20)]
    kind: dict[str, Any] = {"dtype": "float32", "device": device.type, "max_model_len": 64, "max_num_seqs": 3}
    answers, counts = [], []
    for given in ({"backend": "triton"}, {"backend": "torch", "enforce_eager": True}):
        with Engine(tiny.directory, depth=policy, skip_tokenizer_init=True, **kind, **given) as engine:
            outputs = engine.generate(prompts, params, use_tqdm=False)
            answers.append([one.outputs[0].token_ids for one in outputs])
            stats = engine.stats()
            counts.append((stats.drafted_tokens, stats.accepted_tokens, stats.verifications))
            assert (stats.graph_steps > 3) == (given["backend"] == "triton")
    assert answers[0] == answers[1]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("graphs", "chosen"), [(False, REQUESTS), (True, REQUESTS[2:])], ids=["eager", "graphs"])
def test_rows_of_many_ages_answer_as_on_the_reference(
    graphs: bool, chosen: list[Request], cache: str, triton_engine: MakeEngine, make_engine: MakeEngine
) -> None:
    """With prompts in pieces; and, in graphs, runs of several rows, and of one: the last request ends after all."""
    reference_engine = make_engine(block_size=16, kv_cache_dtype=cache)
    engine = triton_engine(graphs, kv_cache_dtype=cache)
    prompts = [list(request.prompt) for request in chosen]
    found = engine.generate(prompts, [request.params for request in chosen], use_tqdm=False)
    for output, request in zip(found, chosen, strict=True):
        wanted = reference_engine.generate(list(request.prompt), request.params, use_tqdm=False)[0]
        assert_same(output, wanted)
    assert (engine.stats().graph_steps >= 4) == graphs


WINDOWED = {"use_sliding_window": True, "sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]}


CAPPED = {"sliding_window": 2, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
TWO_ROPES = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]}
LAYERS: list[tuple[type[PreTrainedConfig], dict[str, Any]]] = [
    (Qwen3Config, {}),
    (Qwen3Config, WINDOWED),
    (SmolLM3Config, {}),
    (Olmo2Config, {}),
    (Gemma2Config, CAPPED),
    (Gemma3TextConfig, TWO_ROPES),
]


@pytest.mark.parametrize(("kind", "changes"), LAYERS)
def test_optional_parts_of_a_layer_answer_as_on_the_reference(
    kind: type[PreTrainedConfig], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "vocab_size": 40, "pad_token_id": None, "no_rope_layers": [0, 1]}
    sizes = {name: value for name, value in TINY.items() if kind is not Olmo2Config or name != "head_dim"}
    given = kind(**(sizes | small | changes))
    directory, _ = save_random(tmp_path, AutoModelForCausalLM.from_config(given, dtype=torch.float32))
    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "eager" if eager else "graphs")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    params, answers = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), []
    for backend, where in (("torch", "cpu"), ("triton", device)):
        options: dict[str, Any] = {"block_size": 16, "device": where, "backend": backend, "skip_tokenizer_init": True}
        with Engine(directory, depth=D3(0.8, 0.3), **options) as engine:
            answers.append(engine.generate(random_prompts([3], vocab_size=40), params, use_tqdm=False))
            assert engine.stats().graph_steps > 0
    for found, wanted in zip(*answers, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("live", [0, 1, 5, 7])
def test_both_ends_of_a_step_do_what_the_reference_does(device: torch.device, live: int) -> None:
    layers, count, block_size, head_dim = 5, 7, 4, 12
    generator = torch.Generator().manual_seed(live)

    def random(like: torch.Tensor, high: int) -> torch.Tensor:
        return torch.randint(0, high, like.shape, generator=generator, dtype=torch.int64)

    found = DecodeRows.empty(count + 2, layers, 9, head_dim, 3, device)
    table = torch.randn(36, head_dim // 2, dtype=torch.complex64, generator=generator)
    for tensor, high in (
        (found.tokens, 99),
        (found.positions, 30),
        (found.steps, 9),
        (found.cutoffs, 12),
        (found.block_tables, 2**31 - 1),
        (found.entries, 5),
        (found.chosen, 5),
    ):
        tensor.copy_(random(tensor, high))
    found.num_rows.fill_(live)
    wanted = DecodeRows.empty(count + 2, layers, 9, head_dim, 3, "cpu")
    for name, tensor in vars(found).items():
        vars(wanted)[name].copy_(tensor)
    for _ in range(2):
        kernels.begin_step(found.first(count), table.to(device), block_size)
        reference.begin_step(wanted.first(count), table, block_size)
        tokens, scores = random(found.tokens, 99)[:count], torch.randn(count, generator=generator)
        kernels.end_step(found.first(count), tokens.to(device), scores.to(device))
        reference.end_step(wanted.first(count), tokens, scores)
        for name, tensor in vars(found).items():
            assert torch.equal(tensor.cpu(), vars(wanted)[name]), name
    assert wanted.taken.item() == 2

"""Windows crossed by bridges: the tokens are those of a slow oracle on transformers' own layers with the maps between
them, alone and in a batch, and whoever has none is untouched."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_files import some_maps, write_maps
from depth_oracle import (
    ActiveLayers,
    DepthAnswer,
    Maps,
    d3,
    greedy_at_depth,
    layer_table,
    nested,
    skip_decode,
    tail_skip,
    unified_skip,
)
from families import make_family
from fixture_types import MakeEngine, MakeLlama
from kinds_of_engine import maker
from loops import HANG_SECONDS, assert_second_ends_first, looping
from stepping import generated, greedy
from tiny_models import TinyLlama
from transformers_oracle import assert_answers, assert_same_tokens, greedy_after

from d3engine import D3, Engine, FullDepth, LayerTable, RequestOutput, SamplingParams, SkipDecode, TailSkip, UnifiedSkip
from d3engine.async_engine import wire
from d3engine.depth import DepthPolicy, Lossless, Nested, SelfSpeculative
from d3engine.engine.executors import NOWHERE, bridge_store
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.executor import bridging
from d3engine.model.bridges import BRIDGES_FILE, Bridge, Bridges, write_bridges
from d3engine.model.expected_tensors import fingerprint

LAYERS, SIZE, TOKENS = 6, 32, 14
AUTO = "auto"
EVERY = list(range(LAYERS))
WINDOWS = [[4, 5], [1, 3], [3, 4]]
WAKING = [EVERY, [0, 5], [0, 1, 5], EVERY, [0, 2, 4], [0, 1, 2, 3]]
BRIDGED: list[tuple[DepthPolicy, ActiveLayers]] = [
    (D3(0.95, 0.5, bridges=AUTO), d3(LAYERS, 0.95, 0.5)),
    (D3(0.9, 0.1, tail=1, bridges=AUTO), d3(LAYERS, 0.9, 0.1, tail=1)),  # its window begins at the first layer
    (D3(0.9, 0.5, on_skip="copy", bridges=AUTO), d3(LAYERS, 0.9, 0.5)),
    (Nested(0.95, WINDOWS, bridges=AUTO), nested(LAYERS, 0.95, WINDOWS)),  # neighbours become one window
    (SkipDecode(20, 2, bridges=AUTO), skip_decode(LAYERS, 20, 2)),
    (TailSkip(4.5, 16, bridges=AUTO), tail_skip(LAYERS, 16, 4.5)),
    (UnifiedSkip(1.5, bridges=AUTO), unified_skip(LAYERS, 1.5)),
    (LayerTable(WAKING, bridges=AUTO), layer_table(WAKING)),  # several windows at once, and they come and go
]
BARE: list[tuple[DepthPolicy, ActiveLayers]] = [
    (FullDepth(), lambda _: set(EVERY)),
    (D3(0.95, 0.5), d3(LAYERS, 0.95, 0.5)),
]


@pytest.fixture(scope="module")
def maps() -> Maps:
    return some_maps(LAYERS, SIZE)


@pytest.fixture(scope="module")
def model(tiny_llama: MakeLlama, maps: Maps, tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """A model with bridges beside its weights."""
    made = tiny_llama(num_hidden_layers=LAYERS, hidden_size=SIZE, intermediate_size=48)
    directory = tmp_path_factory.mktemp("bridged") / "model"
    shutil.copytree(made.directory, directory)
    write_maps(maps, directory, directory / BRIDGES_FILE)
    return TinyLlama(directory, made.model)


@pytest.fixture(scope="module")
def make_engine(model: TinyLlama) -> MakeEngine:
    return maker(model.directory, max_model_len=64)


def asked(policy: DepthPolicy, max_tokens: int = TOKENS, **changes: Any) -> SamplingParams:
    return greedy(max_tokens, depth=policy, **changes)


PROMPTS = [[37 * (nth + place) % 300 for place in range(2 + 2 * nth)] for nth in range(len(BRIDGED) + len(BARE))]


def oracle(model: Any, prompt: list[int], policy: tuple[DepthPolicy, ActiveLayers], maps: Maps | None) -> DepthAnswer:
    return greedy_at_depth(model, prompt, TOKENS, policy[1], getattr(policy[0], "on_skip", "none"), maps)


@pytest.fixture(scope="module")
def wanted(model: TinyLlama, maps: Maps) -> list[DepthAnswer]:
    """What the oracle answers to `PROMPTS` under each policy."""
    bridged = [oracle(model.model, *pair, maps) for pair in zip(PROMPTS, BRIDGED, strict=False)]
    bare = [oracle(model.model, *pair, None) for pair in zip(PROMPTS, BRIDGED + BARE, strict=True)]
    for one, other in zip(bridged, bare, strict=False):
        assert one.token_ids != other.token_ids, "a bridge that changes nothing"
    return bridged + bare[len(BRIDGED) :]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "native if it is there"])
def test_a_batch_of_many_policies_equals_the_oracle(
    make_engine: MakeEngine, wanted: list[DepthAnswer], enforce_eager: bool
) -> None:
    with make_engine(enforce_eager=enforce_eager) as engine:
        params = [asked(policy) for policy, _ in (*BRIDGED, *BARE)]
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    assert_answers(outputs, wanted, tie=1e-3)


@pytest.mark.parametrize("model_type", ["olmo2", "gemma2"])
def test_layers_with_norms_behind_are_crossed(model_type: str, maps: Maps, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": SIZE, "intermediate_size": 48}
    directory, model = make_family(tmp_path, (model_type, {"query_pre_attn_scalar": 8}), (), **sizes)
    write_maps(maps, directory, directory / BRIDGES_FILE)
    policies = [BRIDGED[nth] for nth in (0, 1, -1)]
    prompts, params = PROMPTS[: len(policies)], [asked(policy) for policy, _ in policies]
    answers = [oracle(model, *pair, maps) for pair in zip(prompts, policies, strict=True)]
    for enforce_eager in (True, False):
        outputs = generated(directory, prompts, params, device="cpu", enforce_eager=enforce_eager)
        assert_answers(outputs, answers, tie=1e-3)


def test_a_bridge_writes_no_entries_so_as_much_memory_is_freed(make_engine: MakeEngine) -> None:
    saved = []
    for bridges in (None, AUTO):
        with make_engine() as engine:
            engine.generate([1, 2, 3], asked(D3(0.9, 0.5, bridges=bridges)), use_tqdm=False)
            saved.append(engine.stats().kv_bytes_saved_at_end)
    assert saved[0] == saved[1] > 0


def test_requests_without_bridges_keep_their_bits(make_engine: MakeEngine) -> None:
    """Requests without bridges answer to the bit as if there were none."""

    def answers(others: list[SamplingParams]) -> list[RequestOutput]:
        bare = [asked(policy, logprobs=3) for policy, _ in BARE]
        with make_engine(enforce_eager=True) as engine:
            outputs = engine.generate([[5, 6, 7]] * (2 + len(others)), bare + others, use_tqdm=False)
        return outputs[:2]

    neighbours = [asked(D3(0.95, 0.5)), asked(D3(0.9, 0.5))]
    bridged = [replace(params, depth=replace(params.depth, bridges=AUTO)) for params in neighbours]  # type: ignore[type-var]
    for alone, beside in zip(answers(neighbours), answers(bridged), strict=True):
        assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
        assert alone.outputs[0].logprobs == beside.outputs[0].logprobs


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "native if it is there"])
@pytest.mark.parametrize("lossless", [True, False])
def test_bridges_change_what_is_drafted_and_no_token(
    make_engine: MakeEngine, model: TinyLlama, lossless: bool, enforce_eager: bool
) -> None:
    prompts = [[9, 8, 7] * 5, list(range(50, 60))]
    accepted = []
    for bridges in (None, AUTO):
        draft = D3(0.9, 0.5, bridges=bridges)
        policy = Lossless(draft, 3) if lossless else SelfSpeculative(draft, 3)
        with make_engine(enforce_eager=enforce_eager) as engine:
            outputs = engine.generate(prompts, asked(policy), use_tqdm=False)
            accepted.append((engine.stats().drafted_tokens, engine.stats().accepted_tokens))
        for prompt, output in zip(prompts, outputs, strict=True):
            found = output.outputs[0].token_ids
            assert_same_tokens(found, greedy_after(model.model, prompt, found), tie=1e-3)
    assert accepted[0] != accepted[1]


def test_a_perfect_bridge_lets_every_draft_be_accepted(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """Of layers that add a constant, the bridge is that constant: then drafts are full depth's tokens."""
    made = tiny_llama(num_hidden_layers=4, hidden_size=SIZE, intermediate_size=48, mlp_bias=True, seed=4)
    directory = tmp_path / "model"
    shutil.copytree(made.directory, directory)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    offset = torch.zeros(SIZE)
    for layer in (2, 3):
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            tensors[f"model.layers.{layer}.{name}"].zero_()
        offset += tensors[f"model.layers.{layer}.mlp.down_proj.bias"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    bridge = Bridge(2, 4, torch.zeros(SIZE, SIZE), offset)
    path = tmp_path / "own.safetensors"
    write_bridges(Bridges(fingerprint(directory), 4, SIZE, {(2, 4): bridge}), path)
    draft = LayerTable([[0, 1, 2, 3], [0, 1]], on_skip="none", bridges=str(path))
    policy = SelfSpeculative(draft, 4)
    with Engine(directory, depth=policy, skip_tokenizer_init=True, device="cpu", max_model_len=64) as engine:
        engine.generate([1, 2, 3], asked(policy, max_tokens=21), use_tqdm=False)
        stats = engine.stats()
    assert stats.drafted_tokens == stats.accepted_tokens > 0


def test_checks_for_another_process_hold_no_map(make_engine: MakeEngine, model: TinyLlama) -> None:
    """A check of requests for an engine in another process holds no map."""
    pytest.importorskip("msgspec", reason="an engine in a process of its own needs the extra serve")
    from d3engine.async_engine.engine_process import ProcessFront
    from d3engine.async_engine.process_main import _ready

    with make_engine(depth=D3(0.9, 0.5, bridges=AUTO)) as engine:
        front = ProcessFront(_ready(engine), {"skip_tokenizer_init": True})
        params = asked(D3(0.8, 0.5, bridges=AUTO))
        assert front.prepare([1, 2], params).schedule == engine.prepare([1, 2], params).schedule
        for checks, holds in ((front, False), (engine, True)):
            weights = [bridge.weight for bridge in checks.bridges.bridges(AUTO).values()]
            assert {isinstance(weight, torch.Tensor) and not weight.is_meta for weight in weights} == {holds}
        with pytest.raises(InvalidValueError, match='bridges must be "auto"'):
            front.prepare([1, 2], asked(D3(0.8, 0.5, bridges="/elsewhere")))
        quantized = replace(engine.settings, config=replace(engine.config, quantization="int8"))
        bridge_store(quantized, device=NOWHERE).check(engine.depth.schedule(LAYERS))


def test_a_process_steps_and_takes_while_it_reads_bridges(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop and the inbox of an engine's process wait for no bridges that a request is the first to name."""
    begun, goes_on, read = threading.Event(), threading.Event(), bridging.read_bridges

    def wait_and_read(*given: Any) -> Any:
        begun.set()
        assert goes_on.wait(HANG_SECONDS)
        return read(*given)

    monkeypatch.setattr(bridging, "read_bridges", wait_and_read)
    with make_engine() as engine, looping(engine) as (inbox, replies):
        try:
            for key, policy in ((1, D3(0.9, 0.5, bridges=AUTO)), (2, D3(0.9, 0.5))):
                inbox.take(wire.Add(key, None, None, PROMPTS[0], wire.plain_params(asked(policy)), 0))
                assert begun.wait(HANG_SECONDS)
            assert_second_ends_first(replies, goes_on)
        finally:
            goes_on.set()


# -- what is refused -------------------------------------------------------------------------------------------


def test_a_request_names_no_file_but_the_engines_own(
    make_engine: MakeEngine, model: TinyLlama, maps: Maps, tmp_path: Path
) -> None:
    own, other = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    for path in (own, other):
        write_maps(maps, model.directory, path)
    with make_engine(depth=D3(0.9, 0.5, bridges=str(own))) as engine:
        for bridges in (str(own), AUTO):
            engine.generate([1, 2], asked(D3(0.8, 0.5, bridges=bridges), max_tokens=2), use_tqdm=False)
        for policy in (D3(0.8, 0.5, bridges=str(other)), Lossless(D3(0.8, 0.5, bridges=str(other)))):
            with pytest.raises(InvalidValueError, match=r'bridges must be "auto", or what the engine.s own') as e:
                engine.generate([1, 2], asked(policy), use_tqdm=False)
            assert str(own) not in str(e.value)


def test_bridges_of_other_weights_are_refused(tiny_llama: MakeLlama, model: TinyLlama, tmp_path: Path) -> None:
    other = tiny_llama(num_hidden_layers=LAYERS, hidden_size=SIZE, intermediate_size=48, seed=1)
    policy = D3(0.9, 0.5, bridges=str(model.directory / BRIDGES_FILE))
    with pytest.raises(InvalidValueError, match="bridges must be fitted to these weights, not to others"):
        Engine(other.directory, depth=policy, skip_tokenizer_init=True, device="cpu")


@pytest.mark.parametrize(("content", "complaint"), [(None, "is missing"), (b"no tensors", "is no file of bridges")])
def test_a_file_that_cannot_be_read_is_refused(
    make_engine: MakeEngine, tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "b.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidValueError, match=f"what d3engine bridge fit has written .*{complaint}"):
        make_engine(depth=D3(0.9, 0.5, bridges=str(path)))


def test_file_lacking_a_window_is_refused_with_the_window(
    make_engine: MakeEngine, model: TinyLlama, maps: Maps, tmp_path: Path
) -> None:
    """A file that lacks a window of the policy is refused with the window."""
    path = tmp_path / "b.safetensors"
    write_maps({window: maps[window] for window in ((3, 4), (3, 6))}, model.directory, path)
    with pytest.raises(InvalidValueError, match="each window that the policy leaves out; 3:5 is not in it"):
        make_engine(depth=D3(0.9, 0.5, bridges=str(path)))
    make_engine(depth=D3(0.9, 0.5, tail=2, bridges=str(path))).close()


def test_a_policy_file_beside_the_weights_names_no_other_file(model: TinyLlama, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model.directory, directory)
    for bridges, fits in ((AUTO, True), ("/etc/hostname", False)):
        (directory / "d3.json").write_text(
            f'{{"depth": {{"policy": "d3", "alpha": 0.9, "start": 0.5, "bridges": "{bridges}"}}}}'
        )
        if fits:
            with Engine(directory, skip_tokenizer_init=True, device="cpu") as engine:
                assert engine.depth == D3(0.9, 0.5, bridges=AUTO)
        else:
            with pytest.raises(ModelFormatError, match=r'bridges must be "auto" or absent there'):
                Engine(directory, skip_tokenizer_init=True, device="cpu")

"""PyTorch computes in an engine with as many threads as the engine may have, and elsewhere with its own number."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_files import some_maps, write_maps
from fixture_types import MakeLlama
from torch.overrides import TorchFunctionMode

from d3engine import D3, AsyncEngine, EarlyExit, Engine, LayerTable, Lossless, SamplingParams, Speculative
from d3engine.engine import host as pytorch_threads
from d3engine.executor.eager import EagerExecutor

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
LAYERS = [[0, 1, 2], [0, 2], [0, 2]]
PARTS: dict[str, dict[str, Any]] = {
    "eager": {"depth": D3(0.8, 0.4), "enforce_eager": True},
    "copies": {"depth": LayerTable(LAYERS, on_skip="copy")},
    "projections": {"depth": LayerTable(LAYERS, on_skip="project")},
    "early exit": {"depth": EarlyExit(threshold=0.02, min_layer=1)},
    "drafts of the model itself": {"depth": Lossless(D3(0.8, 0.4), 3)},
    "a draft model": {"depth": "speculative"},
    "bridges": {"depth": "bridges"},
}


LOOKS = ("device", "view", "flatten", "__getitem__", "numpy")
"""What computes nothing, on no thread: a fingerprint's rows are looked at before the threads are known."""


class Watch(TorchFunctionMode):
    """Notes with how many threads each operation of PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") not in LOOKS:
            self.seen.add(torch.get_num_threads())
        return function(*args, **(kwargs or {}))


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own number is 4, and a layer of any size is worth as many."""
    monkeypatch.setattr(pytorch_threads, "WEIGHTS_PER_PYTORCH_THREAD", 1)
    torch.set_num_threads(4)


def depth_of(name: Any, directory: Path, folder: Path) -> Any:
    if name == "speculative":
        return Speculative(str(directory), 3)
    if name == "bridges":
        write_maps(some_maps(3, 48), directory, folder / "maps.safetensors")
        return D3(0.5, 0.4, bridges=str(folder / "maps.safetensors"))
    return name


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_an_engine_computes_with_its_threads(part: str, tiny_llama: MakeLlama, tmp_path: Path) -> None:
    directory = tiny_llama(num_hidden_layers=3).directory
    options = PARTS[part] | {"depth": depth_of(PARTS[part]["depth"], directory, tmp_path)}
    with Watch() as loading:
        engine = Engine(directory, num_threads=2, **options, **OPTIONS)
    with engine, Watch() as working:
        (output,) = engine.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        list(engine.stream([4, 5], PARAMS))
        engine.add_request("a", [6], PARAMS)
        while engine.has_unfinished_requests():
            engine.step()
    assert len(output.outputs[0].token_ids) == 6
    assert loading.seen == working.seen == {2}
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_stream_reader_has_pytorchs_threads_between_outputs(tiny_llama: MakeLlama) -> None:
    """The reader of a stream has PyTorch's own threads between two outputs."""
    with Engine(tiny_llama().directory, num_threads=2, enforce_eager=True, **OPTIONS) as engine:
        assert {torch.get_num_threads() for _ in engine.stream([1, 2], PARAMS)} == {4}
        with pytest.raises(ValueError, match="prompt"):
            engine.generate([[]], PARAMS, use_tqdm=False)
        assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_an_engine_on_a_thread_of_its_own_obeys_too(tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    run = EagerExecutor.run

    def watched(executor: EagerExecutor, plan: Any) -> Any:
        seen.add(torch.get_num_threads())
        return run(executor, plan)

    monkeypatch.setattr(EagerExecutor, "run", watched)

    async def ask() -> None:
        directory = tiny_llama().directory
        async with AsyncEngine(directory, transport="thread", num_threads=2, enforce_eager=True, **OPTIONS) as engine:
            async for _ in engine.generate([1, 2], PARAMS):
                pass

    asyncio.run(ask())
    assert seen == {2}


@pytest.mark.usefixtures("four_threads")
def test_threads_of_layers_and_of_pytorch_are_a_limit(tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of small layers, and fewer of PyTorch's own, are not exceeded."""

    def threads(given: int | None) -> set[int]:
        with (
            Engine(tiny_llama().directory, num_threads=given, enforce_eager=True, **OPTIONS) as engine,
            Watch() as found,
        ):
            engine.generate([[1, 2]], PARAMS, use_tqdm=False)
        return found.seen

    assert max(threads(9)) == 4
    monkeypatch.undo()  # a layer of this model has fewer weights than a thread is worth
    assert threads(9) == threads(None) == {1}

"""What all tests share: tiny models made once for all tests, prompts, and optional data from beside the checkout.
Fixtures return functions where a test needs arguments; the functions themselves live in `tests/support`, which
pytest puts on the import path. What takes seconds to import is imported in the fixtures: the process that only hands
out the tests to others needs none of it, and Triton's interpreter must be chosen before."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from batches import Request
    from tiny_models import TinyLlama

    from d3engine import Engine
    from d3engine.request.outputs import RequestOutput


def pytest_collectstart() -> None:
    """Before a test file is imported: where there is no GPU, Triton is to interpret its kernels in this process."""
    # Hypothesis, whose settings a test takes when it is imported, is to judge no example by its time, and to try 60 of
    # them where a test says nothing: others in each run. With NO_SHRINKING it looks for no simpler failing example.
    gc.disable()  # until all is collected: what is imported stays, and would be searched for garbage all the time
    # Whatever a test starts: its own threads would spin while the other worker computes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from hypothesis import HealthCheck, Phase, settings

    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        assert "triton" not in sys.modules, "a conftest.py has imported Triton before it was told to interpret"
        os.environ["TRITON_INTERPRET"] = "1"
    phases = [phase for phase in Phase if phase.name not in ("shrink", "explain") or "NO_SHRINKING" not in os.environ]
    suppressed = [HealthCheck.too_slow]
    settings.register_profile(
        "no clock", max_examples=60, deadline=None, suppress_health_check=suppressed, phases=phases
    )
    settings.load_profile("no clock")


def pytest_collection_finish() -> None:
    """From here on garbage is looked for again, but not among what is imported, which took half a second a time."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """What is imported may be garbage again, or extension modules would complain at the end of what they still hold."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: not item.path.match("test_gpu_*.py") and not item.path.match("kernels/*.py"))


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Triton's interpreter, if kernels run in it here, without most of its work."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        from interpreted_dot import multiply_row_by_row
        from interpreted_fp8 import convert_as_a_gpu_does
        from quick_interpreter import make_quick

        make_quick()
        convert_as_a_gpu_does()
        multiply_row_by_row()


@pytest.fixture(scope="session")
def native_library() -> None:
    """For tests of what needs it; that it is missing is a fault where there is a compiler: see tests/kernels/native."""
    from d3engine.kernels.native.library import LibraryMissing, library

    try:
        library()
    except LibraryMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Whoever is started in the background may be told to ignore Ctrl-C, and so would all that tests start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def threads_before() -> Iterator[None]:
    """Tiny products are slower on many threads, and workers of pytest-xdist would fight for the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread(threads_before: None) -> Iterator[None]:
    """One thread again behind a command that ran in this process and took more."""
    import torch

    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def as_loud_as_before() -> Iterator[None]:
    """A command that runs in this process is told how much to say, and says so little to its end."""
    loggers = [logging.getLogger(name) for name in ("d3engine", "d3engine.engine.depth")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyLlama]:
    """`tiny_llama(**config)` -> (directory, transformers' model): a random Llama, made once for equal arguments."""
    # Keywords are LlamaConfig's, and `seed` and `max_shard_size`; see `tiny_models.TINY` for what they change. Treat
    # both as read-only: other tests use them too.
    from tiny_models import save_tiny_llama

    made: dict[str, TinyLlama] = {}

    def make(**config: Any) -> TinyLlama:
        key = json.dumps(config, sort_keys=True)
        if key not in made:
            made[key] = save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"), **config)
        return made[key]

    return make


@pytest.fixture(scope="session")
def target(tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    """A tiny Llama that `draft` drafts for."""
    from tiny_models import TARGET

    return tiny_llama(**TARGET)


@pytest.fixture(scope="session")
def draft(target: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of `target` without one layer, which often drafts right."""
    from tiny_models import save_without_layer

    return save_without_layer(target, 2, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[list[int]]]:
    """`make_prompts([3, 17], seed=0, vocab_size=300)`: a prompt of random token ids for each length."""
    from tiny_models import random_prompts

    return random_prompts


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of third-party data beside the repository; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("shared/data does not lie beside this repository")
    return folder


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """`make_engine(**arguments)`: an engine on a tiny random model, on the CPU and with small blocks; see `batches`."""
    import torch
    from batches import BLOCK, CONFIG, moved, wide

    from d3engine import Engine, FullDepth
    from d3engine.model.config import ModelConfig
    from d3engine.model.weights import random_weights

    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = ModelConfig.from_directory(directory)
    weights = wide(random_weights(config, dtype=torch.float32, device="cpu", seed=3))
    there = {"cpu": weights}

    def make(**changes: Any) -> Engine:
        device = changes.setdefault("device", "cpu")
        if device not in there:  # the very same numbers on another device
            there[device] = moved(weights, device)
        arguments: dict[str, Any] = {"max_num_seqs": 8, "block_size": BLOCK, "depth": FullDepth(), "dtype": "float32"}
        return Engine(directory, weights=there[device], skip_tokenizer_init=True, **(arguments | changes))

    return make


@pytest.fixture(scope="session")
def solo(make_engine: Callable[..., Engine]) -> Callable[[Request], RequestOutput]:
    """The answer of a request alone in an engine of its own, by the reference, its whole prompt in one step."""
    known: dict[str, RequestOutput] = {}

    def answer(request: Request) -> RequestOutput:
        if repr(request) not in known:
            engine = make_engine(max_num_seqs=4, enable_prefix_caching=False, enforce_eager=True)
            known[repr(request)] = engine.generate(list(request.prompt), request.params, use_tqdm=False)[0]
        return known[repr(request)]

    return answer


@pytest.fixture
def graphs(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """`make_engine` with graphs, rehearsed on a CPU: a step is called again. All engines of the test have them."""
    from d3engine.engine import resolve

    monkeypatch.setattr(resolve, "executor_for", lambda device, dtype, eager, backend: "eager" if eager else "graphs")
    return make_engine

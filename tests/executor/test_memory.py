"""How many KV blocks a GPU's memory gives, with the device's answers made up."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from batches import BLOCK, LAYERS, VOCABULARY, block_bytes
from fixture_types import MakeEngine
from stepping import see_steps
from torch.overrides import TorchFunctionMode

from d3engine import InvalidValueError
from d3engine.engine import resolve
from d3engine.engine.memory import num_blocks
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.graph_shapes import Repeats
from d3engine.executor.interface import Computed
from d3engine.executor.memory import largest_plan, workspace_bytes
from d3engine.scheduling.plan import Plan
from d3engine.scheduling.sampling_mode import SamplingMode
from d3engine.scheduling.scheduler import SchedulerConfig

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("rows", "length", "prompts"), [(40, 64, [40]), (128, 64, [63, 63, 2]), (150, 64, [63, 63, 24])]
)
def test_largest_step_fills_the_budget_and_wants_all_logits(rows: int, length: int, prompts: list[int]) -> None:
    """The largest step fills the token budget and wants every row's logits."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=rows, max_model_len=length)
    plan, num_blocks = largest_plan(config, LAYERS, BLOCK)
    assert sorted((plan.stops - plan.starts).tolist(), reverse=True) == prompts
    assert len(plan.prompt_rows) == len(prompts)
    assert sum(len(p.rows) for p in plan.prompt_rows) + len(plan.sampled) == plan.num_rows == sum(prompts)
    assert [span.layers for span in plan.spans] == [range(LAYERS)]
    used = {block for chunk in plan.slots for block in plan.tables[chunk].ravel().tolist()} - {0}
    assert max(used) <= num_blocks


@pytest.mark.parametrize("graphs", [False, True])
def test_workspace_is_what_a_device_lost(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """The workspace is what the device has less, the pool apart."""
    monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs" if graphs else "eager")
    monkeypatch.setattr(Repeats, "bytes_for", lambda recorder, count: 1000 * count)
    ran: list[torch.Size] = []
    built: list[Any] = []

    def build(num_blocks: int) -> Any:
        engine = make_engine(kv_cache_memory_bytes=num_blocks * block_bytes())
        see_steps(engine, after=lambda plan, computed: ran.append(computed.logits.shape))
        built.append((engine.executor, engine.executor.pool.nbytes))
        return engine.executor

    def free_bytes() -> int:
        return 10**9 - (built[0][1] + 12345 if built else 0)

    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=64)
    found = workspace_bytes(build, config, num_layers=LAYERS, block_size=BLOCK, free_bytes=free_bytes)
    executor = built[0][0]
    assert found == 12345 + (1000 * executor._num_expected if graphs else 0), "graphs that are to come count too"
    assert ran == [torch.Size([40, VOCABULARY])]
    assert isinstance(executor, GraphExecutor) == graphs
    if graphs:
        assert executor._num_expected > 1
        assert executor.stats.graphs_captured == 1


class FakeDevice(TorchFunctionMode):
    """Memory as torch's allocator has it: what a step takes stays taken until a capture begins and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, int] = {"steps": 0, "graphs": 0}
        self.sorted_rows = 0

    def free_bytes(self) -> int:
        return 10**9 - sum(self.taken.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.sort, torch.Tensor.sort):
            self.sorted_rows = args[0].shape[0]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("max_num_seqs", [3, 40])
def test_workspace_counts_the_largest_step(max_num_seqs: int) -> None:
    """The workspace counts the largest step although a capture gives back what steps took."""
    device, sorted_before = FakeDevice(), []

    class Executor:
        pool = torch.zeros(0)

        def run(self, plan: Plan) -> Any:
            device.taken["steps"] = 7000
            return Computed(torch.randn(plan.num_rows, VOCABULARY))

        def take_largest(self) -> None:
            device.taken |= {"steps": 0, "graphs": 500}
            sorted_before.append(device.sorted_rows)

    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=40, max_model_len=64)
    with device:
        found = workspace_bytes(
            lambda num_blocks: cast(Any, Executor()),
            config,
            num_layers=LAYERS,
            block_size=BLOCK,
            free_bytes=device.free_bytes,
        )
    assert found == 7500
    assert device.sorted_rows == max_num_seqs, "the sampler's own memory counts too"
    assert sorted_before == [0]


def test_largest_graph_must_know_all_tokens_before(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest graph is one that needs to know all tokens before."""
    monkeypatch.setattr(resolve, "executor_for", lambda *given: "graphs")
    executor = make_engine(max_num_seqs=8).executor
    assert isinstance(executor, GraphExecutor)
    kinds: list[tuple[int, SamplingMode]] = []
    monkeypatch.setattr(
        executor._choice,
        "choose",
        lambda hidden, rows, kind, adapters: kinds.append((len(hidden), kind)) or (rows.tokens, rows.scores[0]),
    )
    executor.take_largest()
    assert kinds == [(8, SamplingMode.PENALISE)]


def blocks(make_engine: MakeEngine, share: float, workspace: int, **changes: Any) -> int:
    draft = changes.pop("draft", None)
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_bytes": None} | changes
    settings = replace(make_engine().settings, device=GPU, gpu_memory_utilization=share, **sizes)
    return num_blocks(settings, lambda: workspace, draft)


def test_pool_takes_its_share_of_what_is_left(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool takes its share of what weights and workspace leave."""
    one, sequence = block_bytes(), LAYERS * 64 // BLOCK
    total = 1000 * one
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (800 * one, total))
    assert blocks(make_engine, 0.9, 0) == 700  # 100 of the 1000 stay free
    assert blocks(make_engine, 1.0, 0) == 768 == 8 * sequence  # no more than all sequences at full length
    assert blocks(make_engine, 0.9, 300 * one) == 400
    assert blocks(make_engine, 0.9, 300 * one + 1) == 399
    assert blocks(make_engine, 0.9, 300 * one, kv_cache_memory_bytes=7 * LAYERS * one) == 7 * LAYERS
    half = replace(make_engine().config, num_layers=LAYERS // 2)
    assert blocks(make_engine, 0.9, 100 * one, draft=half) == 400  # each takes half of another with it
    assert blocks(make_engine, 0.9, (700 - sequence) * one) == sequence
    with pytest.raises(InvalidValueError, match=rf"gpu_memory.* must be .*{sequence} blocks of {one} bytes.*; got 0.9"):
        blocks(make_engine, 0.9, (701 - sequence) * one)
    with pytest.raises(InvalidValueError, match="room for 0"):
        blocks(make_engine, 0.1, 0)

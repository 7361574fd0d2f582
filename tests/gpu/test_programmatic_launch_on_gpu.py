"""Kernels that begin while the one before ends give the tokens that they give one after another.

Without a GPU the trial runs in Triton's interpreter, and both engines on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import TinyLlama

pytest.importorskip("triton")

from d3engine import D3, Engine, SamplingParams
from d3engine.executor.graph_shapes import CudaGraphs, Repeats
from d3engine.kernels.target import target_of
from d3engine.kernels.triton import launches, programmatic

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HAS_IT = ON_GPU and target_of(DEVICE).has_programmatic_launch


@pytest.mark.skipif(ON_GPU and not HAS_IT, reason="this GPU has no programmatic launch")
def test_the_device_passes_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "PROGRAMMATIC", True)
    recorders: list[Repeats] = [Repeats()]
    if ON_GPU:
        recorders.append(CudaGraphs(DEVICE))
    else:
        monkeypatch.setattr(programmatic, "PROGRAMS", 4)
    for recorder in recorders:
        assert programmatic.fault(DEVICE, recorder.record) is None


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_are_those_of_kernels_one_after_another(
    enforce_eager: bool,
    tiny_llama: Callable[..., TinyLlama],
    make_prompts: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, _ = tiny_llama(num_hidden_layers=8, hidden_size=256, intermediate_size=640)
    prompts, params = make_prompts([1, 30, 70], seed=5), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = {}
    for way in ("auto", "off"):
        monkeypatch.setenv("D3ENGINE_PROGRAMMATIC_LAUNCH", way)
        options = {"depth": D3(0.97, 0.5), "dtype": "float32", "enforce_eager": enforce_eager, "max_num_seqs": 4}
        with Engine(directory, device=DEVICE, skip_tokenizer_init=True, **options) as engine:
            outputs = [*engine.generate(prompts, params, use_tqdm=False), *engine.generate(prompts[:1], params)]
            assert engine.stats().executor.endswith(", programmatic launch") == (HAS_IT and way == "auto")
        found[way] = [output.outputs[0].token_ids for output in outputs]
    assert found["auto"] == found["off"]

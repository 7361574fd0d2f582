"""What the demo model's trainer says of its model: answers in a batch are those of each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from d3engine.weights_tools.demo_trainer import DemoConfig, DemoModel


@pytest.fixture(scope="module")
def model() -> DemoModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
    model = DemoModel(DemoConfig(**sizes))
    with torch.no_grad():
        for parameter in (model.out, model.down, model.lm_head):  # a new one's layers do nothing
            parameter.normal_(0.0, 0.3)
    return model


@pytest.mark.parametrize("cutoff", [None, [100, 100, 3, 1]])
def test_a_prompt_answers_in_a_batch_as_alone(model: DemoModel, cutoff: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 60, (length,), generator=generator).tolist() for length in (9, 3, 5, 1, 7)]
    with torch.inference_mode():
        together = model.generate(prompts, max_tokens=12, eos=1, cutoff=cutoff)
        alone = [model.generate([prompt], max_tokens=12, eos=1, cutoff=cutoff)[0] for prompt in prompts]
    assert together == alone
    assert sum(map(len, alone)) >= 30

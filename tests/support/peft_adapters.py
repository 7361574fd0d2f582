"""LoRA adapters of random values, made and saved by PEFT, which also says what a model answers with one merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import save_tiny_llama
from transformers import AutoModelForCausalLM

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "some": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"],
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": r".*\.(k_proj|o_proj|up_proj)",
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.k_proj": 32},
    },
}


class Adapted(NamedTuple):
    """A tiny model and directories of its adapters."""

    model: Path
    paths: Mapping[str, Path]
    merged: Mapping[str | None, Any]

    def answer(self, adapter: str | None, prompt: list[int], count: int) -> list[int]:
        """The likeliest tokens of the model with the adapter merged into its weights."""
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = self.merged[adapter].generate(
                ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        answer: list[int] = found[0, len(prompt) :].tolist()
        return answer


def save_adapter(model: Path, directory: Path, seed: int, **config: Any) -> Any:
    """Save an adapter of random values; PEFT's model with it."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    made.save_pretrained(directory, save_embedding_layers=False)
    return made


def save_all(folder: Path) -> Adapted:
    """A tiny model with all of `ADAPTERS`."""
    save_tiny_llama(folder / "model")
    merged: dict[str | None, Any] = {None: AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)}
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        merged[name] = save_adapter(folder / "model", folder / name, seed, **config).merge_and_unload()
    return Adapted(folder / "model", {name: folder / name for name in ADAPTERS}, merged)

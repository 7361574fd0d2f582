"""A model with a student and narrower and narrower ones beside it, and transformers' models of all."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from depth_oracle import DepthAnswer, greedy_at_depth
from tiny_models import TinyLlama
from torch import nn
from transformers import LlamaForCausalLM

from d3engine.model.checkpoint_formats import to_adjacent_pairs
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.students import NEURONS, STUDENT_FILE, Student, write_student

LAYERS, SIZE, TOKENS, HEADS, KV_HEADS = 6, 32, 14, 4, 2
BLOCK_LAYER, SKIPPED = 2, (3, 4)
NARROW = {0: 40, 1: 24, 5: 33}
"""Layer -> neurons that stay of 48, one of them an odd number."""
LADDER = (44, 33, 20)
"""Neurons that stay in every layer of each student of the ladder; layer 2 of the second is a separate block."""
WIDTHS = (44 / 48, (5 * 33 + 48) / 288, 20 / 48)


class Trained:
    """A copy of a tiny model, with students beside it, and transformers' models of all."""

    def __init__(self, tiny: TinyLlama, directory: Path) -> None:
        shutil.copytree(tiny.directory, directory)
        self.directory, self.teacher = directory, tiny.model
        torch.manual_seed(3)
        self.student_model: LlamaForCausalLM = deepcopy(tiny.model)
        self.student = self._student(self.student_model, NARROW, SKIPPED)
        write_student(self.student, directory / STUDENT_FILE)
        self.levels: list[LlamaForCausalLM] = []
        self.ladder: list[str] = []
        for nth, width in enumerate(LADDER):
            model: LlamaForCausalLM = deepcopy(tiny.model)
            narrow = dict.fromkeys(set(range(LAYERS)) - ({BLOCK_LAYER} if nth == 1 else set()), width)
            path = directory / f"level-{nth}.safetensors"
            write_student(self._student(model, narrow, ()), path)
            self.levels.append(model)
            self.ladder.append(str(path))

    def _student(self, model: LlamaForCausalLM, narrow: dict[int, int], skipped: tuple[int, ...]) -> Student:
        """Narrow a model's MLPs, change the layer of a block that is not among them, and what a file has of both."""
        own = {} if BLOCK_LAYER in narrow else {BLOCK_LAYER: _changed(model.model.layers[BLOCK_LAYER])}
        own |= {number: _narrowed(model.model.layers[number].mlp, width) for number, width in narrow.items()}
        tensors = {n: {name: t.detach().clone() for name, t in named.items()} for n, named in own.items()}
        return Student(fingerprint(self.directory), LAYERS, SIZE, skipped, tensors, {"made": "by hand"})

    def answer(self, prompt: list[int]) -> DepthAnswer:
        running = set(range(LAYERS)) - set(SKIPPED)
        return greedy_at_depth(self.teacher, prompt, TOKENS, lambda _: running, student=lambda _: self.student_model)

    def on_ladder(self, prompt: list[int], level: Callable[[int], int | None], num_tokens: int = TOKENS) -> DepthAnswer:
        """The answer of which step i ran the student `level(i)` of the ladder; None: the model itself."""

        def model(step: int) -> LlamaForCausalLM:
            number = level(step)
            return self.teacher if number is None else self.levels[number]

        return greedy_at_depth(self.teacher, prompt, num_tokens, lambda _: set(range(LAYERS)), student=model)


def _changed(layer: Any) -> dict[str, torch.Tensor]:
    """Change all of a layer; its tensors as a student's file has them."""
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "attention_norm": layer.input_layernorm.weight,
        "qkv": torch.cat(
            (
                to_adjacent_pairs(attention.q_proj.weight.data, HEADS),
                to_adjacent_pairs(attention.k_proj.weight.data, KV_HEADS),
                attention.v_proj.weight.data,
            )
        ),
        "output": attention.o_proj.weight,
        "mlp_norm": layer.post_attention_layernorm.weight,
        "gate_up": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        "down": mlp.down_proj.weight,
    }


def _narrowed(mlp: Any, width: int) -> dict[str, torch.Tensor]:
    """Leave `width` neurons of an MLP, with another down matrix; its tensors as a student's file has them."""
    neurons = torch.randperm(48)[:width].sort().values
    down = torch.randn(SIZE, width) * 0.2
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).weight = nn.Parameter(getattr(mlp, name).weight.data[neurons].clone())
    mlp.down_proj.weight = nn.Parameter(down.clone())
    return {NEURONS: neurons, "down": down}

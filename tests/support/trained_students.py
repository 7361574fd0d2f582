"""A model with a student beside it, and transformers' models of both."""

import shutil
from copy import deepcopy
from pathlib import Path

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


class Trained:
    """A copy of a tiny model, with a student beside it, and transformers' models of both."""

    def __init__(self, tiny: TinyLlama, directory: Path) -> None:
        shutil.copytree(tiny.directory, directory)
        self.directory, self.teacher = directory, tiny.model
        torch.manual_seed(3)
        self.student_model: LlamaForCausalLM = deepcopy(tiny.model)
        own: dict[int, dict[str, torch.Tensor]] = {}
        layer = self.student_model.model.layers[BLOCK_LAYER]
        for parameter in layer.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        attention, mlp = layer.self_attn, layer.mlp
        own[BLOCK_LAYER] = {
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
        for number, width in NARROW.items():
            mlp = self.student_model.model.layers[number].mlp
            neurons = torch.randperm(48)[:width].sort().values
            down = torch.randn(SIZE, width) * 0.2
            for name in ("gate_proj", "up_proj"):
                getattr(mlp, name).weight = nn.Parameter(getattr(mlp, name).weight.data[neurons].clone())
            mlp.down_proj.weight = nn.Parameter(down.clone())
            own[number] = {NEURONS: neurons, "down": down}
        tensors = {n: {name: t.detach().clone() for name, t in named.items()} for n, named in own.items()}
        self.student = Student(fingerprint(directory), LAYERS, SIZE, SKIPPED, tensors, {"made": "by hand"})
        write_student(self.student, directory / STUDENT_FILE)

    def answer(self, prompt: list[int]) -> DepthAnswer:
        running = set(range(LAYERS)) - set(SKIPPED)
        return greedy_at_depth(self.teacher, prompt, TOKENS, lambda _: running, student=self.student_model)

"""8 bits go to the matrices whose rounding costs the outputs most for their bits."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_weights import OPTIONS, TEXT, run
from safetensors.torch import load_file
from torch import Tensor

from d3engine import Engine, SamplingParams
from d3engine.engine.model_directory import model_directory
from d3engine.kernels.blocks import StackedWeight
from d3engine.model.config import ModelConfig
from d3engine.model.source import open_checkpoint
from d3engine.model.weights import load_weights
from d3engine.weights_tools import group_quantizer, mixture, quantize
from d3engine.weights_tools.fitting_text import fitting_tokens
from d3engine.weights_tools.group_quantizer import Groups, LayerQuantizer, stored_bits
from d3engine.weights_tools.layerwise import LayerwiseModel, weighted
from d3engine.weights_tools.mixture import Unit, output_costs, units_of
from d3engine.weights_tools.quantize import quantize_to_groups

DEMO = model_directory("demo")
CONFIG = ModelConfig.from_directory(DEMO)


def types_of(directory: Path) -> dict[str, str]:
    """The types of layer matrices, such as U4_32, by their names."""
    with open_checkpoint(directory) as checkpoint:
        return {name: entry.type_name for name, entry in checkpoint.entries.items() if "_proj.weight" in name}


def bits_of(directory: Path) -> float:
    """Bits a weight that the tensors of layer matrices take in the file."""
    stored, floats = (load_file(one / "model.safetensors") for one in (directory, DEMO))
    bits = sum(8 * tensor.nbytes for name, tensor in stored.items() if "_proj.weight_" in name)
    return bits / sum(tensor.numel() for name, tensor in floats.items() if "_proj.weight" in name)


def logits_of(directory: Path, prompts: Tensor) -> Tensor:
    """Logits [S, L, V] of a model, all in floats."""
    with open_checkpoint(directory) as checkpoint:
        return floats_of(LayerwiseModel(checkpoint, ModelConfig.from_directory(directory), prompts.shape[1]), prompts)


def floats_of(model: LayerwiseModel, prompts: Tensor) -> Tensor:
    states = model.embedded(prompts)
    for index in range(model.config.num_layers):
        states = model.layer(index, states)
    return torch.cat([*model.logits(states)])


def divergence(wanted: Tensor, found: Tensor) -> float:
    """KL divergence in nats a token."""
    wanted, found = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def rule_of_q4_k_m() -> frozenset[str]:
    """Values and down projections in the first and last eighth of the layers and every third between, as llama.cpp."""
    eighth = CONFIG.num_layers // 8
    layers = [n for n in range(16) if n < eighth or n >= 7 * 16 // 8 or (n - eighth) % 3 == 2]
    modules = ("self_attn.v_proj", "mlp.down_proj")
    return frozenset(f"model.layers.{layer}.{module}.weight" for layer in layers for module in modules)


def test_mixture_beats_llama_cpps_rule_at_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bits of llama.cpp's rule the chosen matrices leave less divergence on the text, and no more bits."""
    prompts = fitting_tokens(DEMO, TEXT, show_progress=False)
    with monkeypatch.context() as patched:
        patched.setattr(quantize, "matrices_of_8_bits", lambda *_, **__: rule_of_q4_k_m())
        quantize_to_groups(DEMO, tmp_path / "rule", text=TEXT, bits=5.0, show_progress=False)
    bits = bits_of(tmp_path / "rule")
    quantize_to_groups(DEMO, tmp_path / "chosen", text=TEXT, bits=bits + 0.005, show_progress=False)
    wanted = logits_of(DEMO, prompts)
    rule, chosen = (divergence(wanted, logits_of(tmp_path / name, prompts)) for name in ("rule", "chosen"))
    assert bits_of(tmp_path / "chosen") <= bits + 0.005
    assert chosen < rule


@pytest.mark.parametrize("bits", [4.7, 8.12])
def test_mixture_meets_the_budget(tmp_path: Path, bits: float) -> None:
    """The file takes at most the bits asked for, and no unit of 4 bits fits into what is left."""
    quantize_to_groups(DEMO, tmp_path / "new", text=TEXT, bits=bits, show_progress=False)
    kinds, found = types_of(tmp_path / "new"), bits_of(tmp_path / "new")
    with open_checkpoint(DEMO) as floats:
        shapes = {name: floats.entries[name].shape for name in kinds}
    weights = sum(rows * columns for rows, columns in shapes.values())
    units = [unit for index in range(CONFIG.num_layers) for unit in units_of(CONFIG, index)]
    assert sorted(name for unit in units for name in unit) == sorted(kinds)
    of_unit = [{kinds[name][:3] for name in unit} for unit in units]
    assert all(len(kind) == 1 for kind in of_unit)
    smallest = [
        sum(stored_bits(shapes[name], 8) - stored_bits(shapes[name], 4, 32) for name in unit) / weights
        for unit, kind in zip(units, of_unit, strict=True)
        if kind == {"U4_"}
    ]
    assert found <= bits < found + min(smallest, default=1.0)


class PartlyRounded(LayerwiseModel):
    """A float model of which some matrices go a share of the way to quantized ones."""

    rounded: dict[str, Groups]
    share = 0.1

    def matrices(self, modules: Iterable[str]) -> dict[str, Tensor]:
        floats = super().matrices(modules)
        return {
            name: matrix.lerp(self.rounded[name].dequantize(), self.share) if name in self.rounded else matrix
            for name, matrix in floats.items()
        }


def test_output_costs_are_the_divergence_of_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs are near the divergence measured with one unit rounded, so little that it grows with the square."""
    monkeypatch.setattr(mixture, "_DRAWS", 16)
    prompts = fitting_tokens(DEMO, TEXT, show_progress=False)
    prompts = prompts[:, : prompts.shape[1] // 40 * 40].reshape(-1, 40)[:32]
    with open_checkpoint(DEMO) as checkpoint:
        costs = output_costs(checkpoint, CONFIG, prompts, 32, show_progress=False)
        model = PartlyRounded(checkpoint, CONFIG, prompts.shape[1])
        model.rounded = {}
        wanted, rounded = floats_of(model, prompts), {}
        for found in mixture._rounded_layers(model, prompts, 32):
            rounded |= found
        measured: dict[Unit, float] = {}
        for index in (0, 7, 15):
            for unit in units_of(CONFIG, index):
                model.rounded = {name: rounded[name] for name in unit}
                measured[unit] = 100 * divergence(wanted, floats_of(model, prompts))
    ratios = [costs[unit] / measured[unit] for unit in measured]
    assert all(0.5 < ratio < 2 for ratio in ratios), ratios


def test_layers_make_up_for_what_earlier_ones_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that are fitted to the products of float layers leave less divergence than those fitted to their own."""
    prompts = fitting_tokens(DEMO, TEXT, show_progress=False)
    found = []
    with open_checkpoint(DEMO) as checkpoint:
        model = PartlyRounded(checkpoint, CONFIG, prompts.shape[1])
        model.share, model.rounded = 1.0, {}
        wanted = floats_of(model, prompts)
        for makes_up in (True, False):
            if not makes_up:
                monkeypatch.setattr(group_quantizer, "_caught_up", lambda matrix, *_: matrix)
            quantizer = LayerQuantizer(checkpoint, CONFIG, prompts, 32)
            model.rounded = {}
            for index in range(CONFIG.num_layers):
                model.rounded |= quantizer.layer(index)
            found.append(divergence(wanted, floats_of(model, prompts)))
    assert found[0] < 0.9 * found[1]


def test_weighted_long_row_counts_as_five_medians() -> None:
    """A row hundreds of times as long as most weighs as one of five median lengths; others keep theirs."""
    rows = torch.eye(4).repeat(3, 1)
    rows[5] *= 300
    moments = rows.t() @ weighted(rows)
    assert moments.diagonal().tolist() == pytest.approx([3.0, 2.0 + 25.0, 3.0, 3.0])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in 5.5 bits."""
    directory = tmp_path_factory.mktemp("mixed") / "new"
    quantize_to_groups(DEMO, directory, text=TEXT, bits=5.5, show_progress=False)
    return directory


@pytest.mark.usefixtures("native_library")
def test_mixture_is_read_alike_by_both_backends(mixed: Path) -> None:
    """Both backends read matrices of 4 and of 8 bits, packed, in one product too, and say the same."""
    params = SamplingParams(temperature=0, max_tokens=24)
    found, kinds = [], []
    for backend in ("native", "torch"):
        with Engine(mixed, backend=backend, activations="float32", **OPTIONS) as engine:
            (output,) = engine.generate(["Tom has 5 pens. Tom finds 3."], params, use_tqdm=False)
            found.append(output.outputs[0].token_ids)
            kinds.append({type(layer.qkv) for layer in engine.executor.model.weights.layers})
    assert found[0] == found[1]
    assert StackedWeight in kinds[0]


def test_mixture_is_held_packed_for_a_gpu(mixed: Path) -> None:
    """What Triton's kernels get are the numbers of the file, codes and scales apart, with no matrix in floats."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "show_progress": False}
    split = load_weights(mixed, ModelConfig.from_directory(mixed), splits_blocks=True, **options)
    floats = load_weights(mixed, ModelConfig.from_directory(mixed), **options)
    for packed, plain in zip(split.layers, floats.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            matrix = getattr(packed, name)
            assert not isinstance(matrix, Tensor)
            torch.testing.assert_close(matrix.dequantize(torch.float32), getattr(plain, name), rtol=0, atol=0)


def test_like_q4_k_m_is_bits_with_a_note(tmp_path: Path) -> None:
    """The option of before works for one release, and says what it is called now."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ("--scheme", "int4", "--text", text, "--like", "q4_k_m")
    result = run("quantize", "demo", tmp_path / "new", *options)
    assert result.exit_code == 0, result.output
    assert "--like q4_k_m is now --bits 5.1" in " ".join(result.output.split())
    assert {kind[:2] for kind in types_of(tmp_path / "new").values()} == {"U4", "U8"}

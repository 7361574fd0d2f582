"""What is no LoRA adapter of a model is refused by name: of the field, the tensor, and what is allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_llama import change_json, put
from torch import Tensor

from benchmarks.lora import write_random_adapter
from d3engine.errors import ModelFormatError
from d3engine.model.adapters import WEIGHTS_FILE, Adapter, read_adapter
from d3engine.model.config import ModelConfig
from d3engine.model.source import ADAPTER_FILE

CONFIG = ModelConfig.from_directory("d3engine/demo_model")
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_random_adapter(tmp_path, CONFIG, 4)
    return tmp_path


def read(directory: Path, max_rank: int = 16, dtype: torch.dtype | None = None) -> Adapter:
    return read_adapter("a", directory, CONFIG, dtype=dtype, device=torch.device("cpu"), max_rank=max_rank)


def change_fields(directory: Path, **changes: Any) -> None:
    change_json(directory / ADAPTER_FILE, lambda config: config.update(changes))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_FILE)


def test_maps_hold_scale_and_order_of_channels(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS_FILE)
    found = read(adapter)
    assert (found.rank, len(found.maps), found.maps[-1]) == (4, CONFIG.num_layers * 7 + 1, None)
    query, *_, down = found.maps[:7]
    assert query is not None
    assert down is not None
    assert torch.equal(query.down, tensors[f"{FIRST}.lora_A.weight"])
    down_proj = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    assert torch.equal(down.up, 2 * tensors[down_proj].t())
    # Channels of a head that rope turns together lie apart in the file, and side by side in the engine.
    half, heads = CONFIG.head_dim // 2, tensors[f"{FIRST}.lora_B.weight"].view(CONFIG.num_heads, CONFIG.head_dim, 4)
    assert torch.equal(query.up.t().reshape(heads.shape)[:, 0], 2 * heads[:, 0])
    assert torch.equal(query.up.t().reshape(heads.shape)[:, 1], 2 * heads[:, half])


def test_16_bits_are_kept_and_half_the_bytes(adapter: Path) -> None:
    wide, narrow = read(adapter), read(adapter, dtype=torch.float16)
    assert narrow.nbytes * 2 == wide.nbytes
    change_tensors(adapter, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    assert {one.down.dtype for one in read(adapter).maps if one is not None} == {torch.bfloat16}


REFUSED_FIELDS = [
    ({"peft_type": "LOHA"}, 'peft_type must be "LORA"; got .LOHA.'),
    ({"peft_type": None}, "peft_type must be"),
    ({"use_dora": True}, "use_dora must be false: DoRA is not supported, LoRA is; got True"),
    ({"bias": "all"}, 'bias must be "none"'),
    ({"lora_bias": True}, "lora_bias must be false"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save must be null"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices must be null"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens must be null"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out must be false"),
    ({"use_qalora": True}, "use_qalora must be false"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights must be one that leaves"),
    ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow must be absent, as this field is not known"),
    ({"r": 17}, "r must be ranks from 1 to max_lora_rank=16; got 17"),
    ({"r": 0}, "r must be an integer from 1"),
    ({"r": True}, "r must be an integer"),
    ({"rank_pattern": {"q_proj": 99}}, "rank_pattern must be ranks from 1 to max_lora_rank=16"),
    ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ({"lora_alpha": "8"}, "lora_alpha must be numbers from -1e6 to 1e6"),
    ({"lora_alpha": 1e30}, "lora_alpha must be numbers"),
    ({"target_modules": None}, "target_modules must be a list of names"),
    ({"target_modules": [7]}, "target_modules must be a list of names"),
    ({"target_modules": ["q_proj"]}, "has tensors, and .* does not name it as a target"),
    ({"target_modules": "(unclosed"}, "target_modules must be a regular expression"),
    ({"target_modules": r"(a*)*b"}, "target_modules must be a simple expression"),
    ({"target_modules": "a?" * 2000}, "target_modules must be a simple expression"),
    ({"target_modules": ".*" * 9 + "x"}, "target_modules must be a simple expression"),
    ({"layers_pattern": "blocks"}, "layers_pattern must be"),
    ({"layers_to_transform": "all"}, "layers_to_transform must be"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED_FIELDS)
def test_fields_beyond_lora_are_refused_by_name(adapter: Path, changes: dict[str, Any], said: str) -> None:
    change_fields(adapter, **changes)
    with pytest.raises(ModelFormatError, match=said):
        read(adapter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(f"{FIRST}.lora_A.weight", None), "lora_A.weight' is missing"),
        (put(f"{FIRST}.lora_B.weight", None), "lora_B.weight' is missing"),
        (put(f"{FIRST}.lora_A.weight", torch.zeros(5, CONFIG.hidden_size)), r"has shape \[5, .*ask for \[4, "),
        (put(f"{FIRST}.lora_B.weight", torch.zeros(1, 4)), "has shape"),
        (put(f"{FIRST}.lora_A.weight", torch.zeros(4, CONFIG.hidden_size, dtype=torch.int8)), "dtype I8: allowed"),
        (put(f"{FIRST}.lora_A.weight", torch.full((4, CONFIG.hidden_size), torch.nan)), "holds NaN or infinity"),
        (put(f"{FIRST}.lora_magnitude_vector", torch.zeros(4)), "lora_magnitude_vector' is unexpected"),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4)), "is unexpected"),
        (put("base_model.model.lm_head.base_layer.weight", torch.zeros(4)), "save_embedding_layers=False"),
        (put("base_model.model.model.layers.99.mlp.up_proj.lora_A.weight", torch.zeros(4)), "is unexpected"),
        (lambda tensors: tensors.clear(), "has no tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_no_map_are_refused(adapter: Path, change: Callable[[dict[str, Tensor]], None], said: str) -> None:
    change_tensors(adapter, change)
    with pytest.raises(ModelFormatError, match=said):
        read(adapter)


def test_files_that_cannot_be_read_are_refused(adapter: Path) -> None:
    weights = adapter / WEIGHTS_FILE
    whole = weights.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"\xff" * 64, (2**60).to_bytes(8, "little") + b"{}"):
        weights.write_bytes(content)
        with pytest.raises(ModelFormatError, match=WEIGHTS_FILE):
            read(adapter)
    weights.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelFormatError, match=r"has no adapter_model\.safetensors; pickled weights are never loaded"):
        read(adapter)
    for content in ("", "[]", '{"r": '):
        (adapter / ADAPTER_FILE).write_text(content)
        with pytest.raises(ModelFormatError, match=ADAPTER_FILE):
            read(adapter)


def test_values_that_16_bits_cannot_hold_are_refused(adapter: Path) -> None:
    change_tensors(adapter, put(f"{FIRST}.lora_B.weight", torch.full((CONFIG.q_size, 4), 1e5)))
    assert read(adapter).rank == 4
    with pytest.raises(ModelFormatError, match=r"has values that .*float16 cannot hold"):
        read(adapter, dtype=torch.float16)


def test_expressions_of_trainers_are_taken(adapter: Path) -> None:
    parts = r"(?:self_attn|attention|mlp|ffn)", r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    vision = r"(?:.*?(?:vision|language).*?" + parts[0] + r".*?" + parts[1] + r".*?)"
    change_fields(
        adapter, target_modules=vision + r"|(?:\bmodel\.layers\.[\d]{1,}\." + parts[0] + r"\." + parts[1] + ")"
    )
    assert read(adapter).rank == 4


def test_layers_to_transform_and_excluded_modules_are_followed(adapter: Path) -> None:
    def only_first(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0." not in name or "down_proj" in name]:
            del tensors[name]

    change_tensors(adapter, only_first)
    change_fields(adapter, layers_to_transform=[0], exclude_modules=["down_proj"])
    found = read(adapter)
    assert [one is not None for one in found.maps[:8]] == [True] * 6 + [False] * 2
    assert not any(found.maps[7:])


def test_numbers_of_adapters_are_never_given_twice(adapter: Path) -> None:
    assert read(adapter).number != read(adapter).number

"""LoRA adapters: what PEFT writes into a directory, read as maps of a model's matrices; and those of a step's rows."""

from __future__ import annotations

import itertools
import math
import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from d3engine.errors import ModelFormatError
from d3engine.kernels.low_rank import LAYER_MAPS, LM_HEAD, PARTS, LowRankMap, Maps, RowMaps
from d3engine.model.checkpoint import Checkpoint, open_safetensors_files
from d3engine.model.checkpoint_formats import to_adjacent_pairs
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import rows_of
from d3engine.model.family import Multipliers
from d3engine.model.fields import Fields, read_json_object
from d3engine.model.source import ADAPTER_FILE
from d3engine.utils.files import is_there

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_DOWN, _UP, _BASE = ".lora_A.weight", ".lora_B.weight", ".base_layer.weight"
_FLOATS = ("F32", "F16", "BF16", "F64")

_EMPTY: Mapping[str, str] = {
    "modules_to_save": "null: whole matrices are not replaced",
    "trainable_token_indices": "null: embeddings are not changed",
    "target_parameters": "null: only linear modules have maps",
    "layer_replication": "null: layers are not repeated",
    "alora_invocation_tokens": "null: an adapter applies to all tokens",
    "use_dora": "false: DoRA is not supported, LoRA is",
    "use_qalora": "false: QALoRA is not supported, LoRA is",
    "use_bdlora": "null: BD-LoRA is not supported, LoRA is",
    "lora_bias": "false: maps have no biases",
    "fan_in_fan_out": "false: the matrices of linear modules are not transposed",
    "megatron_config": "null: Megatron's parallel modules are not supported",
    "velora_config": "null: VeLoRA is not supported, LoRA is",
    "monteclora_config": "null: MonteCLoRA is not supported, LoRA is",
    "arrow_config": "null: adapters are not routed",
    "kasa_config": "null: KaSA is not supported, LoRA is",
}
"""Fields that must be absent, null, false or empty, and what is allowed in words."""

_OF_TRAINING = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("megatron_core", "ensure_weight_tying", "runtime_config", "unsloth_fixed", "unsloth_version"),
    }
)
"""Fields that change nothing of what a trained adapter computes."""

_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "bias", "target_modules", "exclude_modules"),
        *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights"),
    }
)
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initial values by which training also changes the base model's weights."""

_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in the form that its model runs: `maps` are those of `LAYER_MAPS` layer by layer, then the LM head's.

    `number` is never given twice in a process: requests of equal numbers, and no others, share a prefix cache.
    """

    name: str
    path: Path
    number: int
    maps: Maps

    @property
    def rank(self) -> int:
        """The largest of its maps."""
        return max(one.rank for one in self.maps if one is not None)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.maps if one is not None)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Those that it has maps for, in any layer."""
        own = {LAYER_MAPS[place % len(LAYER_MAPS)] for place, one in enumerate(self.maps[:-1]) if one is not None}
        head = () if self.maps[-1] is None else (LM_HEAD,)
        return frozenset((*(matrix for matrix, parts in PARTS.items() if own.intersection(parts)), *head))


def matrices_of(adapters: Iterable[Adapter | None]) -> tuple[str, ...]:
    """The matrices for which any of these adapters has maps, in order."""
    found = {matrix for adapter in set(adapters) if adapter is not None for matrix in adapter.matrices}
    return tuple(matrix for matrix in (*PARTS, LM_HEAD) if matrix in found)


_FIRST = {matrix: LAYER_MAPS.index(parts[0]) for matrix, parts in PARTS.items()} | {LM_HEAD: 0}


class AdapterSlots:
    """Numbers for the adapters of running requests, by which operations on a device find their maps.

    Only the thread that runs steps uses it. `table` int64 [numbers, layers * maps + 1, 3] stays where it is.
    """

    def __init__(self, config: ModelConfig, count: int, most_rank: int, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        sizes = {
            "qkv": (config.q_size, config.kv_size, config.kv_size),
            "output": (hidden,),
            "gate_up": (inner, inner),
            "down": (hidden,),
            LM_HEAD: (config.vocab_size,),
        }
        self._stops = {matrix: tuple(itertools.accumulate(own)) for matrix, own in sizes.items()}
        self._most_rank = most_rank
        # By their last use. Those that are unloaded, and used by no request, are gone.
        self._held: OrderedDict[int, weakref.ref[Adapter] | None] = OrderedDict.fromkeys(range(count))
        self.table = torch.zeros(count, config.num_layers * len(LAYER_MAPS) + 1, 3, dtype=torch.int64, device=device)

    def numbers_of(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """The number of each adapter, -1 for None; those that were not used for longest give theirs up."""
        wanted = {adapter for adapter in adapters if adapter is not None}
        assert len(wanted) <= len(self._held), "there is a number for each row"
        known = {own: number for number in self._held if (own := self._adapter(number)) in wanted and own is not None}
        for number in known.values():
            self._held.move_to_end(number)
        for adapter in wanted - known.keys():
            known[adapter] = self._put(adapter)
        return [-1 if adapter is None else known[adapter] for adapter in adapters]

    def _put(self, adapter: Adapter) -> int:
        number = next(iter(self._held))
        self._held[number] = weakref.ref(adapter)
        self._held.move_to_end(number)
        rows = [
            (0, 0, 0) if one is None else (one.down.data_ptr(), one.up.data_ptr(), one.rank) for one in adapter.maps
        ]
        self.table[number] = torch.tensor(rows)
        return number

    def _adapter(self, number: int) -> Adapter | None:
        held = self._held[number]
        return None if held is None else held()

    def of_rows(self, adapters: Sequence[Adapter | None], chunks: npt.NDArray[np.integer[Any]]) -> RowAdapters:
        """Those of a step's rows, of which each belongs to one of `chunks` [T]; `adapters` are the chunks'."""
        numbers = np.array(self.numbers_of(adapters), np.int32)[chunks]
        return RowAdapters(self, torch.from_numpy(numbers).to(self.table.device), matrices_of(adapters))

    def at(self, numbers: Tensor, layer: int, matrix: str) -> RowMaps:
        """The maps of one matrix for rows of these numbers; the LM head's layer comes behind the last one."""
        stops, first = self._stops[matrix], layer * len(LAYER_MAPS) + _FIRST[matrix]
        places = slice(first, first + len(stops))

        def maps(number: int) -> Maps | None:
            adapter = self._adapter(number)
            return None if adapter is None else adapter.maps[places]

        return RowMaps(numbers, maps, stops, self.table[:, places], self._most_rank)


@dataclass(frozen=True, eq=False)
class RowAdapters:
    """The adapters of the rows of a step: which maps each matrix adds to the products of which rows.

    Attributes:
        slots: where the maps are.
        numbers: int32 [T] on the device, a number of `slots` for each row, -1 for none.
        matrices: those for which any of the rows has maps.
    """

    slots: AdapterSlots
    numbers: Tensor
    matrices: tuple[str, ...]

    def at(self, layer: int, matrix: str) -> RowMaps | None:
        """As of `slots`; None where no row has any there."""
        return self.slots.at(self.numbers, layer, matrix) if matrix in self.matrices else None

    def of(self, rows: slice | Tensor) -> RowAdapters:
        """Those of some of the rows."""
        return RowAdapters(self.slots, self.numbers[rows], self.matrices)


@dataclass(frozen=True)
class _Part:
    """Rows of a module with one map: its place among an adapter's, and the number of heads to put into pairs."""

    place: int
    rows: int
    num_heads: int | None = None


def read_adapter(
    name: str,
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    max_rank: int,
) -> Adapter:
    """Read the directory of an adapter for a model of `config`; `dtype` None: as stored.

    Raises `ModelFormatError`, naming file and field or tensor, for what is no LoRA adapter of this model.
    """
    fields = _config(directory)
    _check_fields(fields)
    weights = directory / WEIGHTS_FILE
    if not is_there(weights):
        others = "; pickled weights are never loaded" if any(directory.glob("*.bin")) else ""
        raise ModelFormatError(f"{directory} has no {WEIGHTS_FILE}{others}")
    modules = _modules(config)
    with open_safetensors_files([weights]) as checkpoint:
        found = _pairs(checkpoint, weights, modules)
        targets = _Targets(fields)
        _check_targets(found, {module for module in modules if targets.has(module)}, fields, weights)
        maps: list[LowRankMap | None] = [None] * (config.num_layers * len(LAYER_MAPS) + 1)
        for module in sorted(found):
            columns, parts = modules[module]
            rank, scale = targets.rank(module, max_rank), targets.scale(module)
            rows = sum(part.rows for part in parts)
            down = _tensor(checkpoint, module + _DOWN, (rank, columns))
            up = _tensor(checkpoint, module + _UP, (rows, rank)) * scale
            for part, own in zip(parts, torch.split(up, [part.rows for part in parts]), strict=True):
                turned = own if part.num_heads is None else to_adjacent_pairs(own, part.num_heads, config.rotary_dim)
                held = dtype or _stored(checkpoint, module)
                made = LowRankMap(down, turned.t()).to(held, device)
                if device.type != "meta" and not all(bool(one.isfinite().all()) for one in (made.down, made.up)):
                    raise ModelFormatError(f"{weights}: the map of {module!r} has values that {held} cannot hold")
                maps[part.place] = made
    return Adapter(name, directory, next(_numbers), tuple(maps))


def largest_rank(directory: Path) -> int:
    """Of the maps that an adapter's config names. Raises `ModelFormatError`."""
    return _Targets(_config(directory)).largest_rank


def _config(directory: Path) -> Fields:
    return Fields(read_json_object(directory / ADAPTER_FILE), str(directory / ADAPTER_FILE))


def _check_fields(fields: Fields) -> None:
    if fields.get("peft_type") != "LORA":
        fields.refuse("peft_type", '"LORA"')
    for name, allowed in _EMPTY.items():
        if fields.get(name):
            fields.refuse(name, allowed)
    if fields.get("bias") not in (None, "none"):
        fields.refuse("bias", '"none": biases are not replaced')
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        fields.refuse("init_lora_weights", "one that leaves the base model's weights as they are, as true does")
    for name, value in fields.values.items():
        if value and name not in _READ | _OF_TRAINING:
            fields.refuse(name, "absent, as this field is not known")


def _modules(config: ModelConfig) -> dict[str, tuple[int, list[_Part]]]:
    """The linear modules of a model by their names: input channels, and the parts of their outputs."""
    names, hidden = config.tensor_names, config.hidden_size
    found: dict[str, tuple[int, list[_Part]]] = {}
    for layer in range(config.num_layers):
        place = {name: layer * len(LAYER_MAPS) + nth for nth, name in enumerate(LAYER_MAPS)}
        prefix = names.layer(layer)
        in_pairs = config.has_interleaved_rope
        qkv = [
            _Part(place["q"], config.q_size, None if in_pairs else config.num_heads),
            _Part(place["k"], config.kv_size, None if in_pairs else config.num_kv_heads),
            _Part(place["v"], config.kv_size),
        ]
        gate_up = [_Part(place[name], config.intermediate_size) for name in ("gate", "up")]
        for name, parts in rows_of(names.qkv, qkv).items():
            found[f"{prefix}self_attn.{name}"] = hidden, parts
        found[f"{prefix}self_attn.o_proj"] = config.q_size, [_Part(place["o"], hidden)]
        for name, parts in rows_of(names.gate_up, gate_up).items():
            found[prefix + name] = hidden, parts
        found[prefix + names.down] = config.intermediate_size, [_Part(place["down"], hidden)]
    if config.multipliers == Multipliers():  # others scale what the head reads
        found["lm_head"] = hidden, [_Part(config.num_layers * len(LAYER_MAPS), config.vocab_size)]
    return found


def _pairs(checkpoint: Checkpoint, file: Path, modules: Mapping[str, object]) -> set[str]:
    """The modules that a file has maps for; raises for any other tensor, and for half a map."""
    found: dict[str, set[str]] = {}
    for name in checkpoint.entries:
        suffix = next((one for one in (_DOWN, _UP) if name.endswith(one)), None)
        module = name.removeprefix(_PREFIX).removesuffix(suffix or "")
        if suffix is None or not name.startswith(_PREFIX) or module not in modules:
            if name.endswith(_BASE):
                raise ModelFormatError(
                    f"{file}: tensor {name!r} is a weight of the base model, which adapters do not replace; save"
                    " without it, by save_pretrained(..., save_embedding_layers=False)"
                )
            some = ", ".join(sorted({one.rpartition(".")[2] for one in modules}))
            raise ModelFormatError(
                f"{file}: tensor {name!r} is unexpected: allowed are {_PREFIX}MODULE{_DOWN} and {_UP[1:]} of this"
                f" model's modules ({some})"
            )
        found.setdefault(module, set()).add(suffix)
    for module, suffixes in found.items():
        if len(suffixes) < 2:
            missing = _UP if _DOWN in suffixes else _DOWN
            raise ModelFormatError(f"{file}: tensor {_PREFIX + module + missing!r} is missing")
    if not found:
        raise ModelFormatError(f"{file} has no tensors")
    return set(found)


def _check_targets(found: set[str], wanted: set[str], fields: Fields, file: Path) -> None:
    """Raise unless the tensors are those of the modules that the config names, as PEFT reads it."""
    for module in sorted(found - wanted):
        raise ModelFormatError(f"{file}: {module!r} has tensors, and {fields.source} does not name it as a target")
    for module in sorted(wanted - found):
        raise ModelFormatError(f"{file}: tensor {_PREFIX + module + _DOWN!r} is missing, a target of {fields.source}")


def _tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Tensor:
    """A tensor as float32."""
    entry = checkpoint.entries[_PREFIX + name]
    if entry.dtype not in _FLOATS:
        raise ModelFormatError(
            f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype}: allowed are {', '.join(_FLOATS)}"
        )
    if entry.shape != shape:
        raise ModelFormatError(
            f"{entry.file}: tensor {entry.name!r} has shape {list(entry.shape)}; model and {ADAPTER_FILE} ask for"
            f" {list(shape)}"
        )
    values = checkpoint.read(entry.name).float()
    if not bool(values.isfinite().all()):
        raise ModelFormatError(f"{entry.file}: tensor {entry.name!r} holds NaN or infinity")
    return values


def _stored(checkpoint: Checkpoint, module: str) -> torch.dtype:
    """The dtype that a file has a map in; float32 for a mixture."""
    dtypes = {checkpoint.entries[_PREFIX + module + suffix].dtype for suffix in (_DOWN, _UP)}
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(dtypes.pop() if len(dtypes) == 1 else "", torch.float32)


_MOST_CHARACTERS = 2000
_QUANTIFIED_GROUP = re.compile(r"\)(?:[*+]|\{)")
"""What lets the time that an expression takes grow exponentially."""
_MOST_REPEATS = 6
_SECONDS = 5.0


class _Targets:
    """Which modules have maps, of which rank and scale, by the rules of PEFT."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._until = time.monotonic() + _SECONDS
        self._rank = fields.integer("r", high=2**20)
        self._alpha = self._number("lora_alpha", fields.get("lora_alpha"))
        self._is_root = fields.boolean("use_rslora")
        self._patterns = {name: self._pattern(name) for name in ("rank_pattern", "alpha_pattern")}
        self._wanted, self._excluded = (self._names(name) for name in ("target_modules", "exclude_modules"))
        if self._wanted is None:
            fields.refuse("target_modules", 'a list of names, an expression, or "all-linear"')
        layers = fields.get("layers_to_transform")
        self._layers = [layers] if type(layers) is int else layers
        if not (layers is None or (isinstance(self._layers, list) and all(type(one) is int for one in self._layers))):
            fields.refuse("layers_to_transform", "null, a layer, or a list of layers")
        pattern = fields.get("layers_pattern")
        if pattern not in (None, [], "", "layers", ["layers"]):
            fields.refuse("layers_pattern", '"layers", or absent')

    def rank(self, module: str, most: int) -> int:
        """Raises where it is more than `most`."""
        rank = self._by_pattern("rank_pattern", module, self._rank)
        if type(rank) is not int or not 1 <= rank <= most:
            name = "r" if rank == self._rank else "rank_pattern"
            self._fields.refuse(name, f"ranks from 1 to max_lora_rank={most}")
        return rank

    @property
    def largest_rank(self) -> int:
        return max([self._rank, *(rank for rank in self._patterns["rank_pattern"].values() if type(rank) is int)])

    def scale(self, module: str) -> float:
        alpha = self._number("alpha_pattern", self._by_pattern("alpha_pattern", module, self._alpha))
        rank = self._by_pattern("rank_pattern", module, self._rank)
        return alpha / (math.sqrt(rank) if self._is_root else rank)

    def has(self, module: str) -> bool:
        """Whether a module is a target."""
        wanted, excluded = self._wanted, self._excluded
        if excluded and (self._matches("exclude_modules", excluded, module)):
            return False
        if isinstance(wanted, str):
            if wanted.lower() == "all-linear":
                return module != "lm_head"
            return self._matches("target_modules", wanted, module)
        assert wanted is not None
        if module in wanted:
            return True
        of_layer = re.search(r"\.layers\.(\d+)\.", f".{module}")
        in_layers = not self._layers or (of_layer is not None and int(of_layer[1]) in self._layers)
        return in_layers and self._matches("target_modules", wanted, module)

    def _matches(self, field: str, names: str | Sequence[str], module: str) -> bool:
        if isinstance(names, str):
            return self._expression(field, names, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _names(self, field: str) -> str | list[str] | None:
        value = self._fields.get(field)
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not (value is None or isinstance(value, str) or is_list):
            self._fields.refuse(field, "a list of names, or an expression")
        names: str | list[str] | None = value
        return names

    def _pattern(self, field: str) -> dict[str, Any]:
        value = self._fields.get(field) or {}
        if not isinstance(value, dict) or len(value) > 10_000:
            self._fields.refuse(field, "an object of at most 10,000 names and numbers")
        return value

    def _by_pattern(self, field: str, module: str, otherwise: Any) -> Any:
        """The first that matches the end of a module's name, as PEFT looks it up."""
        for key, value in self._patterns[field].items():
            if module == key or module.endswith(f".{key}") or self._expression(field, rf"(.*\.)?({key})", module):
                return value
        return otherwise

    def _expression(self, field: str, pattern: str, module: str) -> re.Match[str] | None:
        """Whether the whole name of a module matches; expressions come from a file that may be hostile."""
        repeats = len(re.findall(r"[*+?{]+", pattern.replace("(?", "(")))
        is_simple = repeats <= _MOST_REPEATS and not _QUANTIFIED_GROUP.search(pattern)
        if len(pattern) > _MOST_CHARACTERS or not is_simple or time.monotonic() > self._until:
            self._fields.refuse(field, "a simple expression: no repeated groups, and few repetitions")
        try:
            return re.fullmatch(pattern, module)
        except (re.error, OverflowError, RecursionError) as error:
            self._fields.refuse(field, f"a regular expression ({error})")

    def _number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
            self._fields.refuse(field, "numbers from -1e6 to 1e6")
        return float(value)

"""The published models of tests/model/published_models.toml, each as its config.json, and a table of them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "tests" / "model" / "published_models.toml"

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_NOT_OF_CONFIG = ("name", "from", "sizes")


@dataclass(frozen=True)
class PublishedModel:
    """A model by its name on the hub, and what of its config.json is known; `runs`: whether its family does."""

    name: str
    config: Mapping[str, Any]
    runs: bool


@dataclass(frozen=True)
class PublishedGGUF:
    """The keys of a GGUF file, those behind its architecture's name and those of its tokenizer.

    `like` has the same tensors but for the head, which is `is_tied` or the model's. `num_tensors`: None if unknown.
    """

    name: str
    like: str
    architecture: str
    is_tied: bool | None
    num_tensors: int | None
    keys: Mapping[str, Any]
    tokenizer: Mapping[str, Any]


def published_models() -> list[PublishedModel]:
    """All models, in the order of the file."""
    groups = _groups()
    found = [
        PublishedModel(row["name"], _named(family) | _fields(row), runs=True)
        for family in groups["family"]
        for row in family["models"]
    ]
    others = [PublishedModel(name, _named(other), runs=False) for other in groups["other"] for name in other["models"]]
    return found + others


def published_gguf_files() -> list[PublishedGGUF]:
    """All GGUF files."""
    return [
        PublishedGGUF(
            row["name"],
            row["like"],
            row["architecture"],
            row.get("tie_word_embeddings"),
            row.get("tensors"),
            row["keys"],
            row["tokenizer"],
        )
        for row in _groups()["gguf"]
    ]


def table() -> Iterator[str]:
    """A row for each model that runs: its parameters, bytes of its weights and cache entries; then the others."""
    from d3engine.engine.memory import weight_bytes
    from d3engine.model.config import ModelConfig
    from d3engine.model.shard import shard_of

    yield from ("| model | architecture | parameters | int4 | KV cache, 4,096 tokens |", "|---|---|---|---|---|")
    others: dict[str, list[str]] = {}
    for model in published_models():
        architecture = model.config["architectures"][0]
        if not model.runs:
            others.setdefault(architecture, []).append(model.name)
            continue
        config = ModelConfig.from_dict(model.config)
        floats, int4 = (weight_bytes(one, shard_of(one, 0, 1)) for one in (config, config.quantized("int4")))
        entries = 4096 * config.num_layers * 2 * config.kv_size * 2
        cells = [f"{floats / 2e9:.2f} billion", f"{int4 / 1e9:.2f} GB", f"{entries / 2**20:,.0f} MiB"]
        yield f"| {model.name} | `{architecture}` | {' | '.join(cells)} |"
    yield from ("", "| refused by its `architectures` | models |", "|---|---|")
    for architecture, names in others.items():
        yield f"| `{architecture}` | {', '.join(names)} |"


def _groups() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def _named(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": [group["architecture"]], "model_type": group["model_type"]}


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json that a row has."""
    found = dict(zip(_SIZES, row["sizes"], strict=True))
    for name, value in row.items():
        if name not in _NOT_OF_CONFIG:
            found[name] = _value(value)
    rope = found.get("rope_scaling")
    if rope is not None and "long_factor" in rope:
        lists = {name: [1.0] * rope[name] for name in ("short_factor", "long_factor")}
        found["rope_scaling"] = rope | lists
    return found


def _value(value: Any) -> Any:
    """What JSON has; TOML has no null."""
    return None if value == "null" else value

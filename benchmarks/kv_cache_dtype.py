"""What 8-bit cache entries cost a model: KL divergence, agreement and perplexity of texts, beside the cache it is for.

Every form of the cache meets the texts of `judged_texts.py`, and all that differs is what attention reads. `--rules`
compares ways to choose the scales.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from benchmarks.judged_texts import (
    Text,
    TextSettings,
    chat_texts,
    compared,
    figures,
    figures_in_words,
    gsm8k_texts,
    read,
)
from benchmarks.report import Parser, print_table, settings_of
from d3engine import D3, Engine, FullDepth
from d3engine.depth import DepthPolicy
from d3engine.kernels.kv_pool import FP8, LARGEST

FLOATS = "float32"

Rule: TypeAlias = Callable[[int, Tensor], Tensor]
"""(which of all layers' keys and values, heads [T, M, D] that were written) -> what is to be read in their place."""


@dataclass(frozen=True)
class Settings(TextSettings):
    """Beside the texts that are judged: on how many others constant scales are found."""

    calibration_texts: int = 4


class Rounded:
    """Operations like `kernels`, but entries are changed by `rule` as soon as they are written."""

    def __init__(self, kernels: Any, rule: Rule) -> None:
        self._kernels, self._rule = kernels, rule
        self._layers: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def qkv(self, hidden: Tensor, norm: Tensor, *others: Any, **options: Any) -> Tensor:
        queries: Tensor = self._kernels.qkv(hidden, norm, *others, **options)
        _, _, _, _, pool, entries, _ = others
        flat = pool.view(-1, *pool.shape[3:])
        layer = self._layers.setdefault(norm.data_ptr(), len(self._layers))
        for half, places in enumerate(entries.unbind(1)):
            flat[places] = self._rule(2 * layer + half, flat[places])
        return queries


# -- ways to make entries small --------------------------------------------------------------------------------


def rounded(heads: Tensor, scales: Tensor | float) -> Tensor:
    """What e4m3 keeps of `heads`, at `scales` that broadcast against it; what is too large becomes the largest."""
    return (heads / scales).clamp(-LARGEST, LARGEST).to(FP8).float() * scales


def by_entry(heads: Tensor) -> Tensor:
    """The scale of each head of each entry, [T, M, 1]."""
    return heads.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / LARGEST


@dataclass
class Largest:
    """Notes the largest magnitude of each head of each layer's keys and values, and changes nothing."""

    found: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, which: int, heads: Tensor) -> Tensor:
        largest = heads.abs().amax(dim=(0, 2)).unsqueeze(-1)
        self.found[which] = torch.maximum(largest, self.found.get(which, largest))
        return heads


def rules(largest: Largest) -> dict[str, Rule]:
    """By name; `largest` has looked at other texts."""
    return {
        "bfloat16": lambda which, heads: heads.bfloat16().float(),
        "scale 1": lambda which, heads: rounded(heads, 1.0),
        "a constant for each head": lambda which, heads: rounded(heads, largest.found[which] / LARGEST),
        "of each entry, a power of 2": lambda which, heads: rounded(heads, by_entry(heads).log2().ceil().exp2()),
        "of each entry": lambda which, heads: rounded(heads, by_entry(heads)),
    }


# -- measuring -------------------------------------------------------------------------------------------------


def measure(settings: Settings, *, compare_rules: bool = False) -> dict[str, Any]:
    """Float32 entries, bfloat16's and 8-bit ones, or all `rules`, at full depth and under D3."""
    torch.set_num_threads(settings.threads)
    data, most = Path(settings.data), settings.text_tokens
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**27}
    with Engine(settings.model, max_num_seqs=settings.batch, **options) as engine:
        texts = gsm8k_texts(engine, data, "test", settings.gsm8k, most)
        texts += chat_texts(engine, settings.chats, most)
        others = gsm8k_texts(engine, data, "validation", settings.calibration_texts, most)
    options |= {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": settings.batch}
    with Engine(settings.model, **options) as floats, Engine(settings.model, kv_cache_dtype="fp8", **options) as fp8:
        forms = dict(_forms(floats, fp8, others, compare_rules))
        depths: dict[str, DepthPolicy] = {"full": FullDepth(), "D3": D3(settings.alpha, settings.start)}
        sums = {(form, depth): [] for form in (FLOATS, *forms) for depth in depths}
        batches = [texts[first : first + settings.batch] for first in range(0, len(texts), settings.batch)]
        with tqdm(total=len(batches) * len(depths) * (1 + len(forms)), unit="pass") as bar:
            for batch in batches:
                for depth, policy in depths.items():
                    _set_rule(floats, None)
                    reference = read(floats, batch, policy)
                    bar.update()
                    sums[FLOATS, depth] += list(map(compared, batch, reference, reference))
                    for form, begin in forms.items():
                        found = read(begin(), batch, policy)
                        bar.update()
                        sums[form, depth] += list(map(compared, batch, found, reference))
        bytes_a_token = {"float32": 4 * _values(floats), "bfloat16": 2 * _values(floats), "fp8": _bytes_a_token(fp8)}
    kinds = np.array([text.kind for text in texts])
    rows = [
        {
            "cache": form,
            "depth": depth,
            "texts": kind,
            **figures(np.array(found), np.array(sums[FLOATS, depth]), which),
        }
        for (form, depth), found in sums.items()
        for kind, which in (("all", kinds != ""), *((kind, kinds == kind) for kind in dict.fromkeys(kinds)))
    ]
    return {
        "benchmark": "kv_cache_dtype",
        "settings": settings.kept,
        "bytes_a_token": bytes_a_token,
        "rows": rows,
    }


def _forms(
    floats: Engine, fp8: Engine, others: Sequence[Text], compare_rules: bool
) -> Iterator[tuple[str, Callable[[], Engine]]]:
    """What makes an engine ready whose cache has the form of that name."""
    largest = Largest()
    if compare_rules:
        _set_rule(floats, largest)
        read(floats, others, FullDepth())
    for name, rule in rules(largest).items():
        if compare_rules or name == "bfloat16":
            yield name, lambda rule=rule: _set_rule(floats, rule)  # type: ignore[misc]
    if not compare_rules:
        yield "fp8", lambda: fp8


def _set_rule(engine: Engine, rule: Rule | None) -> Engine:
    """Let the entries of an engine that runs eagerly be changed by `rule` from now on."""
    model = engine.executor.model
    kernels = getattr(model.kernels, "_kernels", model.kernels)
    model.kernels = kernels if rule is None else Rounded(kernels, rule)
    return engine


def _values(engine: Engine) -> int:
    config = engine.config
    return 2 * config.num_layers * config.kv_size


def _bytes_a_token(engine: Engine) -> int:
    settings = engine.settings
    return settings.config.num_layers * settings.block_bytes // settings.block_size


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each form of the cache, depth and kind of text."""
    settings = report["settings"]
    title = f"{settings['model']}: {settings['gsm8k']} of GSM8K, {settings['chats']} chats; float32 activations"
    columns = ("depth", "texts", "cache", "positions", "KL, nats", "same token", "loss, nats", "perplexity")
    about = ("depth", "texts", "cache", "positions")
    rows = [
        (*(str(row[one]) for one in about), *figures_in_words(row), f"{row['perplexity']:.4f}")
        for row in sorted(report["rows"], key=lambda row: (row["depth"], row["texts"]))
    ]
    print_table(console, columns, rows, title)
    console.print("bytes a token: " + ", ".join(f"{name} {count:,}" for name, count in report["bytes_a_token"].items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = Parser("kv_cache_dtype", __doc__, arguments, Settings)
    parser.add_argument("--rules", action="store_true", help="compare ways to choose the scales instead")
    options = parser.given()
    report = measure(settings_of(Settings, options), compare_rules=options.rules)
    parser.publish(report, show, width=170)
    return 0


if __name__ == "__main__":
    sys.exit(main())

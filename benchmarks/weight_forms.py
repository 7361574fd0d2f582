"""What 4 and 8 bits cost a model: KL divergence, agreement and perplexity beside its floats, and bits per weight.

The floats are a GGUF file's own, their channels shuffled (`gguf_writing.py`), and go to this project's schemes and to
llama.cpp's types. Texts are the model's own answers in chats, and pages of this documentation; int4 fits others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.gguf_writing import in_q4_0, quantized_by_llama_cpp, shuffled
from benchmarks.judged_texts import (
    RESAMPLES,
    Floats,
    Text,
    chat_texts,
    figures,
    figures_in_words,
    judged,
    page_texts,
    read_prompt,
)
from benchmarks.report import main_of, option, print_table
from d3engine import Engine
from d3engine.model.config import ModelConfig
from d3engine.model.source import open_checkpoint
from d3engine.weights_tools.quantize import quantize_model, quantize_to_groups

FORMS: dict[str, Callable[[Path, Path], None]] = {
    "int4": partial(quantize_to_groups, show_progress=False),
    "int4 --bits 5.5": partial(quantize_to_groups, bits=5.5, show_progress=False),
    "int4 --rtn": partial(quantize_model, scheme="int4", show_progress=False),
    "int8": partial(quantize_model, scheme="int8", show_progress=False),
    "fp8": partial(quantize_model, scheme="fp8", show_progress=False),
    "Q4_0": in_q4_0,
    "Q4_K_M": partial(quantized_by_llama_cpp, name="Q4_K_M"),
}
"""What writes each form of a GGUF file of floats to another place."""
KINDS = ("chats", "pages")


@dataclass(frozen=True)
class Settings:
    """Which GGUF file, how many texts of each kind, and how many tokens of each are judged at most."""

    model: str = option(help="a GGUF file of a Llama or a Qwen2")
    forms: tuple[str, ...] = option(
        tuple(FORMS), "of the weights; Q4_K_M needs llama-cpp-python [default: all]", choices=FORMS
    )
    chats: int = option(32, "the model's own answers", type=int)
    chat_tokens: int = option(64, "judged of each at most")
    pages: int = option(8, "of documentation", type=int)
    page_tokens: int = option(256, "judged of each")
    threads: int = option(2)


def bits_per_weight(model: Path, floats: Path) -> tuple[float, float]:
    """Of the layers and of the whole model, scales counted, for each of the float weights that `model` stands for."""
    prefix = ModelConfig.from_directory(floats).tensor_names.layer(0).partition("0")[0]
    with open_checkpoint(model) as checkpoint, open_checkpoint(floats) as original:
        sums = [
            (
                sum(8 * entry.nbytes for name, entry in checkpoint.entries.items() if name.startswith(start)),
                sum(entry.num_values for name, entry in original.entries.items() if name.startswith(start)),
            )
            for start in (prefix, "")
        ]
    layers, whole = (bits / weights for bits, weights in sums)
    return layers, whole


def measure(settings: Settings) -> dict[str, Any]:
    """Each form on each kind of text, beside the floats."""
    torch.set_num_threads(settings.threads)
    with TemporaryDirectory() as folder:
        original = Path(folder) / "floats.gguf"
        shuffled(Path(settings.model), original)
        made = {form: Path(folder) / f"{form}.gguf" for form in settings.forms}  # a directory may end so too
        for form, path in tqdm(made.items(), unit="form"):
            FORMS[form](original, path)
        return compared(settings, original, made)


def compared(settings: Settings, original: Path, made: Mapping[str, Path]) -> dict[str, Any]:
    """The figures of forms beside their floats, one model after the other."""
    options: dict[str, Any] = {"num_threads": settings.threads, "activations": "float32", "max_model_len": 1024}
    options |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 2**28, "device": "cpu", "dtype": "float32"}
    with Engine(original, **options) as floats:
        texts = chat_texts(floats, settings.chats, settings.chat_tokens)
        texts += page_texts(floats, settings.pages, settings.page_tokens)
        references = [read_prompt(floats, text) for text in tqdm(texts, desc="floats", unit="text")]
    rows = []
    for form, path in made.items():
        with Engine(path, **options) as engine:
            own, sums = judged(texts, references, engine)
        layers, whole = bits_per_weight(path, original)
        bits = {"bits_of_layers": layers, "bits_of_all": whole}
        if not rows:
            rows = [_row("floats", kind, own, own, texts) for kind in KINDS]
        rows += [_row(form, kind, sums, own, texts) | bits for kind in KINDS]
    kept = asdict(settings) | {"model": Path(settings.model).name, "resamples": RESAMPLES}
    return {"benchmark": "weight_forms", "settings": kept, "rows": rows}


def _row(form: str, kind: str, sums: Floats, own: Floats, texts: Sequence[Text]) -> dict[str, Any]:
    which = np.array([text.kind == kind for text in texts])
    return {"weights": form, "texts": kind, **figures(sums, own, which)}


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each form of the weights and each kind of text."""
    settings = report["settings"]
    title = f"{settings['model']}, channels shuffled: {settings['chats']} chats, {settings['pages']} pages"
    columns = (
        "weights",
        "bits: layers, all",
        "texts",
        "positions",
        "KL, nats",
        "same token",
        "loss, nats",
        "perplexity",
    )
    rows = []
    for row in report["rows"]:
        bits = f"{row['bits_of_layers']:.2f}, {row['bits_of_all']:.2f}" if "bits_of_all" in row else ""
        about = row["weights"], bits, row["texts"], str(row["positions"])
        rows.append((*about, *figures_in_words(row), f"{row['perplexity']:.4f}"))
    print_table(console, columns, rows, title)


main = main_of("weight_forms", __doc__, Settings, measure, show, width=150)


if __name__ == "__main__":
    sys.exit(main())

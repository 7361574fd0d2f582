"""What quantized weights cost a model: KL divergence, agreement and perplexity of texts, beside its float weights.

Every form meets the texts of `judged_texts.py`. What is computed with are the floats that its values and scales stand
for, so that nothing differs but the weights. The LM head stays float, and with it an embedding that is the head too.
Groups are fitted to Python's documentation, which none of the texts is from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.judged_texts import (
    TextSettings,
    chat_texts,
    compared,
    figures,
    figures_in_words,
    gsm8k_texts,
    new_parser,
    read,
)
from benchmarks.report import environment, tell
from d3engine import D3, Engine, FullDepth
from d3engine.depth import DepthPolicy
from d3engine.engine.model_directory import model_directory
from d3engine.kernels.matrices import Weight
from d3engine.model.config import QUANTIZATION_SCHEMES, ModelConfig
from d3engine.model.weights import LlamaWeights, load_weights, quantize_matrix, with_matrices
from d3engine.weights_tools.quantize import quantize_to_groups

FLOATS = "float32"
GROUPS = {f"int4, groups of {size}": size for size in (32, 64)}


def stood_for(weights: LlamaWeights, scheme: str) -> LlamaWeights:
    """`weights` with each matrix of the layers as the float32 that it stands for once it is quantized."""

    def rounded(matrix: Weight) -> Weight:
        return quantize_matrix(matrix, scheme).dequantize(torch.float32)

    return with_matrices(weights, rounded, lambda head: head)


def in_form(weights: LlamaWeights, directory: Path, form: str) -> LlamaWeights:
    """The weights of `directory` as the floats that they stand for in a form."""
    if form not in GROUPS:
        return stood_for(weights, form)
    with TemporaryDirectory() as folder:
        quantize_to_groups(directory, Path(folder), GROUPS[form])
        return load_weights(folder, ModelConfig.from_directory(folder), dtype=torch.float32, device="cpu")


def measure(settings: TextSettings, forms: Sequence[str]) -> dict[str, Any]:
    """Forms at full depth and under D3, beside the float weights."""
    torch.set_num_threads(settings.threads)
    directory = model_directory(settings.model)
    weights = load_weights(directory, ModelConfig.from_directory(directory), dtype=torch.float32, device="cpu")
    with _engine_over(weights, settings) as floats:
        texts = gsm8k_texts(floats, Path(settings.data), "test", settings.gsm8k, settings.text_tokens)
        texts += chat_texts(floats, settings.chats, settings.text_tokens)
        batches = [texts[first : first + settings.batch] for first in range(0, len(texts), settings.batch)]
        depths: dict[str, DepthPolicy] = {"full": FullDepth(), "D3": D3(settings.alpha, settings.start)}
        with tqdm(total=len(batches) * len(depths) * (1 + len(forms)), unit="pass") as bar:

            def all_of(engine: Engine, depth: str) -> list[torch.Tensor]:
                found = []
                for batch in batches:
                    found += read(engine, batch, depths[depth])
                    bar.update()
                return found

            reference = {depth: all_of(floats, depth) for depth in depths}
            sums = {(FLOATS, depth): list(map(compared, texts, own, own)) for depth, own in reference.items()}
            for form in forms:
                with _engine_over(in_form(weights, directory, form), settings) as engine:
                    for depth, wanted in reference.items():
                        sums[form, depth] = list(map(compared, texts, all_of(engine, depth), wanted))
    everything = np.ones(len(texts), dtype=bool)
    rows = [
        {
            "weights": form,
            "depth": depth,
            **figures(np.array(found), np.array(sums[FLOATS, depth]), everything),
        }
        for (form, depth), found in sums.items()
    ]
    return {"benchmark": "weight_forms", "settings": settings.kept, "rows": rows}


@contextmanager
def _engine_over(weights: LlamaWeights, settings: TextSettings) -> Iterator[Engine]:
    """What asks its sampler for each token: an engine without runs of steps."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**28}
    options |= {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": settings.batch}
    with Engine(settings.model, weights=weights, **options) as engine:
        yield engine


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each form of the weights and each depth."""
    settings = report["settings"]
    title = f"{settings['model']}: {settings['gsm8k']} of GSM8K, {settings['chats']} chats; float32 activations"
    table = Table(title=title, title_justify="left")
    for column in ("depth", "weights", "positions", "KL, nats", "same token", "loss, nats", "perplexity"):
        table.add_column(column, justify="right")
    for row in sorted(report["rows"], key=lambda row: str(row["depth"]), reverse=True):
        about = row["depth"], row["weights"], str(row["positions"])
        table.add_row(*about, *figures_in_words(row), f"{row['perplexity']:.4f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = new_parser("weight_forms", (__doc__ or "").splitlines()[0])
    every = [*QUANTIZATION_SCHEMES, *GROUPS]
    parser.add_argument("--forms", nargs="+", choices=every, default=every, help="of the weights [default: all]")
    options = vars(parser.parse_args(arguments))
    file, forms = options.pop("json"), options.pop("forms")
    report = measure(TextSettings(**options), forms)
    report["environment"] = environment("benchmarks.weight_forms", arguments)
    tell(report, show, width=150, file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What rounded activations cost a model: KL divergence, agreement and perplexity beside float32 ones.

The texts are its own answers in chats, each read as a prompt: a row has the same bits as in an answer.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.judged_texts import RESAMPLES, chat_texts, figures, figures_in_words, judged, read_prompt
from benchmarks.report import main_of, option, print_table
from d3engine import Engine


@dataclass(frozen=True)
class Settings:
    """Which model, how many answers in chats that it gave, and how many tokens of each at most."""

    model: str = option(help="a GGUF file with quantized matrices, or with bfloat16 activations a model of such")
    activations: str = option("int8", choices=("int8", "bfloat16"))
    chats: int = option(64, "the model's own answers")
    text_tokens: int = option(64, "judged of each at most")
    threads: int = option(2)


def measure(settings: Settings) -> dict[str, Any]:
    """Both kinds of activations on the answers that float32 ones give."""
    options: dict[str, Any] = {
        "num_threads": settings.threads,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
    }
    if settings.activations == "bfloat16":
        options["weight_dtype"] = "bfloat16"
    with (
        Engine(settings.model, activations="float32", **options) as exact,
        Engine(settings.model, activations=settings.activations, **options) as rounded,
    ):
        texts = chat_texts(exact, settings.chats, settings.text_tokens)
        own, sums = judged(texts, (read_prompt(exact, text) for text in texts), rounded)
    found = figures(sums, own, np.ones(len(texts), bool))
    kept = asdict(settings) | {"model": settings.model.rpartition("/")[2], "resamples": RESAMPLES}
    return {"benchmark": "activations", "settings": kept, "figures": found}


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures."""
    settings = report["settings"]
    title = f"{settings['model']}: {settings['activations']} activations beside float32 ones, {settings['chats']} chats"
    row = report["figures"]
    columns = ("positions", "KL, nats", "same token", "loss, nats", "perplexity")
    print_table(console, columns, [(str(row["positions"]), *figures_in_words(row), f"{row['perplexity']:.4f}")], title)


main = main_of("activations", __doc__, Settings, measure, show, width=140)


if __name__ == "__main__":
    sys.exit(main())

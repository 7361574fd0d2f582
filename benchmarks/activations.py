"""What activations of 8 bits cost a GGUF file's model: KL divergence, agreement and perplexity beside float32 ones.

The texts are the model's own greedy answers in chats. Each goes in as a prompt, all positions at once: a row has the
same bits as in an answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.judged_texts import RESAMPLES, chat_texts, compared, figures, figures_in_words, read_prompt
from benchmarks.report import environment, tell
from d3engine import Engine


@dataclass(frozen=True)
class Settings:
    """Which GGUF file, how many of its own answers in chats, and how many tokens of each at most."""

    model: str
    chats: int = 64
    text_tokens: int = 64
    threads: int = 2


def measure(settings: Settings) -> dict[str, Any]:
    """Both kinds of activations on the answers that float32 ones give."""
    options: dict[str, Any] = {
        "num_threads": settings.threads,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
    }
    with (
        Engine(settings.model, activations="float32", **options) as exact,
        Engine(settings.model, activations="int8", **options) as rounded,
    ):
        texts = chat_texts(exact, settings.chats, settings.text_tokens)
        sums, references = [], []
        for text in tqdm(texts, unit="text"):
            reference = read_prompt(exact, text)
            sums.append(compared(text, read_prompt(rounded, text), reference))
            references.append(compared(text, reference, reference))
    found = figures(np.array(sums), np.array(references), np.ones(len(texts), bool))
    kept = asdict(settings) | {"model": settings.model.rpartition("/")[2], "resamples": RESAMPLES}
    return {"benchmark": "activations", "settings": kept, "figures": found}


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures."""
    settings = report["settings"]
    title = f"{settings['model']}: activations of 8 bits beside float32 ones, {settings['chats']} chats"
    table = Table(title=title, title_justify="left")
    for column in ("positions", "KL, nats", "same token", "loss, nats", "perplexity"):
        table.add_column(column, justify="right")
    row = report["figures"]
    table.add_row(str(row["positions"]), *figures_in_words(row), f"{row['perplexity']:.4f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.activations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="a GGUF file with quantized matrices")
    parser.add_argument("--chats", type=int, default=Settings.chats, help="the model's own answers")
    parser.add_argument("--text-tokens", type=int, default=Settings.text_tokens, help="judged of each at most")
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--json", metavar="FILE", help="also write all figures to this file")
    options = vars(parser.parse_args(arguments))
    file = options.pop("json")
    report = measure(Settings(**options))
    report["environment"] = environment("benchmarks.activations", arguments)
    tell(report, show, width=140, file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

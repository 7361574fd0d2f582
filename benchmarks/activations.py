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
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from benchmarks.judged_texts import RESAMPLES, Text, chat_texts, compared, figures, figures_in_words
from benchmarks.report import environment, tell
from d3engine import Engine, SamplingParams
from d3engine.scheduling.plan import Plan, Sampled


@dataclass(frozen=True)
class Settings:
    """Which GGUF file, how many of its own answers in chats, and how many tokens of each at most."""

    model: str
    chats: int = 64
    text_tokens: int = 64
    threads: int = 2


class PromptReader:
    """Stands for the engine's sampler, which it asks: keeps the log-probabilities of the prompt's tokens."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual
        self.rows: list[Tensor] = []

    def __call__(self, logits: Tensor, plan: Plan) -> Sampled:
        self.rows.append(logits[len(plan.sample_rows) :].log_softmax(dim=-1))
        sampled: Sampled = self._usual(logits, plan)
        return sampled


def read(engine: Engine, text: Text) -> Tensor:
    """Log-probabilities [answer's tokens, V] of a text."""
    usual = engine.sampler
    reader = PromptReader(usual)
    engine.sampler = reader  # type: ignore[assignment]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    engine.generate([{"prompt_token_ids": text.prompt + text.answer}], params, use_tqdm=False)
    engine.sampler = usual
    return torch.cat(reader.rows)[-len(text.answer) :]


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
            reference = read(exact, text)
            sums.append(compared(text, read(rounded, text), reference))
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

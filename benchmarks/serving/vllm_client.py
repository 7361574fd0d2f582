"""A second client, which is not ours: `vllm bench serve`, run as a command against the same servers."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = {
    "tokens": "total_output_tokens",
    "tokens_per_second": "output_throughput",
    "first_token_p50": "median_ttft_ms",
    "first_token_p99": "p99_ttft_ms",
    "between_tokens_p50": "median_itl_ms",
    "between_tokens_p99": "p99_itl_ms",
}
"""Our names for what it finds; its times are in milliseconds."""


@dataclass(frozen=True)
class VllmClient:
    """The command `vllm` of an environment that has it, and the directory whose tokenizer makes its prompts."""

    command: str
    tokenizer: Path

    def streams(self, url: str, model: str, count: int, requests: int, tokens: int) -> dict[str, float]:
        """Random prompts of 32 tokens on a given number of streams, `requests` in all; seconds where ours are seconds.

        `unanswered` is how many of them failed: a connection that a server closes just as the next request comes by it
        is enough, since this client keeps its connections and asks once.
        """
        with tempfile.TemporaryDirectory() as folder:
            given = {
                "backend": "openai",
                "base-url": url,
                "model": model,
                "tokenizer": self.tokenizer,
                "dataset-name": "random",
                "random-input-len": 32,
                "random-output-len": tokens,
                "max-concurrency": count,
                "num-prompts": requests,
                "percentile-metrics": "ttft,itl",
                "metric-percentiles": "99",
                "temperature": 0,
                "result-dir": folder,
                "result-filename": "found.json",
            }
            options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
            flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
            done = subprocess.run(
                [self.command, "bench", "serve", *options, *flags], capture_output=True, text=True, check=False
            )
            file = Path(folder) / "found.json"
            if done.returncode or not file.exists():
                raise SystemExit(f"vllm bench serve has failed: {done.stderr[-2000:]}")
            found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        figures = {name: found[key] * (1e-3 if key.endswith("_ms") else 1) for name, key in FIGURES.items()}
        return {**figures, "unanswered": float(requests - found["completed"])}

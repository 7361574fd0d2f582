"""What a LoRA adapter costs a decode step: answers of one engine with an adapter and without, in turns.

A step's time does not depend on an adapter's values, so these are random, in a directory as PEFT writes it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tqdm import tqdm

from benchmarks.report import Parser, positive, spread, summary, tell
from d3engine.engine.engine import Engine
from d3engine.model.config import ModelConfig
from d3engine.request.params import SamplingParams

KINDS: dict[str, str | None] = {"none": None, "adapter": "random"}
PROMPT = [1, 2, 3, 4]


@dataclass(frozen=True)
class Settings:
    """Which model, and how many answers at once; `rounds` turns of each kind, each of `steps` tokens an answer."""

    model: str = "smollm2"
    rank: int = 16
    batches: tuple[int, ...] = (1, 8)
    steps: int = 64
    rounds: int = 9
    threads: int | None = None


def write_random_adapter(
    directory: Path, config: ModelConfig, rank: int, *, seed: int = 0, size: float = 0.02, **changes: Any
) -> None:
    """An adapter for every matrix of every layer, with normal values of deviation `size`, as PEFT saves one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "self_attn.q_proj": (config.q_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(config.num_layers):
        for name, (rows, columns) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.empty(rank, columns).normal_(0, size, generator=generator)
            up = torch.empty(rows, rank).normal_(0, size, generator=generator)
            tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    fields |= {"target_modules": [name.rpartition(".")[2] for name in shapes]} | changes
    (directory / "adapter_config.json").write_text(json.dumps(fields, indent=2))


def measure(settings: Settings, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Seconds of a step with an adapter and without, and their ratio within a round, by batch."""
    options: dict[str, Any] = {"max_lora_rank": settings.rank, "num_threads": settings.threads}
    params = SamplingParams(temperature=0, max_tokens=settings.steps, ignore_eos=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder, Engine(settings.model, skip_tokenizer_init=True, **options) as engine:
        write_random_adapter(Path(folder), engine.config, settings.rank)
        engine.load_lora_adapter("random", folder)
        executor, nbytes = engine.stats().executor, engine.adapters.nbytes

        def seconds(kind: str, batch: int) -> float:
            began = clock()
            engine.generate([PROMPT] * batch, params, use_tqdm=False, lora_request=KINDS[kind])
            return (clock() - began) / settings.steps

        for batch in settings.batches:
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for kind in KINDS:
                seconds(kind, batch)
            for turn in tqdm(range(settings.rounds), desc=f"batch {batch}", leave=False):
                for kind in list(KINDS)[:: 1 if turn % 2 else -1]:
                    found[kind].append(seconds(kind, batch))
            ratios = [own / none for own, none in zip(found["adapter"], found["none"], strict=True)]
            steps = {kind: summary(each) for kind, each in found.items()}
            rows.append({"batch": batch, "steps": steps, "ratio": summary(ratios)})
    return {"executor": executor, "adapter_bytes": nbytes, "rows": rows}


def show(report: dict[str, Any], console: Console) -> None:
    """A row for each batch; ranges are of all rounds."""
    table = Table(title=f"a decode step, ms: median (least-most); {report['executor']}")
    for header in ("batch", *KINDS, "adapter / none"):
        table.add_column(header)
    for row in report["rows"]:
        steps = (spread(row["steps"][kind], 1000) for kind in KINDS)
        table.add_row(str(row["batch"]), *steps, spread(row["ratio"]))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("lora", __doc__, arguments)
    parser.add_argument("--model", default=Settings.model, help="a directory, a GGUF file, or a model known by name")
    parser.add_argument("--rank", type=positive, default=Settings.rank, help="of the adapter, at every matrix")
    parser.add_argument("--batches", type=positive, nargs="+", default=Settings.batches, help="answers at once")
    parser.add_argument("--steps", type=positive, default=Settings.steps, help="tokens of an answer")
    parser.add_argument("--rounds", type=positive, default=Settings.rounds, help="turns of each kind")
    parser.add_argument("--threads", type=positive, help="of the native library")
    given = vars(parser.given())
    file = given.pop("json")
    settings = Settings(**given)
    report = {
        "environment": parser.environment(),
        "settings": asdict(settings) | {"model": Path(settings.model).name},
    }
    tell(report | measure(settings), show, width=100, file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

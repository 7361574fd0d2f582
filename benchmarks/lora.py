"""What a LoRA adapter costs a decode step: answers of one engine with an adapter and without, in turns.

A step's time does not depend on an adapter's values, so these are random, in a directory as PEFT writes it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.report import in_turns, main_of, option, print_table, spread
from d3engine.engine.engine import Engine
from d3engine.model.config import ModelConfig
from d3engine.request.params import SamplingParams

KINDS: dict[str, str | None] = {"none": None, "adapter": "random"}
PROMPT = [1, 2, 3, 4]


@dataclass(frozen=True)
class Settings:
    """Which model, and how many answers at once; `rounds` turns of each kind, each of `steps` tokens an answer."""

    model: str = option("smollm2", "a directory, a GGUF file, or a model known by name")
    rank: int = option(16, "of the adapter, at every matrix")
    batches: tuple[int, ...] = option((1, 8), "answers at once")
    steps: int = option(64, "tokens of an answer")
    rounds: int = option(9, "turns of each kind")
    threads: int | None = option(None, "of the native library")


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


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of a step with an adapter and without, and their ratio within a round, by batch."""
    options: dict[str, Any] = {"max_lora_rank": settings.rank, "num_threads": settings.threads}
    params = SamplingParams(temperature=0, max_tokens=settings.steps, ignore_eos=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder, Engine(settings.model, skip_tokenizer_init=True, **options) as engine:
        write_random_adapter(Path(folder), engine.config, settings.rank)
        engine.load_lora_adapter("random", folder)
        executor, nbytes = engine.stats().executor, engine.adapters.nbytes

        def seconds(kind: str, batch: int) -> float:
            began = time.perf_counter()
            engine.generate([PROMPT] * batch, params, use_tqdm=False, lora_request=KINDS[kind])
            return (time.perf_counter() - began) / settings.steps

        for batch in settings.batches:
            turns = {kind: partial(seconds, kind, batch) for kind in KINDS}
            steps, ratio = in_turns(turns, settings.rounds, f"batch {batch}")
            rows.append({"batch": batch, "steps": steps, "ratio": ratio})
    about = asdict(settings) | {"model": Path(settings.model).name}
    return {"settings": about, "executor": executor, "adapter_bytes": nbytes, "rows": rows}


def show(report: dict[str, Any], console: Console) -> None:
    """A row for each batch; ranges are of all rounds."""
    columns = ("batch", *KINDS, "adapter / none")
    rows = [
        (str(row["batch"]), *(spread(row["steps"][kind], 1000) for kind in KINDS), spread(row["ratio"]))
        for row in report["rows"]
    ]
    print_table(console, columns, rows, f"a decode step, ms: median (least-most); {report['executor']}", left=columns)


main = main_of("lora", __doc__, Settings, measure, show, width=100)


if __name__ == "__main__":
    sys.exit(main())

"""What may stand for a window of layers: blocks trained alike, and policies, against full depth on own answers.

Generated tokens leave a window out but for one layer, which is trained whole, by maps of a low rank, or with a map of
its states in the place of its attention (such a block is judged here alone: no engine runs it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import main_of, option, print_table
from d3engine.cli.bridge_texts import policy_of
from d3engine.engine.model_directory import model_directory
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.weights import LayerWeights, load_weights
from d3engine.research.bridges.judging import skipping
from d3engine.research.bridges.passage import linear, normed_rows
from d3engine.research.distillation.corpus import in_turns, read_parts
from d3engine.research.distillation.judging import Agreement, Judgeable, judge, judgeable_of
from d3engine.research.distillation.passes import AnswerPass, Entries
from d3engine.research.distillation.training import (
    Distillation,
    Shape,
    TrainingOptions,
    best_kept,
    window_shape,
)

WHOLE, RANK, WITHOUT_ATTENTION = "a whole layer", "maps of a low rank", "a map and an MLP"
BLOCKS = (WHOLE, RANK, WITHOUT_ATTENTION)


@dataclass(frozen=True)
class Settings:
    """Which model, window and answers, how long each block is trained, and which policies are judged beside them."""

    model: str = option(help="a model directory or a GGUF file")
    answers: str = option(help="a file of d3engine depth answers")
    first: int = option(4, "the first layer of the window", type=int)
    stop: int = option(11, "the layer behind it")
    rank: int = option(64, "of maps")
    hidden_steps: int = option(300, "by the state behind the window", type=int)
    steps: int = option(100, "by the KL divergence from full depth", type=int)
    held_out: int = option(32, "answers that are judged")
    answer_tokens: int = option(160, "of each answer at most")
    depth: tuple[str, ...] = option((), "policies beside them", nargs="*")
    threads: int = option(2)


class WithoutAttention(AnswerPass):
    """A pass whose student maps states where a layer attends to others; full depth is as ever."""

    def attention(
        self, number: int, layer: LayerWeights, hidden: Tensor, rotations: Tensor, before: Entries | None
    ) -> tuple[Tensor, Entries]:
        """Rows of the student's layer, its output matrix taken for the map."""
        if layer is self.weights.layers[number]:
            return super().attention(number, layer, hidden, rotations, before)
        assert before is not None
        normed = normed_rows(hidden, layer.attention_norm, self.config.rms_norm_eps)
        return hidden + linear(normed, layer.output, None), before


def shape_of(block: str, run: AnswerPass, settings: Settings, kept: int) -> Shape:
    """A block before it is trained: the layer `kept`, its attention's map from zero on where it has one."""
    shape = window_shape(run, settings.first, settings.stop, [kept])
    if block == WITHOUT_ATTENTION:
        own = shape.start[kept]
        names = ("attention_norm", "mlp_norm", "gate_up", "down")
        shape = replace(
            shape, start={kept: {name: own[name] for name in names} | {"output": torch.zeros_like(own["output"])}}
        )
    return shape


def measure(settings: Settings) -> dict[str, Any]:
    """Train each block on the same answers in the same order, and judge all, and the policies, on those held out."""
    torch.set_num_threads(settings.threads)
    directory = model_directory(settings.model)
    config, name = ModelConfig.from_directory(directory), fingerprint(directory)
    weights = load_weights(directory, config, dtype=torch.bfloat16, device="cpu")
    own, held_out = read_parts(Path(settings.answers), name)
    judged = in_turns(held_out)[: settings.held_out]
    run, skipped = AnswerPass(config, weights), skipping(range(settings.first, settings.stop), config.num_layers)
    kept = best_kept(run, settings.first, settings.stop, own[:4], settings.answer_tokens)
    rows = []

    def add(named: str, found: Agreement, saved: float, **others: Any) -> None:
        rows.append({"runs": named, "layers_saved": saved, **found.as_dict()["all"], **others})

    policies = [Judgeable("the window skipped", skipped)]
    policies += [judgeable_of(run, directory, words, policy_of(words), name) for words in settings.depth]
    with tqdm(total=len(judged), desc="policies", unit="text") as bar:
        agreed = judge(run, judged, policies, settings.answer_tokens, bar.update)
    for policy, found in zip(policies, agreed, strict=True):
        add(policy.name, found, policy.saved(config, settings.answer_tokens))
    options = TrainingOptions(settings.hidden_steps, settings.steps, most_tokens=settings.answer_tokens)
    for block in BLOCKS:
        its_run = WithoutAttention(config, weights) if block == WITHOUT_ATTENTION else run
        rank = settings.rank if block == RANK else None
        training = Distillation(its_run, shape_of(block, run, settings, kept), replace(options, rank=rank))
        with tqdm(total=options.all_steps, desc=block, unit="step") as bar:
            training.train(own, judged[:8], None, "", _advance(bar))
        (found,) = judge(its_run, judged, [training.judgeable(block)], settings.answer_tokens)
        saved = training.judgeable(block).saved(config, settings.answer_tokens)
        if block == WITHOUT_ATTENTION:
            qkv = weights.layers[kept].qkv
            saved += qkv.shape[0] * qkv.shape[1] / config.layer_parameters
        curve = training.curve
        add(block, found, saved, trained=training.num_trained, seconds=round(curve.seconds), curve=curve.points)
    return {"benchmark": "blocks", "settings": asdict(settings), "kept": kept, "texts": len(own), "rows": rows}


def _advance(bar: tqdm[Any]) -> Callable[[int, str], None]:
    def advance(steps: int, words: str) -> None:
        bar.set_postfix_str(words, refresh=False)
        bar.update(steps)

    return advance


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each block and policy."""
    settings = report["settings"]
    title = f"{settings['model']}, layers {settings['first']} to {settings['stop'] - 1}, {report['texts']} answers"
    rows = [
        (
            row["runs"],
            f"{row['layers_saved']:.2f}",
            f"{row['kl']:.3f} ± {row['kl_95']:.3f}",
            f"{row['agreement']:.1%} ± {row['agreement_95']:.1%}",
            f"{row.get('trained', 0) / 1e6:.1f}",
        )
        for row in report["rows"]
    ]
    columns = ("generated tokens run", "layers saved", "KL, nats", "same token", "trained, millions")
    print_table(console, columns, rows, title, left=columns[:1])


main = main_of("blocks", __doc__, Settings, measure, show, width=110)

if __name__ == "__main__":
    sys.exit(main())

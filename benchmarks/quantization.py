"""What quantized weights cost a model in perplexity and exact match of held-out word problems.

Every scheme meets the same problems with float32 activations. The perplexity is of the written-out solutions: a sampler
takes their next token, so each has the depth it would have in an answer. Intervals are of resampled problems.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from benchmarks.judged_texts import RESAMPLES, Floats, Text, follow
from benchmarks.report import Parser, option, settings_of
from d3engine import Engine, FullDepth, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.depth.policy import policy_from_directory
from d3engine.engine.model_directory import model_directory
from d3engine.kernels.matrices import Weight
from d3engine.kernels.quantized import INT4_DIVISORS, quantize_int4
from d3engine.model.config import ModelConfig
from d3engine.model.quantization_config import QUANTIZATION_SCHEMES
from d3engine.model.weights import LlamaWeights, load_weights, quantize_weights, with_matrices
from d3engine.research.evaluation.accuracy import Interval, take_problems, wilson_interval
from d3engine.research.evaluation.word_problems import Problem, Split, extract_answer, format_completion, format_prompt
from d3engine.text.prompts import Prompt

FLOAT = "float32"

_FINE = tuple(sign * step / 4 for step in range(20, 41) for sign in (1, -1))
INT4_RULES: dict[str, tuple[float, ...]] = {
    "absmax / 7": (7.0,),
    "extreme / -8": (-8.0,),
    "the better of the two": (7.0, -8.0),
    f"the best of {len(INT4_DIVISORS)} (in use)": INT4_DIVISORS,
    f"the best of {len(_FINE)}": _FINE,
}
"""Ways to choose a group's scale, as divisors of its value of largest magnitude; `--rules` compares them."""


@dataclass(frozen=True)
class Settings:
    """Which model, which problems, and how many."""

    model: str = option("demo", "a directory with float weights, or demo")
    problems: int = option(500, "how many")
    split: Split = option("test", "which", choices=("test", "validation"))
    seed: int = option(0, "of the problems", type=int)
    threads: int = option(1, "torch's")
    max_tokens: int = option(128, "of an answer")


@dataclass(frozen=True)
class Answers:
    """One scheme at one depth: for each problem the answer's tokens, whether it is right, and its solution's loss."""

    token_ids: list[list[int]]
    right: list[bool]
    losses: Floats  # [problems] nats of the whole solution
    lengths: Floats  # [problems] tokens of the solution


def answer(
    engine: Engine,
    given: Sequence[Problem],
    depth: DepthPolicy,
    max_tokens: int,
    watch: Callable[[], object] = lambda: None,
) -> Answers:
    """Answer the problems greedily, then follow their solutions; `watch` is called after each of the two."""
    assert engine.tokenizer is not None
    prompts: list[Prompt] = [format_prompt(problem.question) for problem in given]
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, depth=depth)
    outputs = [output.outputs[0] for output in engine.generate(prompts, greedy, use_tqdm=False)]
    watch()
    solutions, losses = [solution_of(engine, problem) for problem in given], np.zeros(len(given))

    def add(place: int, token: int, logits: Tensor) -> None:
        losses[place] -= float(logits.double().log_softmax(dim=-1)[token])

    follow(engine, solutions, depth, add)
    watch()
    return Answers(
        token_ids=[list(output.token_ids) for output in outputs],
        right=[extract_answer(o.text) == problem.answer for o, problem in zip(outputs, given, strict=True)],
        losses=losses,
        lengths=np.array([float(len(solution.answer)) for solution in solutions]),
    )


def solution_of(engine: Engine, problem: Problem) -> Text:
    """A problem with the tokens of its written-out solution, and the one that ends it."""
    assert engine.tokenizer is not None
    prompt = format_prompt(problem.question)
    before = engine.tokenizer.encode(prompt)
    both = engine.tokenizer.encode(prompt + format_completion(problem))
    assert both[: len(before)] == before, "the solution's first token has merged with the prompt's last"
    return Text("problems", before, [*both[len(before) :], engine.config.eos_token_ids[0]])


# -- figures ---------------------------------------------------------------------------------------------------


def perplexity(answers: Answers) -> dict[str, float]:
    """e to the loss per token, and its 95 % interval over resampled problems."""
    samples = _resampled(answers.losses) / _resampled(answers.lengths)
    return _with_interval(answers.losses.sum() / answers.lengths.sum(), samples)


def perplexity_ratio(answers: Answers, reference: Answers) -> dict[str, float]:
    """The perplexity over that of `reference`, the same problems drawn for both."""
    differences = answers.losses - reference.losses
    samples = _resampled(differences) / _resampled(answers.lengths)
    return _with_interval(differences.sum() / answers.lengths.sum(), samples)


def _resampled(values: Floats) -> Floats:
    """Sums over problems drawn with replacement; the same draws for arrays of one length."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    sums: Floats = values[drawn].sum(axis=1)
    return sums


def _with_interval(log: float, samples: Floats) -> dict[str, float]:
    low, high = np.quantile(samples, (0.025, 0.975))
    return {"value": math.exp(log), "low": math.exp(low), "high": math.exp(high)}


def _share(successes: int, trials: int) -> dict[str, float]:
    interval: Interval = wilson_interval(successes, trials)
    return {"value": successes / trials, "low": interval.low, "high": interval.high}


def relative_error(weights: LlamaWeights, reference: LlamaWeights) -> float:
    """||quantized - float|| / ||float|| over all matrices of the layers."""
    error = total = 0.0
    for ours, theirs in zip(weights.layers, reference.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            matrix, original = getattr(ours, name), getattr(theirs, name)
            matrix = matrix if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)
            error += float((matrix - original).double().square().sum())
            total += float(original.double().square().sum())
    return math.sqrt(error / total)


def measure(variants: dict[str, Callable[[LlamaWeights], LlamaWeights]], settings: Settings) -> dict[str, Any]:
    """Float weights, and each variant of them, at full depth and under the model's own depth."""
    torch.set_num_threads(settings.threads)
    directory = model_directory(settings.model)
    config = ModelConfig.from_directory(directory)
    weights = load_weights(directory, config, dtype=torch.float32, device="cpu", show_progress=False)
    given = take_problems(settings.split, settings.seed, settings.problems)
    policies = {"full depth": FullDepth(), "d3": policy_from_directory(directory)}
    rows: list[dict[str, Any]] = []
    reference: dict[str, Answers] = {}
    with tqdm(total=2 * len(policies) * (1 + len(variants)), unit="pass", disable=None) as bar:
        for name, change in {FLOAT: lambda original: original, **variants}.items():
            changed = change(weights)
            row = {
                "weights": name,
                "weight_bytes": changed.nbytes,
                "relative_error": relative_error(changed, weights),
                "depths": {},
            }
            # Eager, so that logits come to the sampler that stands in for the engine's.
            with Engine(directory, weights=changed, device="cpu", dtype="float32", enforce_eager=True) as engine:
                for depth, policy in policies.items():
                    bar.set_description(f"{name}, {depth}")
                    found = answer(engine, given, policy, settings.max_tokens, bar.update)
                    row["depths"][depth] = _figures(found, reference.setdefault(depth, found))
            rows.append(row)
    return {
        "benchmark": "quantization",
        "settings": asdict(settings) | {"model": Path(settings.model).name, "resamples": RESAMPLES},
        "depths": {name: policy.describe() for name, policy in policies.items()},
        "rows": rows,
    }


def _figures(found: Answers, reference: Answers) -> dict[str, Any]:
    count = len(found.right)
    same = sum(a == b for a, b in zip(found.token_ids, reference.token_ids, strict=True))
    return {
        "perplexity": perplexity(found),
        "perplexity_over_float": perplexity_ratio(found, reference),
        "exact_match": _share(sum(found.right), count),
        "identical_answers": _share(same, count),
    }


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print one row for each kind of weights and depth."""
    settings = report["settings"]
    title = f"{settings['problems']} problems, {settings['split']} split, seed {settings['seed']}; float32 activations"
    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("weights", "depth", "perplexity", "over float32", "exact match", "identical"):
        table.add_column(column)
    for row in report["rows"]:
        about = f"{row['weights']}\n{row['weight_bytes']:,} bytes\nerror {row['relative_error']:.4f}"
        for depth, figures in row["depths"].items():
            table.add_row(
                about,
                depth,
                _in_words(figures["perplexity"], "{:.5f}"),
                _in_words(figures["perplexity_over_float"], "{:.5f}"),
                _in_words(figures["exact_match"], "{:.1%}"),
                _in_words(figures["identical_answers"], "{:.1%}"),
            )
            about = ""
    console.print(table)


def _in_words(figure: dict[str, float], form: str) -> str:
    value, low, high = (form.format(figure[name]) for name in ("value", "low", "high"))
    return f"{value}\n{low}-{high}"


def _scheme(name: str) -> Callable[[LlamaWeights], LlamaWeights]:
    return lambda weights: quantize_weights(weights, name)


def _rule(divisors: tuple[float, ...]) -> Callable[[LlamaWeights], LlamaWeights]:
    def change(matrix: Weight) -> Weight:
        return quantize_int4(matrix, divisors)

    return lambda weights: with_matrices(weights, change)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = Parser("quantization", __doc__, arguments, Settings)
    parser.add_argument("--rules", action="store_true", help="compare ways to choose the scales of int4 instead")
    options = parser.given()
    if options.rules:
        variants = {name: _rule(divisors) for name, divisors in INT4_RULES.items()}
    else:
        variants = {name: _scheme(name) for name in QUANTIZATION_SCHEMES}
    parser.publish(measure(variants, settings_of(Settings, options)), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())

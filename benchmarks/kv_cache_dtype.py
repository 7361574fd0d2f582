"""What 8-bit cache entries cost a model: KL divergence, agreement and perplexity of texts, beside the cache it is for.

Every form of the cache meets the same texts, worked answers of GSM8K and the model's own answers in chats, in an engine
that generates as always, but a sampler of ours takes the text's next token: so each has the depth it would have in an
answer, and all that differs is what attention reads. `--rules` compares ways to choose the scales. Intervals are of
resampled texts, for positions of one text are not independent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import environment, tell
from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.evaluation.gsm8k import load_gsm8k
from d3engine.kernels.kv_pool import FP8, LARGEST
from d3engine.plan import Plan, Sampled
from d3engine.text.prompts import Prompt

CHATS = Path(__file__).parent / "chat_prompts.txt"
RESAMPLES = 2000
FLOATS = "float32"
FIGURES = ("kl", "loss", "same")

Floats = npt.NDArray[np.float64]
Rule: TypeAlias = Callable[[int, Tensor], Tensor]
"""(which of all layers' keys and values, heads [T, M, D] that were written) -> what is to be read in their place."""


@dataclass(frozen=True)
class Settings:
    """Which model, how many texts of which kind, and how many tokens of each are judged at most.

    Chats are the first prompts of `chat_prompts.txt`, GSM8K's are of the test split, without examples. Constant scales
    are found on as many other texts.
    """

    data: str
    model: str = "smollm2"
    gsm8k: int = 32
    chats: int = 32
    text_tokens: int = 96
    alpha: float = 0.9
    start: float = 0.9
    batch: int = 16
    threads: int = 1
    calibration_texts: int = 4


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt, and of the answer that is judged."""

    kind: str
    prompt: list[int]
    answer: list[int]


class TextSampler:
    """Stands for the engine's sampler: takes the texts' tokens, and keeps the log-probabilities of all tokens."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts = texts
        self.rows: list[list[Tensor]] = [[] for _ in texts]

    def __call__(self, logits: Tensor, plan: Plan) -> Sampled:
        tokens = []
        for row, chunk in zip(logits.log_softmax(dim=-1), plan.sampled.tolist(), strict=False):
            sequence = plan.sequences[chunk]
            place = int(sequence.request_id)
            self.rows[place].append(row)
            tokens.append([self._texts[place].answer[sequence.step]])
        return Sampled(tokens)


class Rounded:
    """Operations like `kernels`, but entries are changed by `rule` as soon as they are written."""

    def __init__(self, kernels: Any, rule: Rule) -> None:
        self._kernels, self._rule = kernels, rule
        self._layers: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def qkv(self, hidden: Tensor, norm: Tensor, *others: Any, **options: Any) -> Tensor:
        queries: Tensor = self._kernels.qkv(hidden, norm, *others, **options)
        _, _, _, _, pool, entries, _ = others
        flat = pool.view(-1, *pool.shape[3:])
        layer = self._layers.setdefault(norm.data_ptr(), len(self._layers))
        for half, places in enumerate(entries.unbind(1)):
            flat[places] = self._rule(2 * layer + half, flat[places])
        return queries


# -- ways to make entries small --------------------------------------------------------------------------------


def rounded(heads: Tensor, scales: Tensor | float) -> Tensor:
    """What e4m3 keeps of `heads`, at `scales` that broadcast against it; what is too large becomes the largest."""
    return (heads / scales).clamp(-LARGEST, LARGEST).to(FP8).float() * scales


def by_entry(heads: Tensor) -> Tensor:
    """The scale of each head of each entry, [T, M, 1]."""
    return heads.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / LARGEST


@dataclass
class Largest:
    """Notes the largest magnitude of each head of each layer's keys and values, and changes nothing."""

    found: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, which: int, heads: Tensor) -> Tensor:
        largest = heads.abs().amax(dim=(0, 2)).unsqueeze(-1)
        self.found[which] = torch.maximum(largest, self.found.get(which, largest))
        return heads


def rules(largest: Largest) -> dict[str, Rule]:
    """By name; `largest` has looked at other texts."""
    return {
        "bfloat16": lambda which, heads: heads.bfloat16().float(),
        "scale 1": lambda which, heads: rounded(heads, 1.0),
        "a constant for each head": lambda which, heads: rounded(heads, largest.found[which] / LARGEST),
        "of each entry, a power of 2": lambda which, heads: rounded(heads, by_entry(heads).log2().ceil().exp2()),
        "of each entry": lambda which, heads: rounded(heads, by_entry(heads)),
    }


# -- texts -----------------------------------------------------------------------------------------------------


def gsm8k_texts(engine: Engine, settings: Settings, split: str, limit: int) -> list[Text]:
    """Questions with their worked answers."""
    found = load_gsm8k(Path(settings.data), split=split, shots=0, seed=0, limit=limit)  # type: ignore[arg-type]
    tokenizer = engine.get_tokenizer()
    texts = []
    for asked in found.tasks["gsm8k"]:
        prompt = tokenizer.encode(asked.prompt)
        both = tokenizer.encode(f"{asked.prompt} {asked.question.answer}")  # type: ignore[attr-defined]
        texts.append(Text("GSM8K", prompt, both[len(prompt) : len(prompt) + settings.text_tokens]))
    return texts


def chat_texts(engine: Engine, settings: Settings, limit: int) -> list[Text]:
    """Prompts with the model's own greedy answers at full depth."""
    lines = CHATS.read_text(encoding="utf-8").splitlines()[:limit]
    prompts: list[Prompt] = [engine.chat_prompt([{"role": "user", "content": line}]) for line in lines]
    params = SamplingParams(temperature=0, max_tokens=settings.text_tokens)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [Text("chats", list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in outputs]


# -- measuring -------------------------------------------------------------------------------------------------


def read(engine: Engine, texts: Sequence[Text], depth: DepthPolicy) -> list[Tensor]:
    """Log-probabilities [answer's tokens, V] of each text."""
    sampler = TextSampler(texts)
    engine.sampler = sampler  # type: ignore[assignment]
    for place, text in enumerate(texts):
        params = SamplingParams(temperature=0, max_tokens=len(text.answer), ignore_eos=True, depth=depth)
        engine.add_request(str(place), {"prompt_token_ids": text.prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return [torch.stack(rows) for rows in sampler.rows]


def compared(text: Text, found: Tensor, reference: Tensor) -> Floats:
    """Sums over a text's positions: KL divergence from `reference`, loss, same likeliest token; and their count."""
    kl = (reference.exp() * (reference - found)).sum()
    loss = -found[range(len(text.answer)), text.answer].sum()
    same = (found.argmax(-1) == reference.argmax(-1)).sum()
    return np.array([float(kl), float(loss), float(same), len(text.answer)])


def measure(settings: Settings, *, compare_rules: bool = False) -> dict[str, Any]:
    """Float32 entries, bfloat16's and 8-bit ones, or all `rules`, at full depth and under D3."""
    torch.set_num_threads(settings.threads)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**27}
    with Engine(settings.model, max_num_seqs=settings.batch, **options) as engine:
        texts = gsm8k_texts(engine, settings, "test", settings.gsm8k) + chat_texts(engine, settings, settings.chats)
        others = gsm8k_texts(engine, settings, "validation", settings.calibration_texts)
    options |= {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": settings.batch}
    with Engine(settings.model, **options) as floats, Engine(settings.model, kv_cache_dtype="fp8", **options) as fp8:
        forms = dict(_forms(floats, fp8, others, compare_rules))
        depths: dict[str, DepthPolicy] = {"full": FullDepth(), "D3": D3(settings.alpha, settings.start)}
        sums = {(form, depth): [] for form in (FLOATS, *forms) for depth in depths}
        batches = [texts[first : first + settings.batch] for first in range(0, len(texts), settings.batch)]
        with tqdm(total=len(batches) * len(depths) * (1 + len(forms)), unit="pass") as bar:
            for batch in batches:
                for depth, policy in depths.items():
                    _set_rule(floats, None)
                    reference = read(floats, batch, policy)
                    bar.update()
                    sums[FLOATS, depth] += list(map(compared, batch, reference, reference))
                    for form, begin in forms.items():
                        found = read(begin(), batch, policy)
                        bar.update()
                        sums[form, depth] += list(map(compared, batch, found, reference))
        bytes_a_token = {"float32": 4 * _values(floats), "bfloat16": 2 * _values(floats), "fp8": _bytes_a_token(fp8)}
    kinds = np.array([text.kind for text in texts])
    rows = [
        {
            "cache": form,
            "depth": depth,
            "texts": kind,
            **_figures(np.array(found), np.array(sums[FLOATS, depth]), which),
        }
        for (form, depth), found in sums.items()
        for kind, which in (("all", kinds != ""), *((kind, kinds == kind) for kind in dict.fromkeys(kinds)))
    ]
    return {
        "benchmark": "kv_cache_dtype",
        "settings": asdict(settings) | {"data": Path(settings.data).name, "resamples": RESAMPLES},
        "bytes_a_token": bytes_a_token,
        "rows": rows,
    }


def _forms(
    floats: Engine, fp8: Engine, others: Sequence[Text], compare_rules: bool
) -> Iterator[tuple[str, Callable[[], Engine]]]:
    """What makes an engine ready whose cache has the form of that name."""
    largest = Largest()
    if compare_rules:
        _set_rule(floats, largest)
        read(floats, others, FullDepth())
    for name, rule in rules(largest).items():
        if compare_rules or name == "bfloat16":
            yield name, lambda rule=rule: _set_rule(floats, rule)  # type: ignore[misc]
    if not compare_rules:
        yield "fp8", lambda: fp8


def _set_rule(engine: Engine, rule: Rule | None) -> Engine:
    """Let the entries of an engine that runs eagerly be changed by `rule` from now on."""
    model = engine.executor.model
    kernels = getattr(model.kernels, "_kernels", model.kernels)
    model.kernels = kernels if rule is None else Rounded(kernels, rule)
    return engine


def _values(engine: Engine) -> int:
    config = engine.config
    return 2 * config.num_layers * config.kv_size


def _bytes_a_token(engine: Engine) -> int:
    settings = engine.settings
    return settings.config.num_layers * settings.block_bytes // settings.block_size


def _figures(sums: Floats, reference: Floats, which: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Means over positions of the chosen texts, each with its 95 % interval; loss is beside float32's."""
    sums, reference = sums[which], reference[which]
    per_text = np.stack((sums[:, 0], sums[:, 1] - reference[:, 1], sums[:, 2]), axis=1)
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    samples = per_text[drawn].sum(axis=1) / sums[drawn, 3].sum(axis=1)[:, None]
    means, (low, high) = per_text.sum(axis=0) / sums[:, 3].sum(), np.quantile(samples, (0.025, 0.975), axis=0)
    found = {
        name: {"value": float(means[nth]), "low": float(low[nth]), "high": float(high[nth])}
        for nth, name in enumerate(FIGURES)
    }
    return {
        "positions": int(sums[:, 3].sum()),
        "perplexity": float(np.exp(sums[:, 1].sum() / sums[:, 3].sum())),
        **found,
    }


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print a row for each form of the cache, depth and kind of text."""
    settings = report["settings"]
    title = f"{settings['model']}: {settings['gsm8k']} of GSM8K, {settings['chats']} chats; float32 activations"
    table = Table(title=title, title_justify="left")
    for column in ("depth", "texts", "cache", "positions", "KL, nats", "same token", "loss, nats", "perplexity"):
        table.add_column(column, justify="right")
    for row in sorted(report["rows"], key=lambda row: (row["depth"], row["texts"])):
        about = row["depth"], row["texts"], row["cache"], str(row["positions"])
        kl, loss, same = (_in_words(row[name], "{:.2%}" if name == "same" else "{:+.5f}") for name in FIGURES)
        table.add_row(*about, kl, same, loss, f"{row['perplexity']:.4f}")
    console.print(table)
    console.print("bytes a token: " + ", ".join(f"{name} {count:,}" for name, count in report["bytes_a_token"].items()))


def _in_words(figure: dict[str, float], form: str) -> str:
    value, low, high = (form.format(figure[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_cache_dtype", description=__doc__.splitlines()[0])
    default = Settings(data="")
    parser.add_argument("--data", required=True, help="a folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    parser.add_argument("--model", default=default.model, help="a directory with float weights, or smollm2")
    parser.add_argument("--gsm8k", type=int, default=default.gsm8k, help="worked answers of GSM8K")
    parser.add_argument("--chats", type=int, default=default.chats, help="the model's own answers")
    parser.add_argument("--text-tokens", type=int, default=default.text_tokens, help="judged of each at most")
    parser.add_argument("--alpha", type=float, default=default.alpha, help="of D3")
    parser.add_argument("--start", type=float, default=default.start, help="of D3")
    parser.add_argument("--batch", type=int, default=default.batch, help="texts that are read at once")
    parser.add_argument("--threads", type=int, default=default.threads, help="torch's")
    parser.add_argument("--rules", action="store_true", help="compare ways to choose the scales instead")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to this file")
    options = vars(parser.parse_args(arguments))
    compare_rules, file = options.pop("rules"), options.pop("json")
    report = measure(Settings(**options), compare_rules=compare_rules)
    report["environment"] = environment("benchmarks.kv_cache_dtype", arguments)
    tell(report, show, width=170, file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Texts that forms of a model are judged by: what each form makes of the next token, beside the form it stands for.

Texts are worked answers of GSM8K, the model's own answers in chats, and pages of documentation; in an engine that
generates, a sampler takes the text's next token. Intervals are of resampled texts: positions of one depend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import interval, option
from d3engine import Engine, SamplingParams
from d3engine.depth import DepthPolicy
from d3engine.research.evaluation.gsm8k import load_gsm8k
from d3engine.scheduling.plan import Plan, Sampled
from d3engine.text.prompts import Prompt

CHATS = Path(__file__).parent / "chat_prompts.txt"
PAGES = Path(__file__).parents[1] / "docs"
PAGE_PROMPT = 32
"""Tokens of a page that are read and not judged."""
RESAMPLES = 2000
FIGURES = ("kl", "loss", "same")

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TextSettings:
    """Which model, how many texts of which kind, and how many tokens of each are judged at most.

    Chats are the first prompts of `chat_prompts.txt`, GSM8K's are of the test split, without examples.
    """

    data: str = option(help="a folder with gsm8k/train.jsonl and gsm8k/test.jsonl")
    model: str = option("smollm2", "a directory with float weights, or smollm2")
    gsm8k: int = option(32, "worked answers of GSM8K", type=int)
    chats: int = option(32, "the model's own answers", type=int)
    text_tokens: int = option(64, "judged of each at most")
    alpha: float = option(0.9, "of D3")
    start: float = option(0.9, "of D3")
    batch: int = option(32, "texts that are read at once")
    threads: int = option(1, "torch's")

    @property
    def kept(self) -> dict[str, Any]:
        """What a result says of them: of the data its name alone."""
        return asdict(self) | {"data": Path(self.data).name, "resamples": RESAMPLES}


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt, and of the answer that is judged."""

    kind: str
    prompt: list[int]
    answer: list[int]


class TextSampler:
    """Stands for the engine's sampler: takes the texts' tokens; `keep` gets a text's place, a token and its logits."""

    def __init__(self, texts: Sequence[Text], keep: Callable[[int, int, Tensor], None]) -> None:
        self._texts, self._keep = texts, keep

    def __call__(self, logits: Tensor, plan: Plan) -> Sampled:
        tokens = []
        for row, chunk in zip(logits, plan.sampled.tolist(), strict=False):
            sequence = plan.sequences[chunk]
            place = int(sequence.request_id)
            token = self._texts[place].answer[sequence.step]
            self._keep(place, token, row)
            tokens.append([token])
        return Sampled(tokens)


def gsm8k_texts(engine: Engine, data: Path, split: Literal["test", "validation"], limit: int, most: int) -> list[Text]:
    """Questions without examples, and up to `most` tokens of their worked answers."""
    found = load_gsm8k(data, split=split, shots=0, seed=0, limit=limit)
    tokenizer = engine.get_tokenizer()
    texts = []
    for asked in found.tasks["gsm8k"]:
        prompt = tokenizer.encode(asked.prompt)
        both = tokenizer.encode(f"{asked.prompt} {asked.question.answer}")  # type: ignore[attr-defined]
        texts.append(Text("GSM8K", prompt, both[len(prompt) : len(prompt) + most]))
    return texts


def chat_texts(engine: Engine, limit: int, most: int) -> list[Text]:
    """Prompts with up to `most` tokens of the model's own greedy answers at full depth."""
    lines = CHATS.read_text(encoding="utf-8").splitlines()[:limit]
    prompts: list[Prompt] = [engine.chat_prompt([{"role": "user", "content": line}]) for line in lines]
    params = SamplingParams(temperature=0, max_tokens=most)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [Text("chats", list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in outputs]


def follow(engine: Engine, texts: Sequence[Text], depth: DepthPolicy, keep: Callable[[int, int, Tensor], None]) -> None:
    """Let an engine generate the texts' answers; `keep` is that of `TextSampler`."""
    usual = engine.sampler
    engine.sampler = TextSampler(texts, keep)  # type: ignore[assignment]
    for place, text in enumerate(texts):
        params = SamplingParams(temperature=0, max_tokens=len(text.answer), ignore_eos=True, depth=depth)
        engine.add_request(str(place), {"prompt_token_ids": text.prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.sampler = usual


def read(engine: Engine, texts: Sequence[Text], depth: DepthPolicy) -> list[Tensor]:
    """Log-probabilities [answer's tokens, V] of each text."""
    rows: list[list[Tensor]] = [[] for _ in texts]
    follow(engine, texts, depth, lambda place, token, logits: rows[place].append(logits.log_softmax(dim=-1)))
    return [torch.stack(of_text) for of_text in rows]


def page_texts(engine: Engine, limit: int, most: int) -> list[Text]:
    """Pages of this repository's documentation: `PAGE_PROMPT` tokens of each, and the `most` tokens behind them."""
    tokenizer = engine.get_tokenizer()
    found = []
    for page in sorted(PAGES.rglob("*.md")):
        tokens = tokenizer.encode(page.read_text(encoding="utf-8"))[: PAGE_PROMPT + most]
        if len(tokens) == PAGE_PROMPT + most:
            found.append(Text("pages", tokens[:PAGE_PROMPT], tokens[PAGE_PROMPT:]))
    return found[:: max(1, len(found) // limit)][:limit]


class PromptReader:
    """Stands for the engine's sampler, which it asks: keeps the log-probabilities of the prompt's tokens."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual
        self.rows: list[Tensor] = []

    def __call__(self, logits: Tensor, plan: Plan) -> Sampled:
        self.rows.append(logits[len(plan.sample_rows) :].log_softmax(dim=-1))
        sampled: Sampled = self._usual(logits, plan)
        return sampled


def read_prompt(engine: Engine, text: Text) -> Tensor:
    """Log-probabilities [answer's tokens, V] of a text that goes in as one prompt, at full depth."""
    usual = engine.sampler
    reader = PromptReader(usual)
    engine.sampler = reader  # type: ignore[assignment]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    engine.generate([{"prompt_token_ids": text.prompt + text.answer}], params, use_tqdm=False)
    engine.sampler = usual
    return torch.cat(reader.rows)[-len(text.answer) :]


def compared(text: Text, found: Tensor, reference: Tensor) -> Floats:
    """Sums over a text's positions: KL divergence from `reference`, loss, same likeliest token; and their count."""
    kl = (reference.exp() * (reference - found)).sum()
    loss = -found[range(len(text.answer)), text.answer].sum()
    same = (found.argmax(-1) == reference.argmax(-1)).sum()
    return np.array([float(kl), float(loss), float(same), len(text.answer)])


def judged(texts: Sequence[Text], references: Iterable[Tensor], engine: Engine) -> tuple[Floats, Floats]:
    """Each text read as a prompt: the sums of its reference, of `read_prompt`, beside itself, and of `engine`'s."""
    own, sums = [], []
    for text, reference in tqdm(zip(texts, references, strict=True), total=len(texts), unit="text"):
        own.append(compared(text, reference, reference))
        sums.append(compared(text, read_prompt(engine, text), reference))
    return np.array(own), np.array(sums)


def figures(sums: Floats, reference: Floats, which: npt.NDArray[np.bool_]) -> dict[str, Any]:
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


def figures_in_words(row: dict[str, Any]) -> list[str]:
    """Divergence, agreement and loss with their intervals."""
    return [interval(row[name], form) for name, form in (("kl", "+.5f"), ("same", ".2%"), ("loss", "+.5f"))]

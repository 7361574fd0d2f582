"""How far two answers are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.engine.device import resolve_backend, resolve_device, resolve_dtype
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.engine.resolve import held_config, resolve_weight_dtype
from d3engine.errors import InvalidValueError, require
from d3engine.model.config import ModelConfig
from d3engine.model.weights import load_weights
from d3engine.request.params import SamplingParams
from d3engine.research.analysis.observer import Observer
from d3engine.research.evaluation.kept import Prompt
from d3engine.utils.files import UnreadableFileError, as_json, read_text


def same_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal token ids both begin."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


MAX_PROMPTS = 10_000


@dataclass(frozen=True)
class Answered:
    """A prompt and a greedy answer to it. `logprobs[i]` is the log-probability of token i, `depths[i]` its layers.

    `cut_off`: whether the limit of tokens ended the answer, and not the model.
    """

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    depths: list[int]
    text: str
    cut_off: bool

    @property
    def sequence(self) -> list[int]:
        """What the model has read when it yields the last token: the prompt and the answer but for that token."""
        return self.prompt_ids + self.token_ids[:-1]

    @property
    def answer_rows(self) -> slice:
        """The rows of `sequence` that yield the tokens of the answer."""
        return slice(len(self.prompt_ids) - 1, len(self.sequence))


def open_model(model: str, options: dict[str, Any]) -> tuple[Engine, Observer]:
    """An engine and an observer of the same weights; `options` are `Engine`'s. Full depth unless a request says so."""
    directory = model_directory(model)
    device = resolve_device(options.get("device", "auto"))
    config = held_config(ModelConfig.from_directory(directory), device)
    dtype = resolve_dtype(options.get("dtype", "auto"), config, device)
    given = options.get("weight_dtype", "auto")
    widens = resolve_backend(options.get("backend", "auto"), device) != "triton"
    weight_dtype = resolve_weight_dtype(given, dtype=dtype, device=device, kept=None, widens=widens)
    weights = load_weights(directory, config, dtype=dtype, weight_dtype=weight_dtype, device=device)
    return Engine(model, depth=FullDepth(), weights=weights, **options), Observer(config, weights)


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The prompts of a file, or the first of them.

    They are one per line, or in a `.json` file a list of texts, which may have several lines.
    """
    allowed = "a file of UTF-8 text with a prompt on each line, or a .json file with a list of texts"
    try:
        text = read_text(path)
        lines = [line for line in text.split("\n") if line.strip()]  # a prompt may have other line separators
        prompts = as_json(text, path) if path.suffix == ".json" else lines
    except UnreadableFileError as error:
        raise InvalidValueError("--prompts", str(path), f"{allowed} ({error})") from error
    is_list = isinstance(prompts, list) and all(isinstance(prompt, str) and prompt for prompt in prompts)
    require(is_list and len(prompts) > 0, "--prompts", str(path), allowed)
    return prompts[:limit]


def reference_answers(
    engine: Engine,
    observer: Observer,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    max_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """Given answers to the prompts, as if the model had generated them at full depth: their first `max_tokens` tokens.

    A prompt and its answer are tokenized apart. `cut_off`: whether the answer is longer. Raises `InvalidValueError`
    for an engine without a tokenizer, and for an answer without text.
    """
    tokenizer, num_layers = engine.tokenizer, engine.config.num_layers
    if tokenizer is None:
        raise InvalidValueError("model", "without a tokenizer", "one with a tokenizer, since answers are given as text")
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        require(len(ids) > 0, "answer", text, "a text of at least one token")
        kept = ids[:max_tokens]
        prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        logprobs = _logprobs(observer, prompt_ids, kept)
        shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids)
        depths, words = [num_layers] * len(kept), tokenizer.decode(kept)
        found.append(Answered(shown, prompt_ids, kept, logprobs, depths, words, len(ids) > max_tokens))
        progress()
    return found


def _logprobs(observer: Observer, prompt_ids: list[int], token_ids: list[int]) -> list[float]:
    """The log-probability of each of these tokens behind the prompt and those before it, at full depth."""
    for states in observer.layers(prompt_ids + token_ids[:-1], len(prompt_ids)):
        last = states.after
    rows = observer.logits(last[len(prompt_ids) - 1 :]).log_softmax(dim=-1)
    return [float(row[token]) for row, token in zip(rows, token_ids, strict=True)]


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    max_tokens: int,
    policy: DepthPolicy | None = None,
    *,
    stop: Sequence[str] = (),
    progress: bool = False,
) -> list[Answered]:
    """The model's greedy answers, in one batch, up to its end-of-sequence token or one of the texts in `stop`."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=0, stop=list(stop) or None, depth=policy or FullDepth()
    )
    found = []
    for prompt, output in zip(prompts, engine.generate(list(prompts), params, use_tqdm=progress), strict=True):
        best = output.outputs[0]
        assert best.logprobs is not None
        logprobs = [known[token].logprob for token, known in zip(best.token_ids, best.logprobs, strict=True)]
        cut_off = best.finish_reason == "length"
        ids, tokenizer = output.prompt_token_ids, engine.tokenizer
        shown = prompt if isinstance(prompt, str) else "" if tokenizer is None else tokenizer.decode(ids)
        found.append(Answered(shown, ids, best.token_ids, logprobs, best.depths, best.text, cut_off))
    return found

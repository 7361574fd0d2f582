"""The tokens that groups are fitted to: a user's text, or Python's documentation and what the model itself says."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from d3engine.depth.skips import FullDepth
from d3engine.engine.engine import Engine
from d3engine.errors import require
from d3engine.model.config import ModelConfig
from d3engine.request.params import SamplingParams
from d3engine.text.chat_template import load_chat_template
from d3engine.text.tokenizer import load_tokenizer
from d3engine.utils.progress import shows_bars

_SEQUENCES, _LENGTH = 16, 512
"""Of each kind of text: the most that is read of it, in tokens."""
_FEWEST_TOKENS = 1024
_TEMPERATURE = 0.8
_QUESTIONS = ("A", "b")
"""Two that share no token: what their prompts begin with alike stands before any question."""


def fitting_tokens(source: Path, text: str | None, *, show_progress: bool) -> Tensor:
    """Token ids int64 [S, L] of `text`; None: of Python's documentation, and of conversations of the model.

    Answers have activations that no documentation has: the first token of a chat template, and its ends of turns. A
    model without a template gets the documentation alone. Raises `InvalidValueError` for a text of few tokens.
    """
    length = min(_LENGTH, ModelConfig.from_directory(source).max_length)
    if text is not None:
        return _pieces(source, text, 2 * _SEQUENCES, length)
    from pydoc_data.topics import topics

    pages = _pieces(source, "\n\n".join(topics.values()), _SEQUENCES, length)
    if load_chat_template(source) is None:
        return pages
    return torch.cat([pages, _conversations(source, length, show_progress)])


def _pieces(source: Path, text: str, most: int, length: int) -> Tensor:
    """Pieces from all parts of a text."""
    tokens = load_tokenizer(source).encode(text[: 16 * most * length])
    require(len(tokens) >= _FEWEST_TOKENS, "text", f"{len(tokens)} tokens", f"at least {_FEWEST_TOKENS} tokens")
    count = min(most, len(tokens) // length)
    apart = len(tokens) // count
    return torch.tensor([tokens[nth * apart : nth * apart + length] for nth in range(count)])


def _conversations(source: Path, length: int, show_progress: bool) -> Tensor:
    """What the model makes of the chat template up to a question: a question, an answer and so on, sampled."""
    with Engine(source, max_model_len=length, max_num_seqs=_SEQUENCES, depth=FullDepth()) as engine:
        prompts = [engine.chat_prompt([{"role": "user", "content": question}]) for question in _QUESTIONS]
        alike = takewhile(
            lambda pair: pair[0] == pair[1], zip(*(one["prompt_token_ids"] for one in prompts), strict=False)
        )
        start = [token for token, _ in alike]
        most = length - len(start)
        params = [
            SamplingParams(temperature=_TEMPERATURE, max_tokens=most, ignore_eos=True, seed=seed, detokenize=False)
            for seed in range(_SEQUENCES)
        ]
        shows = show_progress and shows_bars()
        outputs = engine.generate([{"prompt_token_ids": start}] * _SEQUENCES, params, use_tqdm=shows)
    return torch.tensor([start + list(output.outputs[0].token_ids) for output in outputs])

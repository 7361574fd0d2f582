"""How well a document answers a query, by a model that judges in one word, as Qwen3-Reranker does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from d3engine.depth import FullDepth
from d3engine.errors import NOTHING, require
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind, SamplingParams

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's own."""
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
ANSWERS = ("yes", "no")
TEMPLATE_VARIABLES = {"enable_thinking": False}
"""The word comes at once, where a template has this switch."""


def judgement(query: str, document: str, instruction: str | None = None) -> list[dict[str, str]]:
    """The conversation whose answer is "yes" or "no", in the words that Qwen3-Reranker was trained on."""
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]


def answer_params(token_ids: Sequence[int], answer: str) -> SamplingParams:
    """What has a model say one of `ANSWERS`, of these token ids, and tell how likely that was.

    The log-probability is of the raw distribution, so that of the other answer takes a second request, for which
    the prompt is in the prefix cache.
    """
    require(len(token_ids) == 1, "model", NOTHING, f"one whose tokenizer has a single token for {answer!r}")
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        logprobs=0,
        allowed_token_ids=tuple(token_ids),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        depth=FullDepth(),
    )


def score_of(yes: RequestOutput, no: RequestOutput) -> float:
    """The probability of "yes" among the two."""
    return 1 / (1 + math.exp(min(_logprob(no) - _logprob(yes), 700)))


def _logprob(output: RequestOutput) -> float:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return answer.logprobs[0][answer.token_ids[0]].logprob

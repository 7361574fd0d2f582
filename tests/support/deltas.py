"""Deltas of one request, put together by the simplest means."""

from dataclasses import replace
from typing import Any

from d3engine import RequestOutput


def joined(deltas: list[RequestOutput]) -> RequestOutput:
    """The whole that deltas are the parts of."""
    last = deltas[-1]
    prompt_logprobs: Any = None if last.prompt_logprobs is None else []
    answers: dict[int, Any] = {}
    for delta in deltas:
        if prompt_logprobs is not None:
            prompt_logprobs += delta.prompt_logprobs or []
        for part in delta.outputs:
            known = answers.get(part.index)
            if known is None:
                answers[part.index] = part
                continue
            assert known.finish_reason is None, "an answer that has ended says so once"
            answers[part.index] = replace(
                part,
                text=known.text + part.text,
                token_ids=known.token_ids + part.token_ids,
                depths=known.depths + part.depths,
                logprobs=None if part.logprobs is None else known.logprobs + part.logprobs,
            )
    return replace(last, prompt_logprobs=prompt_logprobs, outputs=[answers[index] for index in sorted(answers)])

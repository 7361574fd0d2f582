"""Answers as llama.cpp's server writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from d3engine.request.outputs import Logprob, RequestMetrics, RequestOutput
from d3engine.server.errors import error_body
from d3engine.server.responses.context import RequestContext
from d3engine.server.responses.extras import LOWEST, UsageCounter
from d3engine.server.responses.running import whole_output
from d3engine.server.responses.streams import StreamForm
from d3engine.server.schemas.llama_cpp import LlamaLogprob, LlamaTimings, LlamaTokenLogprob
from d3engine.server.schemas.requests import LLAMA_CPP, CompletionRequest


class LlamaAnswer:
    """The answer to one POST /completion or /infill."""

    form = StreamForm(lambda error: b"error: " + error_body(error) + b"\n\n")

    def __init__(self, job: RequestContext[CompletionRequest]) -> None:
        self._job = job
        self._usage = UsageCounter(job)
        self._has_new_line = False

    async def whole(self) -> dict[str, Any]:
        found = await whole_output(self._job, self._usage)
        return {**self._news(found), **self._end(found)}

    def told(self, number: int, output: RequestOutput) -> bytes:
        self._usage.add(number, output)
        (answer,) = output.outputs
        news = self._news(output)
        if answer.finish_reason is not None:
            news |= self._end(output)
        elif not news["content"]:
            return b""
        return b"data: " + orjson.dumps(news) + b"\n\n"

    def _news(self, output: RequestOutput) -> dict[str, Any]:
        """What is new, with no token where none was asked for: the engine always generates one."""
        (answer,) = output.outputs
        is_empty = self._job.asked.max_tokens == 0
        text, tokens = ("", []) if is_empty else (answer.text, answer.token_ids)
        self._has_new_line = self._has_new_line or "\n" in text
        usage = self._usage.usage()
        news: dict[str, Any] = {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": 0 if is_empty else usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }
        if self._job.asked.logprobs is not None and tokens:
            rows = zip(answer.token_ids, answer.logprobs or [], strict=True)
            news["completion_probabilities"] = [_logprob(token, row, self._job.asked.logprobs) for token, row in rows]
        return news

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        job = self._job
        (answer,), params = output.outputs, job.prepared[0].params
        word = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        usage = self._usage.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        penalties = ("presence_penalty", "frequency_penalty", "repeat_penalty")
        settings = LLAMA_CPP.values(params, "seed", "temperature", "top_k", "top_p", "min_p", *penalties)
        most = -1 if job.asked.max_tokens is None else job.asked.max_tokens
        settings |= {"stop": list(params.stop_strings), "n_predict": most}
        return {
            "stop": True,
            "model": job.model,
            "prompt": job.prepared[0].prompt or "",
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": "limit" if answer.finish_reason == "length" else "eos" if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": usage["total_tokens"],
            "generation_settings": settings,
            "timings": timings(output.metrics, usage["prompt_tokens"], cached, usage["completion_tokens"]),
            **self._usage.depth(),
        }


def timings(times: RequestMetrics, prompt: int, cached: int, predicted: int) -> LlamaTimings:
    """Counts and milliseconds; those of the answer begin with its first token."""
    computed = prompt - cached
    prompt_ms, predicted_ms = 1000 * (times.prefill_seconds or 0.0), 1000 * (times.decode_seconds or 0.0)
    later = max(predicted - 1, 0)
    return {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(computed, 1),
        "prompt_per_second": 1000 * computed / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(later, 1),
        "predicted_per_second": 1000 * later / predicted_ms if predicted_ms else 0.0,
    }


def _logprob(token: int, row: Mapping[int, Logprob], count: int) -> LlamaLogprob:
    likeliest: Sequence[tuple[int, Logprob]] = sorted(row.items(), key=lambda pair: pair[1].rank)[:count]
    return {**_entry(token, row[token]), "top_logprobs": [_entry(*pair) for pair in likeliest]}


def _entry(token: int, known: Logprob) -> LlamaTokenLogprob:
    return {
        "id": token,
        "token": known.decoded_token or "",
        "bytes": list(known.bytes or b""),
        "logprob": max(known.logprob, LOWEST),
    }

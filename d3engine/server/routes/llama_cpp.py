"""llama.cpp's routes: its requests as completions, whose sampling fields they take by its names or by ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from d3engine.engine.model_directory import chat_defaults
from d3engine.errors import InvalidValueError, require
from d3engine.request.outputs import Logprob, RequestMetrics, RequestOutput
from d3engine.request.params import BOUNDS, MAX_CHARACTERS
from d3engine.server.errors import RequestError, error_body, invalid
from d3engine.server.requests.bodies import as_shape, json_object, known_names, read_as, read_body
from d3engine.server.requests.chat import chat_prompt
from d3engine.server.requests.completions import completion_job_of
from d3engine.server.requests.sampling import by_names, check_penalty_window
from d3engine.server.responses.context import LOWEST, RequestContext, UsageCounter, likeliest
from d3engine.server.responses.running import whole_output
from d3engine.server.responses.streams import StreamForm
from d3engine.server.responses.writer import respond
from d3engine.server.routes.api import Route
from d3engine.server.schemas import llama_cpp
from d3engine.server.schemas.requests import LLAMA_CPP, PREDICTED, Common, CompletionRequest, TokenizeRequest
from d3engine.server.state import AppState, json_response, served_by
from d3engine.utils.version import __version__

S = TypeVar("S", bound=llama_cpp.LlamaSampling)

IGNORED_HERE = frozenset(
    ("samplers", "t_max_prompt_ms", "t_max_predict_ms", "n_indent", "response_fields", "timings_per_token", "n_cmpl")
)
"""Fields that editors send with each request and that have no counterpart: an answer's header names them."""
_COMMON = frozenset(Common.__struct_fields__)
_OWN_SHAPES = llama_cpp.LlamaCompletionRequest, llama_cpp.LlamaInfillRequest
OWN = frozenset(name for shape in _OWN_SHAPES for name in shape.__struct_fields__) - _COMMON | {"logit_bias"}
SAMPLING = known_names(CompletionRequest) - frozenset(CompletionRequest.__struct_fields__) | _COMMON
SAMPLING -= OWN | IGNORED_HERE
"""Fields that reach a completion as they are, or are refused there by name."""
_KNOWN = OWN | SAMPLING | IGNORED_HERE
NEVER = -100.0
"""The bias of a token that llama.cpp's `false` excludes."""


async def llama_completion(request: Request) -> Response:
    """Go on from a prompt, as llama.cpp has it."""
    served = served_by(request)
    asked, content, headers = await _read(request, llama_cpp.LlamaCompletionRequest)
    content["prompt"] = await served.in_thread(_joined, served, asked.prompt)
    return await _answer(request, asked, content, headers)


async def llama_infill(request: Request) -> Response:
    """Write the text between two others, as llama.cpp has it."""
    served = served_by(request)
    asked, content, headers = await _read(request, llama_cpp.LlamaInfillRequest)
    form = served.infill
    if form is None:
        message = "The model has no fill-in-the-middle tokens; POST /completion goes on from a prompt."
        raise invalid("input_suffix", message, "no_infill_tokens")
    files = [(one.filename, one.text) for one in asked.input_extra or ()]
    texts = asked.input_prefix or "", asked.input_suffix or ""
    ids = await served.in_thread(form.prompt, served.tokenizer, *texts, files)
    if asked.prompt:
        ids += await served.in_thread(served.tokenizer.encode, asked.prompt, add_special_tokens=False)
    content |= {"prompt": ids, "stop_token_ids": [*(content.get("stop_token_ids") or ()), *form.ends]}
    return await _answer(request, asked, content, headers)


async def _read(request: Request, shape: type[S]) -> tuple[S, dict[str, Any], dict[str, str]]:
    """The body as that shape, the fields of a completion that it asks for, and the headers of the answer."""
    given = json_object(request.scope["state"]["body"])
    asked = as_shape(given, shape)
    ignored = [name for name in given if name in IGNORED_HERE and given[name] not in (None, False, 0, [])]
    ignored += [name for name in given if name not in _KNOWN]
    content = {own: getattr(asked, name) for name, own in LLAMA_CPP.others.items()}
    content |= {name: value for name, value in given.items() if name in SAMPLING}
    require(content.pop("n", 1) in (1, None), "n", given.get("n"), "absent or 1")
    content["max_tokens"] = _max_tokens(asked.n_predict, content.get("max_tokens"))
    content["logprobs"] = asked.n_probs or None
    content["logit_bias"] = _biases(asked.logit_bias)
    check_penalty_window({**content, "repeat_last_n": asked.repeat_last_n})
    served = served_by(request)
    if (form := await served.in_thread(_form, asked)) is not None:
        require("structured_outputs" not in content, "structured_outputs", content.get("structured_outputs"), "absent")
        content["structured_outputs"] = form
    return asked, content, served.ignored.header(ignored)


def _max_tokens(n_predict: int | None, max_tokens: int | None) -> int | None:
    """None up to the end of the context, as llama.cpp's -1 and -2."""
    if n_predict is None:
        return max_tokens
    PREDICTED.check("n_predict", n_predict)
    return n_predict if n_predict >= 0 else None


def _form(asked: llama_cpp.LlamaSampling) -> dict[str, Any] | None:
    if asked.json_schema is not None:
        require(not asked.grammar, "grammar", asked.grammar, "absent beside json_schema")
        return {"json": asked.json_schema}
    return {"grammar": lark_of(asked.grammar)} if asked.grammar else None


def lark_of(grammar: str) -> str:
    """A grammar in llama.cpp's GBNF as the engine reads it. Raises `InvalidValueError`."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    require(len(grammar) <= MAX_CHARACTERS, "grammar", f"{len(grammar)} characters", f"at most {MAX_CHARACTERS}")
    try:
        return gbnf_to_lark(grammar).removeprefix("%llguidance {}\n")
    except (GbnfToLarkError, RecursionError, ValueError, KeyError, IndexError) as error:
        raise InvalidValueError("grammar", grammar, f"a grammar in GBNF ({error})") from None


def _biases(given: Any) -> dict[str, float] | None:
    """llama.cpp's pairs of token id and bias as a mapping; `false` for a bias excludes a token."""
    if given in (None, False, []):
        return None
    if isinstance(given, dict):
        return given
    found: dict[str, float] = {}
    for pair in given:
        is_pair = isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int
        is_bias = is_pair and (pair[1] is False or type(pair[1]) in (int, float))
        require(is_bias, "logit_bias", pair, "pairs of a token id and a number, or false")
        found[str(pair[0])] = NEVER if pair[1] is False else float(pair[1])
    return found


def _joined(served: AppState, prompt: str | list[int | str]) -> str | list[int]:
    """One prompt: texts among token ids are encoded without special tokens, but for a first one."""
    if isinstance(prompt, str):
        return prompt
    # Several texts are several prompts there, which are answered one by one.
    is_one = len(prompt) < 2 or not all(isinstance(part, str) for part in prompt)
    require(is_one, "prompt", prompt, "one prompt: a text, or token ids with texts among them")
    ids: list[int] = []
    for place, part in enumerate(prompt):
        is_text = isinstance(part, str)
        ids += served.tokenizer.encode(str(part), add_special_tokens=not place) if is_text else [int(part)]
    return ids


async def _answer(
    request: Request, asked: llama_cpp.LlamaSampling, content: Mapping[str, Any], headers: Mapping[str, str]
) -> Response:
    """Run a completion; errors have the fields' names of llama.cpp."""
    completion = read_as({name: value for name, value in content.items() if value is not None}, CompletionRequest)
    names = {own: name for name, own in LLAMA_CPP.others.items() if getattr(asked, name) is not None}
    names["structured_outputs"] = "json_schema" if "json" in (completion.structured_outputs or {}) else "grammar"
    with by_names(names):
        job = await completion_job_of(request, completion, id_prefix="llama-", ends_with_context=True)
    return await respond(job, LlamaAnswer(job), headers)


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
        elif not (news["content"] or news["tokens"]):  # one whose text is held back has its place and probabilities
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


def timings(times: RequestMetrics, prompt: int, cached: int, predicted: int) -> llama_cpp.LlamaTimings:
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


def _logprob(token: int, row: Mapping[int, Logprob], count: int) -> llama_cpp.LlamaLogprob:
    return {**_entry(token, row[token]), "top_logprobs": [_entry(*pair) for pair in likeliest(row)[:count]]}


def _entry(token: int, known: Logprob) -> llama_cpp.LlamaTokenLogprob:
    return {
        "id": token,
        "token": known.decoded_token or "",
        "bytes": list(known.bytes or b""),
        "logprob": max(known.logprob, LOWEST),
    }


async def llama_props(request: Request) -> Response:
    """What the server does by default, as llama.cpp says it."""
    served = served_by(request)
    client, defaults, named = served.client, served.client.default_sampling_params, served.tokenizer.special_tokens
    known = LLAMA_CPP.values(defaults, *(LLAMA_CPP.by_own.get(name, name) for name in BOUNDS))
    params = {name: value for name, value in known.items() if value is not None} | {"n_predict": -1}
    found: llama_cpp.LlamaProps = {
        "default_generation_settings": {"n_ctx": client.max_model_len, "params": params},
        "total_slots": client.settings.max_num_seqs,
        "model_alias": served.models.default,
        "model_path": served.models.default,
        "modalities": {"vision": False, "audio": False},
        "chat_template": await client.chat_template() or "",
        "bos_token": named.get("bos_token", ""),
        "eos_token": named.get("eos_token", ""),
        "build_info": f"d3engine {__version__}",
        "d3ext": {"chat_defaults": await served.in_thread(chat_defaults, client.settings.directory)},
    }
    return json_response(found)


async def llama_slots(request: Request) -> Response:
    """The sequences that may run at once."""
    served = served_by(request)
    running, most = (await served.client.stats()).num_running, served.client.settings.max_num_seqs
    if running >= most and request.query_params.get("fail_on_no_slot") not in (None, "", "0"):
        raise RequestError(503, "All slots are in use.", code="no_slot_available")
    found: list[llama_cpp.LlamaSlot] = [
        {"id": number, "n_ctx": served.client.max_model_len, "speculative": False, "is_processing": number < running}
        for number in range(most)
    ]
    return json_response(found)


async def llama_apply_template(request: Request) -> Response:
    """The text of a conversation by the model's template."""
    served = served_by(request)
    asked, headers = await read_body(request, llama_cpp.LlamaTemplateRequest)
    served.models.check(asked.model)
    begins = True if asked.add_generation_prompt is None else asked.add_generation_prompt
    as_tokens = TokenizeRequest(
        messages=asked.messages, add_generation_prompt=begins, chat_template_kwargs=asked.chat_template_kwargs
    )
    prompt = await chat_prompt(served, as_tokens, asked.messages, asked.tools)
    text = await served.in_thread(served.tokenizer.decode, prompt["prompt_token_ids"], skip_special_tokens=False)
    found: llama_cpp.LlamaPrompt = {"prompt": text}
    return json_response(found, headers)


_GENERATES: dict[str, Any] = {"answer": llama_cpp.LlamaCompletion, "events": (llama_cpp.LlamaCompletion,)}

ROUTES = (
    Route("/completion", llama_completion, llama_cpp.LlamaCompletionRequest, **_GENERATES),
    Route("/completions", llama_completion, llama_cpp.LlamaCompletionRequest, **_GENERATES),
    Route("/infill", llama_infill, llama_cpp.LlamaInfillRequest, **_GENERATES),
    Route("/apply-template", llama_apply_template, llama_cpp.LlamaTemplateRequest, llama_cpp.LlamaPrompt),
    Route("/props", llama_props, answer=llama_cpp.LlamaProps),
    Route("/slots", llama_slots, answer=list[llama_cpp.LlamaSlot]),
)

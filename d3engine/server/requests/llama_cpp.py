"""llama.cpp's requests as completions, whose sampling fields they take by llama.cpp's names or by ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from d3engine.errors import InvalidValueError, require
from d3engine.request.params import MAX_CHARACTERS
from d3engine.server.errors import invalid
from d3engine.server.requests.bodies import as_shape, json_object, known_names, read_as
from d3engine.server.requests.chat import by_names
from d3engine.server.requests.completions import completion_job_of
from d3engine.server.requests.ollama import check_penalty_window
from d3engine.server.responses.context import RequestContext
from d3engine.server.schemas.llama_cpp import LlamaCompletionRequest, LlamaInfillRequest, LlamaSampling
from d3engine.server.schemas.requests import LLAMA_CPP, PREDICTED, Common, CompletionRequest
from d3engine.server.state import AppState, served_by

S = TypeVar("S", bound=LlamaSampling)

IGNORED_HERE = frozenset(
    ("samplers", "t_max_prompt_ms", "t_max_predict_ms", "n_indent", "response_fields", "timings_per_token", "n_cmpl")
)
"""Fields that editors send with each request and that have no counterpart: an answer's header names them."""
_COMMON = frozenset(Common.__struct_fields__)
OWN = frozenset((*LlamaCompletionRequest.__struct_fields__, *LlamaInfillRequest.__struct_fields__)) - _COMMON
OWN |= {"logit_bias"}
SAMPLING = known_names(CompletionRequest) - frozenset(CompletionRequest.__struct_fields__) | _COMMON
SAMPLING -= OWN | IGNORED_HERE
"""Fields that reach a completion as they are, or are refused there by name."""
_KNOWN = OWN | SAMPLING | IGNORED_HERE
NEVER = -100.0
"""The bias of a token that llama.cpp's `false` excludes."""


async def llama_completion_job(request: Request) -> tuple[RequestContext[Any], dict[str, str]]:
    """What to run for POST /completion. Raises `RequestError` and `InvalidValueError` by the fields' names there."""
    served = served_by(request)
    asked, content, headers = await _read(request, LlamaCompletionRequest)
    content["prompt"] = await served.in_thread(_joined, served, asked.prompt)
    return await _job(request, asked, content), headers


async def infill_job(request: Request) -> tuple[RequestContext[Any], dict[str, str]]:
    """The same for POST /infill."""
    served = served_by(request)
    asked, content, headers = await _read(request, LlamaInfillRequest)
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
    return await _job(request, asked, content), headers


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


def _form(asked: LlamaSampling) -> dict[str, Any] | None:
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
    ids: list[int] = []
    for place, part in enumerate(prompt):
        is_text = isinstance(part, str)
        ids += served.tokenizer.encode(str(part), add_special_tokens=not place) if is_text else [int(part)]
    return ids


async def _job(request: Request, asked: LlamaSampling, content: Mapping[str, Any]) -> RequestContext[CompletionRequest]:
    job = read_as({name: value for name, value in content.items() if value is not None}, CompletionRequest)
    names = {own: name for name, own in LLAMA_CPP.others.items() if getattr(asked, name) is not None}
    names["structured_outputs"] = "json_schema" if "json" in (job.structured_outputs or {}) else "grammar"
    with by_names(names):
        return await completion_job_of(request, job, id_prefix="llama-", ends_with_context=True)

"""What schemathesis loads (SCHEMATHESIS_HOOKS): answers are short, and every second request that fits has a chance.
What fits the schema may name a model that is not there, or a role of no template: such requests are refused, and
would never come to an answer."""

from itertools import count
from typing import Any

import schemathesis

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ASK_FOR_MUCH = ("model", "depth", "tools", "tool_choice", "response_format", "structured_outputs", "stop", "text")
NUMBERS = count()


@schemathesis.hook
def before_call(context: Any, case: Any, **more: Any) -> None:
    """No answer of more than eight tokens; lengths that are refused are left as they are."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in LENGTHS:
        length = body.get(name)
        if isinstance(length, int) and not isinstance(length, bool) and 8 < length < 2**24:
            body[name] = 8
    fits = case.meta is not None and case.meta.generation.mode.is_positive
    if fits and next(NUMBERS) % 2:
        _make_easier(case, body)


def _make_easier(case: Any, body: dict[str, Any]) -> None:
    case.headers.pop("X-D3-Depth", None)
    keeps = ("messages", "input", "prompt", "tokens", "stream", *LENGTHS)
    for name in [name for name in body if name not in keeps]:
        if name in ASK_FOR_MUCH or next(NUMBERS) % 3:
            del body[name]
    for turns in (body.get("messages"), body.get("input")):
        if isinstance(turns, list):
            turns[:] = [{"role": "user", "content": "Tom has 5 pens."}]

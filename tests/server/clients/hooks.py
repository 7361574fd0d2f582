"""What schemathesis loads (SCHEMATHESIS_HOOKS): it makes answers short, so that thousands of them are done with."""

from __future__ import annotations

from typing import Any

import schemathesis

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def before_call(context: Any, case: Any, **more: Any) -> None:
    """No answer of more than eight tokens; lengths that are refused are left as they are."""
    body = case.body
    if isinstance(body, dict):
        for name in LENGTHS:
            length = body.get(name)
            if isinstance(length, int) and not isinstance(length, bool) and 8 < length < 2**24:
                body[name] = 8

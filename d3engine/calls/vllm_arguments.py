"""vLLM's arguments of a call that have no counterpart here: taken at values that ask for nothing, refused otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d3engine.errors import InvalidValueError

Same = Mapping[str, tuple[tuple[Any, ...], str]]
"""By an argument's name: the values that ask for what happens anyway, and what is allowed in words."""

_NO_ADAPTERS = "None, since there are no adapters"
_PROMPTS = "None: name token ids as the prompt instead"

OF_CALLS: Same = {
    "lora_request": ((None,), _NO_ADAPTERS),
    "prompt_adapter_request": ((None,), _NO_ADAPTERS),
    "priority": ((None, 0), "None: add_request and AsyncEngine.generate take the priority of a request"),
    "prompt_token_ids": ((None,), _PROMPTS),
    "prompt_text": ((None,), _PROMPTS),
    "tokenization_kwargs": ((None, {}), _PROMPTS),
    "guided_options_request": ((None,), "None: name SamplingParams(structured_outputs=...) instead"),
    "mm_processor_kwargs": ((None, {}), "None, since prompts are text alone"),
    "chat_template_content_format": (("auto", "string"), "'auto' or 'string', since prompts are text alone"),
    "trace_headers": ((None, {}), "None: the server traces requests"),
    "data_parallel_rank": ((None,), "None, since an engine is one replica"),
    "arrival_time": ((None,), "None, since requests arrive when they are added"),
}


def refuse(name: str, value: object, table: Same) -> None:
    """Raise `InvalidValueError` for an argument of the table with none of its values."""
    values, allowed = table[name]
    if not any(type(value) is type(same) and value == same for same in values):
        raise InvalidValueError(name, value, allowed)


def refuse_others(given: Mapping[str, object], call: str) -> None:
    """The same of all further arguments of a call; raises `TypeError` for one that vLLM does not have either."""
    for name, value in given.items():
        if name not in OF_CALLS:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        refuse(name, value, OF_CALLS)

"""Fields that several requests have, with the bounds that the engine checks them by, in JSON Schema's words.

The one idea: a bound is written where it is checked, in `SamplingParams` most of all, and described from there. What
reads bodies looks at types alone, so that an error has the same words whoever calls the engine.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from d3engine.request.bounds import Integers, Numbers
from d3engine.request.params import (
    BIASES,
    BOUNDS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_SALT_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    PRIORITIES,
    TOKEN_IDS,
)

TEMPERATURES = Numbers(0.0, 2.0)
"""OpenAI's bound on the temperature, below the engine's own."""
MAX_TOOLS = 128
FUNCTIONS_NAME = "[A-Za-z0-9_-]{1,64}"
REFERENCE = "#/components/schemas/{name}"
"""Where a shape stands in the description of all."""


def described(**words: Any) -> Meta:
    """What JSON Schema says of a field beyond its type."""
    return Meta(extra_json_schema=words)


def bounded(by: Integers | Numbers | str) -> Meta:
    """A number within these bounds, or within those of the parameter of this name."""
    return described(**(BOUNDS[by] if isinstance(by, str) else by).schema)


def shaped_as(name: str) -> Meta:
    """An object that is read as this shape later, when it is clear what it is for."""
    return described(**{"$ref": REFERENCE.format(name=name)})


def one_of(*names: str) -> Meta:
    """An object of one of these shapes."""
    return described(anyOf=[{"$ref": REFERENCE.format(name=name)} for name in names])


Temperature = Annotated[float, bounded(TEMPERATURES)]
TopP = Annotated[float, bounded("top_p")]
TopK = Annotated[int, bounded("top_k")]
MaxTokens = Annotated[int, bounded("max_tokens")]
Seed = Annotated[int, bounded("seed")]
Priority = Annotated[int, bounded(PRIORITIES)]
CacheSalt = Annotated[str, described(minLength=1, maxLength=MAX_SALT_LENGTH)]
TokenId = Annotated[int, bounded(TOKEN_IDS)]
Word = Annotated[str, described(minLength=1, maxLength=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[Word], described(maxItems=MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[TokenId], described(maxItems=MAX_STOP_TOKEN_IDS)]
AllowedTokenIds = Annotated[list[TokenId], described(minItems=1, maxItems=MAX_ALLOWED_TOKENS)]
BadWords = Annotated[list[Word], described(maxItems=MAX_BAD_WORDS)]
LogitBias = Annotated[
    dict[str, Annotated[float, bounded(BIASES)]],
    described(maxProperties=MAX_BIASED_TOKENS, propertyNames={"pattern": "^[0-9]{1,19}$"}),
]
FunctionsName = Annotated[str, described(pattern=f"^{FUNCTIONS_NAME}$")]
Depth = Annotated[
    str | dict[str, Any] | None,
    Meta(description='"auto", "full", a model id that stands for a depth, or a policy as d3.json has it'),
]

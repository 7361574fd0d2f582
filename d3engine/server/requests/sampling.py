"""What a request asks of sampling: parameters, the form of its answers, its depth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import policy_from_dict
from d3engine.errors import InvalidValueError, must_be, require
from d3engine.request.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from d3engine.server.errors import RequestError, invalid
from d3engine.server.schemas.requests import ALL, TEMPERATURES, Common
from d3engine.server.settings import ServerSettings
from d3engine.utils.arguments import Integers

_FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name", "schema"}}'
_FIELDS = tuple(name for name in StructuredOutputsParams.names() if name != "openings")
"""A request's own grammar is looked at for every token."""


def form_of(asked: Common) -> StructuredOutputsParams | None:
    """The form, None for any. Raises `RequestError` and `InvalidValueError` naming the field of the request."""
    form = None if asked.response_format is None else _by_response_format(asked.response_format)
    if asked.structured_outputs is None:
        return form
    if form is not None:
        raise invalid("structured_outputs", "structured_outputs must be absent beside response_format.")
    given = {name: value for name, value in asked.structured_outputs.items() if value is not None}
    for name in given:
        allowed = f"an object of the fields {', '.join(_FIELDS)}"
        require(name in _FIELDS, "structured_outputs", asked.structured_outputs, allowed)
    with named("structured_outputs"):
        return StructuredOutputsParams(**given)


def _by_response_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    present = {name for name, value in given.items() if value is not None}
    if kind == "json_schema":
        return _by_json_schema(given, present)
    if kind not in ("text", "json_object") or len(present) > 1:
        raise invalid("response_format", must_be("response_format", given, _FORMATS) + ".")
    return None if kind == "text" else StructuredOutputsParams(json_object=True)


def _by_json_schema(given: Mapping[str, Any], present: set[str]) -> StructuredOutputsParams:
    """`strict` makes no difference: every answer satisfies the schema."""
    asked = given.get("json_schema")
    fits = isinstance(asked, dict) and present == {"type", "json_schema"}
    fits = fits and set(asked or ()) <= {"name", "description", "schema", "strict"}
    if not fits or not isinstance(asked, dict) or not isinstance(asked.get("name"), str):
        raise invalid("response_format", must_be("response_format", given, _FORMATS) + ".")
    if not isinstance(asked.get("schema"), dict) or not isinstance(asked.get("strict") or False, bool):
        allowed = 'with "schema", an object, and "strict", true or false'
        raise invalid("response_format", must_be("response_format.json_schema", asked, allowed) + ".")
    with named("response_format"):
        return StructuredOutputsParams(json=asked["schema"])


@contextmanager
def by_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors from inside of here name fields as the request does: engine's name -> the request's."""
    try:
        yield
    except InvalidValueError as error:
        raise InvalidValueError(names.get(error.field, error.field), error.value, error.allowed) from None
    except RequestError as error:
        if (given := names.get(error.param or "")) is not None:
            error.message = re.sub(rf"^{re.escape(str(error.param))}\b", given, error.message)
            error.param = given
        raise


def named(source: str) -> AbstractContextManager[None]:
    """Errors about a form name the field of the request that it came of."""
    return by_names(dict.fromkeys(_FIELDS, source))


DEPTH_HEADER = "X-D3-Depth"
"""For clients that cannot add a field to the body: the same in a header, an object as JSON."""

LONGEST_HEADER = 1000
MOST_KNOWN = 64
"""Policies as requests spell them, of which it is remembered that they are allowed: most requests share a few."""
RETRY_SECONDS = 1
AUTO = "auto"

Asked = str | Mapping[str, Any] | None


class DepthPolicies:
    """Reads the depths of requests, and knows which policies are at work.

    Rows of one step are grouped by schedule, and each needs tables of its own: so there is a bound on how many
    different policies requests may have at work at once.
    """

    def __init__(self, settings: ServerSettings, own: DepthPolicy) -> None:
        self._settings = settings
        self._own = own
        self._at_work: Counter[DepthPolicy] = Counter()
        self._known: dict[str, DepthPolicy] = {}

    def read(self, model: str, field: Asked, header: str | None) -> DepthPolicy | None:
        """The policy of a request: by the id of its model, its field or its header; None is the engine's own.

        "auto" asks for nothing: it is what the model's id stands for. Raises `RequestError` for a depth that is
        unknown, malformed or not allowed, and where two of the three disagree.
        """
        asked: dict[str, DepthPolicy] = {}
        if model in self._settings.depth_aliases:
            asked["model"] = self._settings.depth_aliases[model]
        if field is not None and field != AUTO:
            asked["depth"] = self._policy(field)
        if header is not None and header != AUTO:
            asked[DEPTH_HEADER] = self._policy(_from_header(header))
        found = list(asked.values())
        if any(policy != found[0] for policy in found):
            raise invalid("depth", f"depth must be one; {' and '.join(asked)} ask for different ones.", "invalid_depth")
        return found[0] if found and found[0] != self._own else None

    @contextmanager
    def at_work(self, policy: DepthPolicy | None) -> Iterator[None]:
        """While a request of this policy is unfinished; raises `RequestError` (429) where there are too many others.

        The engine's own policy and those that its owner gave an id are always at work.
        """
        if policy is None or policy in self._settings.depth_aliases.values():
            yield
            return
        most = self._settings.max_depth_policies
        if policy not in self._at_work and len(self._at_work) >= most:
            message = f"{most} different depth policies are at work, which is the most; try again, or with one of them."
            headers = {"Retry-After": str(RETRY_SECONDS)}
            raise RequestError(429, message, param="depth", code="too_many_depths", headers=headers)
        self._at_work[policy] += 1
        try:
            yield
        finally:
            self._at_work[policy] -= 1
            if not self._at_work[policy]:
                del self._at_work[policy]

    def _policy(self, asked: str | Mapping[str, Any]) -> DepthPolicy:
        if isinstance(asked, str) and asked in self._settings.depth_aliases:
            return self._settings.depth_aliases[asked]
        words = repr(asked)  # tells true from 1 and 1 from 1.0, as options do
        policy = self._known.get(words)
        if policy is None:
            policy = self._described({"policy": asked} if isinstance(asked, str) else asked)
            if len(words) <= LONGEST_HEADER and len(self._known) < MOST_KNOWN:
                self._known[words] = policy
        return policy

    def _described(self, description: Mapping[str, Any]) -> DepthPolicy:
        if description == self._own.describe():
            return self._own
        if self._settings.lock_depth:
            raise invalid("depth", "depth must be absent, since this server's is fixed.", "depth_locked")
        self._check_allowed(description)
        try:
            return policy_from_dict(description)
        except InvalidValueError as error:
            raise invalid("depth", f"In depth, {error}.", "invalid_depth") from None

    def _check_allowed(self, description: Mapping[str, Any]) -> None:
        """Every policy that is named, those inside of others too, must be on the list: to look up any other name could
        load a package or a file."""
        name = description.get("policy")
        if name not in self._settings.allow_depth:
            ids = "".join(f', "{alias}"' for alias in self._settings.depth_aliases)
            names = " or ".join(self._settings.allow_depth) or "none"
            allowed = f'"auto"{ids}, or {{"policy": NAME}} with its options, where NAME is one of: {names}'
            raise invalid("depth", must_be("depth", description, allowed) + ".", "depth_not_allowed")
        for value in description.values():
            if isinstance(value, Mapping):
                self._check_allowed(value)


def _from_header(header: str) -> str | Mapping[str, Any]:
    """A name, or an object as JSON."""
    if not header.lstrip().startswith("{"):
        return header
    try:
        return msgspec.json.decode(header[:LONGEST_HEADER], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("depth", f"{DEPTH_HEADER} must be a name or a JSON object ({error}).", "invalid_depth") from None


SEVERAL_ANSWERS_TEMPERATURE = 1.0
"""OpenAI's default, of requests for several answers; a model's file may say 0, which would make them all the same."""


def sampling_params(
    asked: Common, defaults: SamplingParams, depth: DepthPolicy | None, **decided: Any
) -> SamplingParams:
    """The parameters of a request. `decided` are those that its route has worked out from several fields.

    Raises `InvalidValueError` or `RequestError` for values that are not allowed.
    """
    wanted = {name: value for name in ALL if (value := getattr(asked, name)) is not None}
    if asked.temperature is not None:
        TEMPERATURES.check("temperature", asked.temperature)
    elif max(wanted.get("n", 1), decided.get("n", 1)) > 1:
        wanted["temperature"] = SEVERAL_ANSWERS_TEMPERATURE
    if asked.stop == "":
        raise invalid("stop", "stop must be null or of at least one character.")
    if asked.stream and asked.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs must be absent where stream is true.")
    kind = RequestOutputKind.DELTA if asked.stream else RequestOutputKind.FINAL_ONLY
    # What `dataclasses.replace` makes, in two thirds of its time.
    return SamplingParams(**{**vars(defaults), **wanted, **decided, "depth": depth, "output_kind": kind})


def check_num_logprobs(name: str, number: int | None, settings: ServerSettings) -> None:
    """Refuse more log-probabilities of a token than the server gives."""
    if number is not None:
        logprob_bounds(settings).check(name, number)


def logprob_bounds(settings: ServerSettings) -> Integers:
    """How many log-probabilities of a token may be asked for."""
    return Integers(0, settings.max_logprobs)


def check_penalty_window(sampling: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a `repeat_last_n` other than the whole text, where there are penalties. Raises `InvalidValueError`."""
    names = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    window = sampling.get("repeat_last_n")
    has_penalty = any(sampling.get(name) not in (None, off) for name, off in names.items())
    allowed = "absent or -1 beside a penalty, since penalties are of the whole text here"
    require(window in (None, -1) or not has_penalty, f"{prefix}repeat_last_n", window, allowed)

"""SamplingParams, with vLLM's names; everything a request can ask for is bounded and
checked here, when it is written down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from inspect import Parameter, signature
from typing import Any, Never, TypeAlias, TypeVar

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.errors import InvalidValueError, cut, integer_in, require, require_integer, require_name, require_number
from d3engine.request.hidden_states import Capture, Steer
from d3engine.utils.arguments import CHECK, Check, Integers, Numbers, Switch, argument, check_arguments

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict made once; whatever would change it raises `TypeError`. It can be hashed where its values can."""

    def _refuse(self, *arguments: Any, **named: Any) -> Never:
        raise TypeError("this mapping cannot be changed: make a new one")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self),)


MAX_CHARACTERS = 2**16
MAX_CHOICES = 1024
FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What every answer must be, from its first character to its last; exactly one of the first five is given.

    Args:
        json: a JSON schema, as an object or as its text, which it is kept as; the answer is JSON that satisfies it.
        regex: a regular expression that the whole answer matches (Rust's syntax: no look-around, no back references;
            \\d and \\w are of ASCII alone, as in JSON Schema).
        choice: the answer is one of these texts.
        grammar: a context-free grammar in Lark's syntax, whose rule `start` is the answer.
        json_object: the answer is any JSON object.
        whitespace_pattern: of JSON: what may stand between two of its parts; None: nothing, a space, or a line break
            with an indentation, so that no answer can go on with spaces for ever.
        disable_any_whitespace: of JSON: nothing may.
        reasoning: two texts that reasoning stands between, after which the form begins; the first is "" where the
            prompt has begun it. Without reasoning the form begins at once, if the first text is given.
        openings: of a grammar: texts until one of which it allows any text, except in an answer that begins with a
            bracket or a fence; until then tokens are chosen without a look at the grammar. None: there are none.
        reasoning_tokens: of that reasoning at most; then its end is written for the model. None: any number.

    Raises:
        InvalidValueError: for any value that is not allowed.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    reasoning: Sequence[str] | None = None
    openings: Sequence[str] | None = None
    reasoning_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            require(isinstance(value, bool) or (value is None and name in FORMS), name, value, "True or False")
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        allowed = f"given with exactly one of {', '.join(FORMS)}"
        require(len(given) == 1, "structured_outputs", " and ".join(given) or None, allowed)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _require_text(name, getattr(self, name))
        is_json = self.form in ("json", "json_object")
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            require(is_json or not getattr(self, name), name, getattr(self, name), "absent where the answer is no JSON")
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", _reasoning(self.reasoning))
        if self.openings is not None:
            require(self.grammar is not None, "openings", self.openings, "None without a grammar")
            object.__setattr__(self, "openings", _texts("openings", self.openings))
        if self.reasoning_tokens is not None:
            require_integer("reasoning_tokens", self.reasoning_tokens, 1)
            require(self.reasoning is not None, "reasoning_tokens", self.reasoning_tokens, "None without reasoning")
        both = self.whitespace_pattern is not None and self.disable_any_whitespace
        require(not both, "whitespace_pattern", self.whitespace_pattern, "None where disable_any_whitespace is True")

    @property
    def form(self) -> str:
        """The name of the field that says what the answer is."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields, for those who read them from elsewhere."""
        return tuple(field.name for field in fields(cls))


def _schema_text(schema: object) -> str:
    """A JSON schema as compact JSON; the order of its keys is that of the answer's properties."""
    allowed = f"a JSON schema: an object, or the text of one, of {MAX_CHARACTERS} characters at most"
    if isinstance(schema, str):
        _require_text("json", schema)
    elif not isinstance(schema, Mapping):
        raise InvalidValueError("json", schema, allowed)
    try:
        found = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(found, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError("json", schema, f"{allowed} ({type(error).__name__}: {cut(str(error))})") from None
    require(isinstance(found, dict) and len(text) <= MAX_CHARACTERS, "json", schema, allowed)
    return text


def _choices(choice: Sequence[str]) -> tuple[str, ...]:
    allowed = f"a list of 1 to {MAX_CHOICES} different texts, of {MAX_CHARACTERS} characters together at most"
    found = _texts("choice", choice, allowed)
    fits = len(set(found)) == len(found) and sum(map(len, found)) <= MAX_CHARACTERS
    require(fits, "choice", choice, allowed)
    return found


def _texts(name: str, given: Sequence[str], allowed: str = f"a list of 1 to {MAX_CHOICES} texts") -> tuple[str, ...]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    require(is_list and 0 < len(given) <= MAX_CHOICES, name, given, allowed)
    for text in given:
        _require_text(name, text)
    return tuple(given)


def _reasoning(given: Sequence[str]) -> tuple[str, ...]:
    is_pair = isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given) == 2
    require(is_pair, "reasoning", given, "two texts: what begins reasoning, and what ends it")
    for text in given[1:] if given[0] == "" else given:
        _require_text("reasoning", text)
    return tuple(given)


def _require_text(name: str, value: object) -> None:
    fits = isinstance(value, str) and 0 < len(value) <= MAX_CHARACTERS
    fits = fits and not any("\ud800" <= char <= "\udfff" for char in str(value))  # no half of a pair is a character
    require(fits, name, value, f"text of 1 to {MAX_CHARACTERS} characters")


MAX_N = 64
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKENS = 2**20
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BREAKERS = 64
DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's."""
MAX_TOKENS = 2**24
MAX_SALT_LENGTH = 128
MAX_TOP_K = 2**31 - 1
POOLINGS = ("mean", "last", "cls")
"""How a prompt's last hidden states become one vector: their mean, that of the last token, or of the first."""
DEFAULT_POOLING = "mean"
SAMPLING = "Sampling"
"""Heading of the command-line options."""
ALL_LOGPROBS = -1
"""As many log-probabilities as the vocabulary has tokens."""

PRIORITIES = Integers(-(2**31), 2**31 - 1)
"""Of requests, beside their parameters."""
BIASES = Numbers(-100.0, 100.0)
TOKEN_IDS = Integers(0)
"""Whatever the vocabulary; the engine knows its end."""


@dataclass(frozen=True)
class Text(Check):
    """A text of up to `longest` characters."""

    longest: int
    allowed: str = "None, or a text"

    def check(self, field: str, value: object) -> None:
        fits = isinstance(value, str) and 0 < len(value) <= self.longest
        require(fits, field, value, f"{self.allowed} of 1 to {self.longest} characters")

    @property
    def schema(self) -> dict[str, Any]:
        return {"minLength": 1, "maxLength": self.longest}


@dataclass(frozen=True)
class Several(Check):
    """Lists of up to `most` items, kept as tuples; with `or_one` an item alone, too."""

    item: Check
    most: int
    fewest: int = 0
    or_one: bool = False

    @property
    def kind(self) -> type:  # type: ignore[override]
        return list[self.item.kind]  # type: ignore[name-defined]

    def check(self, field: str, value: object) -> None:
        if self.or_one and isinstance(value, self.item.kind):
            self.item.check(field, value)
            return
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        require(is_list, field, value, "a list or None")
        assert isinstance(value, Sequence)
        require(len(value) <= self.most, field, f"{len(value)} items", f"at most {self.most} items")
        require(len(value) >= self.fewest, field, value, "at least one token id, or None")
        if self.item is TOKEN_IDS and set(map(type, value)) == {int} and min(value) >= TOKEN_IDS.low:
            return  # quickly seen of a long list
        for item in value:
            self.item.check(field, item)

    def kept(self, value: Any) -> Any:
        return value if isinstance(value, self.item.kind) else tuple(value)

    @property
    def schema(self) -> dict[str, Any]:
        return ({"minItems": self.fewest} if self.fewest else {}) | {"maxItems": self.most}


class Biases(Check):
    """Token ids with what is added to their logits."""

    kind = dict[str, float]

    def check(self, field: str, value: object) -> None:
        require(isinstance(value, Mapping), field, value, "a mapping of token id to bias")
        assert isinstance(value, Mapping)
        require(len(value) <= MAX_BIASED_TOKENS, field, len(value), f"of {MAX_BIASED_TOKENS} entries at most")

    def kept(self, value: Any) -> Any:
        return FrozenDict(_bias_by_id(value))

    @property
    def schema(self) -> dict[str, Any]:
        return {"maxProperties": MAX_BIASED_TOKENS, "propertyNames": {"pattern": "^[0-9]{1,19}$"}}


WORD = Text(MAX_STOP_LENGTH, "strings")

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would only overflow."""


LogitsProcessor: TypeAlias = Callable[..., Any]
MAX_PROCESSORS = 16


def _processors(given: object) -> tuple[LogitsProcessor, ...]:
    allowed = f"a list of at most {MAX_PROCESSORS} functions of two or three arguments, or None"
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    require(is_list, "logits_processors", given, allowed)
    assert isinstance(given, Sequence)
    require(len(given) <= MAX_PROCESSORS, "logits_processors", f"{len(given)} items", allowed)
    for one in given:
        require(callable(one) and num_arguments(one) in (2, 3), "logits_processors", one, allowed)
    return tuple(given)


def num_arguments(function: Callable[..., Any]) -> int:
    """How many arguments a function takes by their places; 0 where that cannot be seen."""
    try:
        found = signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for one in found)


class RequestOutputKind(Enum):
    """How much of a request an output holds, and when it comes."""

    CUMULATIVE = 0
    """All that there is so far, whenever something is new."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """All of it, once, when the request has finished."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    Lists are kept as tuples, and `logit_bias` as a mapping that cannot be changed: what was checked stays as it was.

    Args:
        n: Answers to each prompt; each draws its own random numbers, so several need a temperature.
        max_tokens: Maximum tokens to generate; None: as many as the model's length and the KV cache leave room for.
        min_tokens: Tokens to generate before anything can end the answer: neither end-of-sequence nor a stop token is
            among them, and a stop string ends the sequence only where a later token completes it.
        temperature: Divisor of the logits; 0 is greedy.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches this.
        top_k: Number of likeliest tokens to keep; 0 and -1 keep all.
        min_p: Drop tokens less likely than this times the likeliest.
        typical_p: Keep the tokens whose surprise is nearest to the expected one, up to this probability together.
        top_n_sigma: Keep tokens whose logits are at most this many standard deviations below the highest; 0 keeps all.
        xtc_probability: How likely a step leaves out all but the least likely of the tokens above `xtc_threshold`.
        xtc_threshold: Probability from which a token counts as a top choice there; above 0.5 nothing is left out.
        dry_multiplier: Penalty of a token that would repeat a sequence of `dry_allowed_length` tokens; 0 is none.
        dry_base: Factor of that penalty for each further token that is repeated.
        dry_allowed_length: Tokens that may be repeated without a penalty, less one.
        dry_penalty_last_n: Tokens of prompt and answer that are looked through, from the end; -1: all.
        dry_sequence_breakers: Texts over which no repetition is followed: a token that ends one of them ends it.
        presence_penalty: Subtracted from the logit of every token already generated.
        frequency_penalty: Subtracted from a token's logit once for each time it was generated.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt or the answer.
        seed: The random numbers of a sequence depend on (seed, step) alone; None: the engine gives one, as for -1.
        stop: A string that ends the text, which then stops before it, or several.
        stop_token_ids: Token ids that end the sequence and are not shown.
        bad_words: Words that are never completed.
        ignore_eos: Go on after an end-of-sequence token.
        include_stop_str_in_output: End the text after the stop string or stop token, not before it.
        skip_special_tokens: Leave special tokens out of the text.
        truncate_prompt_tokens: Tokens of the prompt to keep, from its end; -1: as many as leave room for the answer.
        detokenize: Decode the tokens to text; without, text stays "" and stop strings cannot be used.
        logprobs: Log-probabilities of the chosen token and of this many likeliest ones, of the raw distribution
            (before penalties, temperature and truncation); -1: of the whole vocabulary.
        prompt_logprobs: The same for the tokens of the prompt.
        logit_bias: Added to the logits of these tokens; ids may be written as strings, as in JSON.
        allowed_token_ids: Only these can be chosen.
        cache_salt: Only prompts with the same text here share blocks of the prefix cache, so that no client learns from
            the time of an answer what others have asked; None is shared by all that have none.
        output_kind: What outputs hold, of `stream` and of requests added one by one: everything so far, only what is
            new, or everything once at the end. `generate` and `chat` return whole answers in any case.
        depth: The request's own depth policy; None is the engine's.
        structured_outputs: The form that every answer must have: JSON by a schema, a regular expression, a choice, a
            grammar. An answer ends where its form does; before, neither end-of-sequence nor a stop token can come.
        pooling: Pool the prompt's last hidden states into `RequestOutput.embedding` ("mean", "last" or "cls"), which is
            all that such a request yields: it must have max_tokens=1. `Engine.embed` sets it.
        logits_processors: Functions of (generated ids, logits), or of (prompt ids, generated ids, logits), that return
            the next token's logits; they come before all else, one after the other. With drafts they are also asked
            about tokens that are not kept. An engine in another process takes none, and no server does.
        capture: Hidden states to return with each answer: a `Capture`, a layer, or a list of layers. An engine in
            another process takes none, and no server does; such a request does not draft.
        steer: What to add to the residual stream: a `Steer`, or a mapping of layers to vectors; otherwise as `capture`.

    Raises:
        InvalidValueError: for any value that is not allowed.
    """

    n: int = argument(1, Integers(1, MAX_N), panel=SAMPLING)
    max_tokens: int | None = argument(16, Integers(1, MAX_TOKENS), panel=SAMPLING)
    min_tokens: int = argument(0, Integers(0), panel=SAMPLING)
    temperature: float = argument(1.0, Numbers(0.0, 100.0), panel=SAMPLING)
    top_p: float = argument(1.0, Numbers(0.0, 1.0, open_low=True), panel=SAMPLING)
    top_k: int = argument(0, Integers(-1, MAX_TOP_K), panel=SAMPLING)
    min_p: float = argument(0.0, Numbers(0.0, 1.0), panel=SAMPLING)
    typical_p: float = argument(1.0, Numbers(0.0, 1.0, open_low=True))
    top_n_sigma: float = argument(0.0, Numbers(0.0, 100.0))
    xtc_probability: float = argument(0.0, Numbers(0.0, 1.0))
    xtc_threshold: float = argument(0.1, Numbers(0.0, 1.0))
    dry_multiplier: float = argument(0.0, Numbers(0.0, 100.0))
    dry_base: float = argument(1.75, Numbers(1.0, 10.0))
    dry_allowed_length: int = argument(2, Integers(1, MAX_TOKENS))
    dry_penalty_last_n: int = argument(-1, Integers(-1, MAX_TOKENS))
    dry_sequence_breakers: Sequence[str] = argument(DRY_BREAKERS, Several(WORD, MAX_BREAKERS))
    presence_penalty: float = argument(0.0, Numbers(-2.0, 2.0), panel=SAMPLING)
    frequency_penalty: float = argument(0.0, Numbers(-2.0, 2.0), panel=SAMPLING)
    # Logits divided by less than 0.01 may overflow.
    repetition_penalty: float = argument(1.0, Numbers(0.01, 100.0), panel=SAMPLING)
    seed: int | None = argument(None, Integers(-1, 2**63 - 1))
    stop: str | Sequence[str] | None = argument(None, Several(WORD, MAX_STOP_STRINGS, or_one=True), panel=SAMPLING)
    stop_token_ids: Sequence[int] | None = argument(None, Several(TOKEN_IDS, MAX_STOP_TOKEN_IDS), panel=SAMPLING)
    bad_words: Sequence[str] | None = argument(None, Several(WORD, MAX_BAD_WORDS), panel=SAMPLING)
    ignore_eos: bool = argument(False, Switch(), panel=SAMPLING)
    include_stop_str_in_output: bool = argument(False, Switch(), panel=SAMPLING)
    skip_special_tokens: bool = argument(True, Switch(), panel=SAMPLING)
    detokenize: bool = argument(True, Switch())
    logprobs: int | None = argument(None, Integers(ALL_LOGPROBS, MAX_LOGPROBS))
    prompt_logprobs: int | None = argument(None, Integers(ALL_LOGPROBS, MAX_LOGPROBS))
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = argument(None, Biases())
    truncate_prompt_tokens: int | None = argument(None, Integers(-1, MAX_TOKENS))
    allowed_token_ids: Sequence[int] | None = argument(None, Several(TOKEN_IDS, MAX_ALLOWED_TOKENS, fewest=1))
    cache_salt: str | None = argument(None, Text(MAX_SALT_LENGTH))
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    depth: DepthPolicy | None = None
    structured_outputs: StructuredOutputsParams | None = None
    pooling: str | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    capture: Capture | int | Sequence[int] | None = None
    steer: Steer | Mapping[int, Any] | None = None

    def __post_init__(self) -> None:
        check_arguments(self)
        require(self.n == 1 or not self.greedy, "n", self.n, "1 where temperature is 0, since all would be the same")
        longest = MAX_TOKENS if self.max_tokens is None else self.max_tokens
        require(self.min_tokens <= longest, "min_tokens", self.min_tokens, "at most max_tokens")
        require(
            self.depth is None or isinstance(self.depth, DepthPolicy),
            "depth",
            self.depth,
            "a DepthPolicy or None",
        )
        kinds = "RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY"
        require(isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind, kinds)
        self._check_structured()
        kinds = f"None, or one of {', '.join(POOLINGS)}"
        require(self.pooling is None or self.pooling in POOLINGS, "pooling", self.pooling, kinds)
        is_one = self.pooling is None or (self.max_tokens == 1 and self.n == 1)
        require(is_one, "max_tokens", self.max_tokens, "1, and n=1, where pooling is given")
        require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, "None, -1 or at least 1")
        has_text = self.detokenize or not self.stop
        require(has_text, "stop", self.stop, "None where detokenize is False, since there is no text")
        self._unify()

    def _unify(self) -> None:
        """Bring what may be written in several ways into the one that the engine reads."""
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.logits_processors is not None:
            object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        if self.capture is not None:
            capture = Capture.of(self.capture)
            require(self.pooling is None, "capture", capture, "None where pooling is given")
            is_one = self.n == 1 or capture.path is None
            require(is_one, "n", self.n, "1 where capture has a path, since one file holds the states of one answer")
            object.__setattr__(self, "capture", capture)
        if self.steer is not None:
            object.__setattr__(self, "steer", Steer.of(self.steer))

    def _check_structured(self) -> None:
        form = self.structured_outputs
        is_form = form is None or isinstance(form, StructuredOutputsParams)
        require(is_form, "structured_outputs", form, "StructuredOutputsParams or None")
        allowed = "0 where structured_outputs is given, since the form says where an answer ends"
        require(form is None or not self.min_tokens, "min_tokens", self.min_tokens, allowed)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_other_samplers(self) -> bool:
        """Whether tokens are chosen by what the host alone can do."""
        cuts = self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability > 0
        return self.dry_multiplier > 0 or bool(self.logits_processors) or (cuts and not self.greedy)

    @property
    def captured(self) -> Capture | None:
        """`capture` as it is kept."""
        return self.capture  # type: ignore[return-value]

    @property
    def steered(self) -> Steer | None:
        """`steer` as it is kept."""
        return self.steer  # type: ignore[return-value]

    @property
    def is_hooked(self) -> bool:
        """Whether hidden states are captured or changed."""
        return self.capture is not None or self.steer is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def clone(self) -> SamplingParams:
        """A copy; `dataclasses.replace` makes one with other values."""
        return replace(self)

    def named_token_ids(self) -> dict[str, tuple[int, ...]]:
        """The token ids that the request names, by field; the engine checks them against the model's vocabulary."""
        return {
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "logit_bias": tuple(self.logit_bias or ()),  # type: ignore[arg-type]  # ids by now
        }


def pooling_params(pooling: str) -> SamplingParams:
    """What makes of a request the embedding of its prompt: one token, which no caller sees, at full depth."""
    require(pooling in POOLINGS, "pooling", pooling, " or ".join(POOLINGS))
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        depth=FullDepth(),
        pooling=pooling,
    )


FROM_FILE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that a model's generation_config.json may give, and a task of lm-evaluation-harness."""
CHAT_DEFAULTS: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.9}
"""Of a chat with a model whose files name none of them."""
CHECKS: Mapping[str, Check] = {one.name: one.metadata[CHECK] for one in fields(SamplingParams) if one.metadata}
"""Parameter -> the values that it may have; the others are objects of their own."""
BOUNDS = {name: check for name, check in CHECKS.items() if isinstance(check, Integers | Numbers)}
"""Of the numbers among them."""


def _bias_by_id(bias: Mapping[int, float] | Mapping[str, float]) -> dict[int, float]:
    """A copy whose keys are ids: JSON, and so OpenAI's clients, can only write them as strings."""
    found: dict[int, float] = {}
    for key, value in bias.items():
        number = integer_in(key) if isinstance(key, str) else key
        token = require_integer("logit_bias", key if number is None else number, TOKEN_IDS.low)
        require(token not in found, "logit_bias", key, "a mapping that names each token id once")
        found[token] = require_number("logit_bias", value, BIASES.low, BIASES.high)
    return found


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request runs with, as vLLM names it.

    Args:
        lora_name: its name; requests of one name run with one adapter.
        lora_int_id: a number of at least 1 that no other name has; None: none.
        lora_path: the directory that PEFT has written; "" for an adapter that is loaded already.
    """

    lora_name: str
    lora_int_id: int | None = None
    lora_path: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        require_name("lora_name", self.lora_name)
        if self.lora_int_id is not None:
            require_integer("lora_int_id", self.lora_int_id, 1)
        require(isinstance(self.lora_path, str | os.PathLike), "lora_path", self.lora_path, "a directory")

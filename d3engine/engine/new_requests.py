"""From what a user asks for to sequences that can run: everything is checked here, before anything is queued."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AnySequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from d3engine.depth import NEVER, DepthPolicy, Schedule
from d3engine.depth.policy import DraftRule
from d3engine.engine.depth import Certification
from d3engine.engine.resolve import check_policy
from d3engine.engine.settings import EngineSettings
from d3engine.errors import InvalidValueError, require
from d3engine.executor.adapters import AdapterStore
from d3engine.executor.bridging import BridgeStore
from d3engine.request.engine_request import EngineRequest
from d3engine.request.hidden_states import Capture, Steer, path_of
from d3engine.request.params import PRIORITIES, SamplingParams
from d3engine.scheduling.sequence import Draft, Sequence
from d3engine.text.prompts import Prompt, PromptReader
from d3engine.text.structured.forms import Forms
from d3engine.text.tokenizer import Tokenizer
from d3engine.utils.files import is_writable

Same = Mapping[str, tuple[tuple[Any, ...], str]]
"""By an argument's name: the values that ask for what happens anyway, and what is allowed in words."""

_PROMPTS = "None: name token ids as the prompt instead"

OF_CALLS: Same = {
    "prompt_adapter_request": ((None,), "None, since adapters are LoRA's (lora_request)"),
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


NUM_KEPT = 64
"""Schedules to remember: most requests share a few policies, but each may bring its own."""


class NewRequests:
    """Makes the sequences of an engine's requests, and knows how many there were.

    A policy of the engine that does not fit the model is refused at once. Requests without a seed get the engine's and
    their place in the order of arrival. `bridges` has those that policies may name, `adapters` those that requests may.
    """

    def __init__(
        self, settings: EngineSettings, tokenizer: Tokenizer | None, bridges: BridgeStore, adapters: AdapterStore
    ) -> None:
        config = settings.config
        self._settings, self._adapters = settings, adapters
        self._num_layers, self._hidden_size = config.num_layers, config.hidden_size
        self._prompts = PromptReader(config, tokenizer, settings.max_model_len)
        self._forms = Forms(tokenizer, config.vocab_size)
        self._num_sequences = 0
        log = Certification(settings.directory, config.num_layers).log
        self._fit = lru_cache(NUM_KEPT)(partial(_fit, settings=settings, bridges=bridges, log=log))
        self._fit(settings.depth)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: object = None,
    ) -> EngineRequest:
        """Read and check a request. Nothing but a memory of schedules changes, so any thread may do it at any time.

        Raises `InvalidValueError` for what can never run.
        """
        is_name = request_id is None or (isinstance(request_id, str) and request_id != "")
        require(is_name, "request_id", request_id, "a non-empty string")
        require(isinstance(params, SamplingParams), "sampling_params", params, "SamplingParams")
        PRIORITIES.check("priority", priority)
        text, token_ids = self._prompts.read(prompt, params)
        self._prompts.check_params(params)
        schedule, draft_rule = self._fit(params.depth or self._settings.depth)
        adapter = None
        if lora_request is not None:
            adapter = self._adapters.of_request(lora_request)
            drafts = None if draft_rule is None else draft_rule.schedule
            has_student = schedule.students or (drafts is not None and drafts.students)
            without = "None beside a student, whose layers an adapter was not trained for"
            require(not has_student, "lora_request", lora_request, without)
        self._check_hooks(params, len(token_ids))
        return EngineRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            priority=priority,
            schedule=schedule,
            draft_rule=draft_rule,
            rules=self._prompts.rules(params),
            form=None if params.structured_outputs is None else self._forms.compile(params.structured_outputs),
            owner=self,
            adapter=adapter,
        )

    def _check_hooks(self, params: SamplingParams, prompt_length: int) -> None:
        """Refuse hidden states that the model has not, or that are too many, and what cannot be added to them."""
        capture, steer = params.captured, params.steered
        if capture is not None:
            capture.check(self._num_layers, self._hidden_size, prompt_length, self._max_length(params, prompt_length))
            path = path_of(capture)
            require(path is None or is_writable(path), "capture", str(path), "of a path that can be written")
        if steer is not None:
            steer.check(self._num_layers, self._hidden_size)
            exits = (params.depth or self._settings.depth).exit_rule(self._num_layers) is not None
            require(not exits, "steer", steer, "None with a depth policy whose tokens leave early")
            is_alone = self._settings.tensor_parallel_size == 1
            require(is_alone, "steer", steer, "None where tensor_parallel_size is above 1")

    def _max_length(self, params: SamplingParams, prompt_length: int) -> int:
        most = self._settings.max_model_len
        return min(prompt_length + (params.max_tokens or most), most)

    def probe(self, prepared: EngineRequest) -> Sequence:
        """A sequence like the request's own, to check whether they would fit; it must not be queued."""
        return self._sequence(prepared, prepared.request_id or "", index=0, number=0)

    def sequences(self, prepared: EngineRequest, request_id: str, call: str | None = None) -> list[Sequence]:
        """The sequences of a request that arrives now, with others of the same `call` if it names one.

        Raises `InvalidValueError` for one that was prepared for another engine, whose limits are not these.
        """
        require(prepared.owner is self, "prepared", prepared, "prepared by this engine")
        first = self._num_sequences
        self._num_sequences += prepared.params.n
        sequences = [self._sequence(prepared, request_id, i, first + i) for i in range(prepared.params.n)]
        for sequence in sequences:
            sequence.flow = prepared.flow or ("", call or request_id)
        if prepared.form is not None:
            for sequence in sequences:
                ends = sequence.eos_token_ids.union(prepared.params.stop_token_ids or ())
                sequence.constraint = prepared.form.begin(ends)
        return sequences

    def _sequence(self, prepared: EngineRequest, request_id: str, index: int, number: int) -> Sequence:
        """One sequence of a request, the `number`-th of all."""
        params, token_ids, rule = prepared.params, prepared.prompt_token_ids, prepared.draft_rule
        own = params if index == 0 or params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        seed = params.seed if params.seed is not None else self._settings.seed + number - index
        return Sequence(
            request_id=request_id,
            index=index,
            prompt_token_ids=token_ids,
            params=own,
            schedule=prepared.schedule,
            eos_token_ids=frozenset() if params.ignore_eos else self._prompts.eos_token_ids,
            rules=prepared.rules,
            seed=seed & (2**63 - 1),
            priority=prepared.priority,
            arrival=number,
            max_length=self._max_length(params, len(token_ids)),
            shares_prompt=own.prompt_logprobs is None
            and own.pooling in (None, "last")
            and self._prompts.may_share(token_ids),
            exit_rule=(params.depth or self._settings.depth).exit_rule(self._num_layers),
            draft=None if rule is None or params.is_hooked else Draft(rule),
            adapter=prepared.adapter,
        )


def _fit(
    policy: DepthPolicy, settings: EngineSettings, bridges: BridgeStore, log: Callable[[DepthPolicy], None]
) -> tuple[Schedule, DraftRule | None]:
    """The schedule of a policy for the engine's model, and how it drafts.

    Raises `InvalidValueError` for a policy that does not fit the model, drafts with a model that is not loaded, or
    names bridges that cannot be had.
    """
    check_policy(settings, policy)
    num_layers = settings.config.num_layers
    schedule = policy.schedule(num_layers)
    require(schedule.num_layers == num_layers, "depth", policy, f"a schedule of the model's {num_layers} layers")
    if policy.exit_rule(num_layers) is not None:
        fits = schedule.first_skipping_step == NEVER and schedule.on_skip != "none"
        require(fits, "depth", policy, "of full depth beside its exit rule, with on_skip 'copy' or 'project'")
    rule, own_rule = policy.draft_rule(num_layers), settings.depth.draft_rule(num_layers)
    model = None if own_rule is None else own_rule.model
    loaded = f"the engine's own draft model, {model!r} (Engine(depth=Speculative(draft_model)) loads it)"
    require(rule is None or rule.model in (None, model), "draft_model", rule and rule.model, loaded)
    for skipping in (schedule, None if rule is None else rule.schedule):
        if skipping is not None and (skipping.bridges is not None or skipping.students):
            bridges.check(skipping)
    log(policy)
    return schedule, rule


def params_of_each(count: int, given: SamplingParams | AnySequence[SamplingParams]) -> list[SamplingParams]:
    """The parameters of each of `count` prompts: one for all, or one each."""
    if isinstance(given, SamplingParams):
        return [given] * count
    require(isinstance(given, AnySequence), "sampling_params", given, "SamplingParams, or a list of them")
    require(len(given) == count, "sampling_params", f"{len(given)} of them", f"one, or {count}: one for each prompt")
    for params in given:
        require(isinstance(params, SamplingParams), "sampling_params", params, "SamplingParams")
    return list(given)


def with_hooks(each: list[SamplingParams], capture: object, steer: object) -> list[SamplingParams]:
    """The parameters with what a call captures and steers by, where they have none.

    Raises `InvalidValueError` where two prompts would write one file.
    """
    own_capture = None if capture is None else Capture.of(capture)
    own_steer = None if steer is None else Steer.of(steer)
    if own_capture is not None or own_steer is not None:
        each = [replace(one, capture=one.capture or own_capture, steer=one.steer or own_steer) for one in each]
    paths = [path for one in each if (path := path_of(one.captured)) is not None]
    allowed = "another path for each prompt: one SamplingParams each, or no path"
    require(len(set(paths)) == len(paths), "capture", str(paths[0]) if paths else None, allowed)
    return each


def adapters_of_each(count: int, given: object) -> list[object]:
    """The `lora_request` of each of `count` prompts: one for all, or a list with one, or None, for each."""
    if not isinstance(given, list | tuple):
        return [given] * count
    require(len(given) == count, "lora_request", f"{len(given)} of them", f"one, or {count}: one for each prompt")
    return list(given)

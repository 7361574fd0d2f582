"""Engine: the scheduler plans, the executor computes, the sampler chooses, the scheduler
takes in what came. Text lives at the edge: encoded in `add_request`, decoded in `OutputProcessor`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AnySequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from d3engine.engine.assembly import assemble
from d3engine.engine.call_lock import CallLock, EngineState, Interrupt
from d3engine.engine.chats import Chats
from d3engine.engine.engine_config import RENAMED, EngineConfig
from d3engine.engine.executors import adapter_store, bridge_store
from d3engine.engine.host import pytorch_threads, pytorch_threads_for
from d3engine.engine.model_directory import default_sampling_params
from d3engine.engine.new_requests import NewRequests, adapters_of_each, params_of_each, refuse_others, with_hooks
from d3engine.engine.prefix_file import PrefixFile
from d3engine.engine.request_registry import RequestRegistry
from d3engine.engine.resolve import resolve_settings
from d3engine.engine.settings import EngineProperties
from d3engine.engine.stats import EngineStats, engine_stats
from d3engine.errors import EngineDeadError, require
from d3engine.executor.verification import VerifyingSampler
from d3engine.executor.warm_up import warm_up
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import DEFAULT_POOLING, RequestOutputKind, SamplingParams, pooling_params
from d3engine.request.pooling import FloatArray, embedding_of
from d3engine.text.chat_template import ChatPrompts
from d3engine.text.prompts import Prompt, as_list
from d3engine.text.tokenizer import load_tokenizer
from d3engine.utils.arguments import accepts
from d3engine.utils.progress import hides_bars


class Engine(Chats, EngineProperties):
    """A Llama model ready to generate.

    It takes one call at a time: threads may share it if they take turns, and a call made while another is running
    raises `EngineBusyError`. Many prompts run together in one `generate`, or by `add_request` and `step`. Only
    `prepare`, `has_unfinished_requests` and `get_num_unfinished_requests` may be called at any time. What a signal
    handler raises while it works in the main thread (Ctrl-C, a time limit by SIGALRM) ends the call between two steps:
    its own requests end, and the engine goes on.

    Args:
        config: the fields of `EngineConfig` as arguments: `Engine(model, max_num_seqs=8)`.

    Raises:
        InvalidValueError: for an argument that is not allowed.
        ModelFormatError: for files that cannot be loaded.
        MissingExtraError: for a model of the hub without the extra `hub`, a GGUF file without `gguf`.
        FailedError: for one that could not be downloaded.
    """

    @accepts(EngineConfig, RENAMED)
    def __init__(self, config: EngineConfig) -> None:
        settings = resolve_settings(config)
        self.settings = settings
        self.default_sampling_params = default_sampling_params(settings.directory)
        texts = Path(config.tokenizer or settings.directory)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(texts)
        with pytorch_threads(settings.num_threads):
            self.bridges = bridge_store(settings)
            self.adapters = adapter_store(settings)
            # What does not fit the model is refused before the weights are loaded.
            self._requests = NewRequests(settings, self.tokenizer, self.bridges, self.adapters)
            self.scheduler, self.executor = assemble(settings, self.tokenizer, config.weights, self.bridges)
            self.executor.make_students()
            if settings.warms_up:
                warm_up(
                    self.executor,
                    settings.scheduler_config,
                    block_size=settings.block_size,
                    adapters=self.adapters,
                    bridges=self.bridges,
                )
            self._prefix_file = PrefixFile.of(settings, self.executor.stats.executor)
            if self._prefix_file is not None:
                self._prefix_file.read(self.scheduler.prefix_cache, self.executor.pool)
        self._pytorch_threads = pytorch_threads_for(settings.config, settings.num_threads)
        self.sampler = VerifyingSampler()
        self._chat_prompts = ChatPrompts(self.directory, self.tokenizer)
        self._life = EngineState()
        self._in_flight = RequestRegistry(self.scheduler, self.tokenizer, self._life, settings.stream_interval)
        self._caller = CallLock()

    # -- whole answers -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | AnySequence[Prompt],
        sampling_params: SamplingParams | AnySequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        capture: Any = None,
        steer: Any = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer `prompts` and return their outputs in order.

        A prompt is a text, token ids (a list, or an array of numpy or torch), `{"prompt": text}` or
        `{"prompt_token_ids": ids}`; one prompt may stand alone. One `SamplingParams` serves all prompts, or one stands
        for each; without, generation_config.json decides. `lora_request` names the adapter of all, or is a list with
        one, or None, for each (`LoRARequest`, or a name). `capture` and `steer` are those of `SamplingParams`, of all
        prompts whose parameters have none. Every prompt is checked before the first one runs. vLLM's
        other arguments are refused by name unless they ask for nothing.
        """
        refuse_others(of_vllm, "generate")
        with self._call() as interrupt:
            self._life.check()
            prompts = as_list(prompts)
            given = self.default_sampling_params if sampling_params is None else sampling_params
            params = with_hooks(params_of_each(len(prompts), given), capture, steer)
            adapters = adapters_of_each(len(prompts), lora_request)
            ids = [self._in_flight.new_id() for _ in prompts]
            requests = []
            for prompt, own, adapter in zip(prompts, params, adapters, strict=True):
                requests.append(self.prepare(prompt, own, lora_request=adapter))
                interrupt.deliver()
            done: dict[str, RequestOutput] = {}
            try:
                answers = self._in_flight.delivery.claim(ids)
                for request, request_id in zip(requests, ids, strict=True):
                    self._queue(request, request_id, RequestOutputKind.FINAL_ONLY, call=ids[0])
                shown: dict[str, Any] = {"desc": "generate", "unit": "request", "disable": bool(hides_bars())}
                with tqdm(total=len(ids), **shown) if use_tqdm else nullcontext() as bar:
                    while len(done) < len(ids):
                        interrupt.deliver()
                        self._advance()
                        done |= {output.request_id: output for output in answers}
                        if bar is not None:
                            bar.update(len(answers))
                        answers.clear()
            finally:
                self._in_flight.drop(ids)
            return [done[i] for i in ids]

    def embed(
        self,
        prompts: Prompt | AnySequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> FloatArray:
        """Return one embedding for each prompt, float32 [prompts, dimensions].

        An embedding pools the model's last hidden states, after its final norm, at full depth: by their mean, the last
        token's or the first one's ("mean", "last", "cls"). None is the pooling that the model's own files name, or else
        the mean. `dimensions` keeps the first ones, and `normalize` then brings each to length 1. Prompts are as for
        `generate`, and run together; an embedding does not depend on the others.

        Raises `InvalidValueError` for what can never run.
        """
        kind = pooling or self.own_pooling or DEFAULT_POOLING
        prompts = as_list(prompts)
        found = self.generate(prompts, pooling_params(kind), use_tqdm=use_tqdm)
        size = self.config.hidden_size if dimensions is None else dimensions
        each = [embedding_of(output, normalize=normalize, dimensions=dimensions) for output in found]
        return np.stack(each) if each else np.empty((0, size), np.float32)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora_request: Any = None
    ) -> Iterator[RequestOutput]:
        """Yield the output of one prompt as it grows, after every step; leaving the loop aborts the request.

        Each output holds all there is so far. With `output_kind=RequestOutputKind.DELTA` it holds what is new alone,
        which for long answers is much less work; with FINAL_ONLY there is one output, at the end. The reader may use
        the engine between two outputs: none of the stream's is lost by it.
        """
        with self._call():
            return self._stream(self._in_flight.new_id(), self.prepare(prompt, params, lora_request=lora_request))

    def _stream(self, request_id: str, request: EngineRequest) -> Iterator[RequestOutput]:
        try:
            with self._call():
                self._life.check()
                outputs = self._in_flight.delivery.claim([request_id])
                self._queue(request, request_id, request.params.output_kind)
            while True:
                if not outputs:
                    with self._call() as interrupt:
                        while not outputs:
                            interrupt.deliver()
                            self._advance(at_once=request.params.n == 1)
                yield (output := outputs.pop(0))
                if output.finished:
                    return
        finally:
            self._caller.leave(request_id, self._in_flight.drop)

    # -- the step API ------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: Any = None,
        **of_vllm: Any,
    ) -> None:
        """Queue a request; `step()` will return its outputs, as its `output_kind` says. Lower `priority` runs first.

        Among equals requests take turns: the second sequence of one runs after the first of another.

        Raises `InvalidValueError` for a prompt or parameters that can never run; the engine is as before.
        """
        refuse_others(of_vllm, "add_request")
        require(isinstance(request_id, str), "request_id", request_id, "a non-empty string")
        self.add(self.prepare(prompt, params, request_id, priority, lora_request=lora_request))

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        lora_request: Any = None,
    ) -> EngineRequest:
        """Read and check a request for `add`, which is then quick; nothing is queued, and nothing is changed.

        Any thread may call it at any time, while another steps the engine too. Raises `InvalidValueError` for what can
        never run.
        """
        self._life.check()
        given = self.default_sampling_params if params is None else params
        with pytorch_threads(self._pytorch_threads):  # bridges and adapters are loaded for the first request of them
            prepared = self._requests.prepare(prompt, given, request_id, priority, lora_request)
        self.scheduler.fit(self._requests.probe(prepared))
        return prepared

    def add(self, prepared: EngineRequest) -> str:
        """Queue a request as `add_request` does, and return its id; one that has none gets one.

        Requests run, and those without a seed get theirs, in the order in which they are added. Raises
        `InvalidValueError` for an id that is taken, and for what another engine has prepared.
        """
        with self._call():
            self._life.check()
            require(isinstance(prepared, EngineRequest), "prepared", prepared, "what prepare() returns")
            request_id = self._in_flight.free_id(prepared.request_id)
            self._queue(prepared, request_id, prepared.params.output_kind)
            return request_id

    def step(self, *, at_once: bool = False) -> list[RequestOutput]:
        """Run one step for the whole batch; returns the requests that have grown or finished.

        A device may have run ahead of its reader: with `at_once` all steps that are done by now are taken, and a
        request may have an output for each of its tokens, in order. Outputs that waited are returned even if this step
        fails: then the next call raises `EngineDeadError`.
        """
        with self._call() as interrupt:
            try:
                self._advance(at_once=at_once)
            except EngineDeadError:
                if not len(self._in_flight.delivery):
                    raise
            interrupt.deliver()
            return self._in_flight.delivery.take()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests now; their last output, with finish_reason "abort", comes with the next `step()`.

        Ids of requests that have finished or never were are passed over: they may finish while the caller aborts.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._call():
            self._life.check()
            self._in_flight.abort(ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything left to do or to return."""
        return bool(len(self._in_flight.outputs) or len(self._in_flight.delivery))

    def is_ahead(self) -> bool:
        """Whether a device is at the next step already, or has done it: `step()` will soon return its tokens."""
        return self.scheduler.is_ahead

    def get_num_unfinished_requests(self) -> int:
        return len(self._in_flight.outputs)

    def reset_prefix_cache(self) -> None:
        """Forget all shared prompt blocks, and earlier answers that lookups see; running requests keep their blocks."""
        with self._call():
            self._life.check()
            self.scheduler.forget_earlier()

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it began."""
        with self._call():
            self._life.check_open()
            nominal, timings = self._in_flight.nominal.mean(), self._in_flight.timings
            return engine_stats(self.scheduler, self.executor, self.settings.block_bytes, nominal, timings)

    @property
    def lora_adapters(self) -> dict[str, str]:
        """Name -> path of the adapters that were loaded by name."""
        return self.adapters.paths

    def load_lora_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the adapter of a directory that PEFT has written; requests may name it from now on. Any thread may.

        On a GPU it compiles the kernels that no adapter before has needed. Raises `InvalidValueError` for a name that
        is taken, and for what is no LoRA adapter of this model.
        """
        self._life.check()
        self.adapters.load(name, path)

    def unload_lora_adapter(self, name: str) -> None:
        """Let no further request name an adapter; those that have begun keep it. Any thread may."""
        self._life.check()
        self.adapters.unload(name)

    def close(self) -> None:
        """Drop weights, cache and requests, and write the prefix cache file; calling it again does nothing."""
        with self._call():
            is_sound = self._life.is_sound  # a fault may have left any entries behind
            if self._life.close():
                if self._prefix_file is not None and is_sound:
                    self._prefix_file.write(self.scheduler.prefix_cache, self.executor.pool)
                self.executor.close()
                del self.executor
                self._in_flight = RequestRegistry(self.scheduler, self.tokenizer, self._life)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[Interrupt]:
        """What a public method does to the engine is done in here; none calls another from inside but `prepare`."""
        with self._caller.call(self._in_flight.drop) as interrupt, pytorch_threads(self._pytorch_threads):
            yield interrupt

    def _advance(self, *, at_once: bool = False) -> None:
        """Run one step, or take all that a run has done by now, and lay out what came of it for whom it is for."""
        with self._life.ended_by_faults():
            begun = time.monotonic()
            plan = self.scheduler.schedule()
            if plan is not None:
                plan.take_all_done(at_once)
                computed = self.executor.run(plan)
                plan = computed.carried_out(plan)
                tokens = self.sampler(computed.logits, plan)
                outputs = self.scheduler.update(plan, tokens, computed.depths)
                self._in_flight.deliver(plan, tokens, outputs, begun, computed)

    def _queue(
        self, prepared: EngineRequest, request_id: str, kind: RequestOutputKind, *, call: str | None = None
    ) -> None:
        self._in_flight.add(self._requests.sequences(prepared, request_id, call), prepared.prompt, kind)

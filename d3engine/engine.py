"""Engine: prompts in, text out, and between them one step that reads like the design.

The core is token-in/token-out: `scheduler` plans, `executor` computes, `sampler` chooses, and `scheduler` takes in
what came. Text lives at the edge: prompts are encoded in `add_request`, answers decoded in `OutputProcessor`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as AnySequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from tqdm import tqdm

from d3engine.calls.call_lock import CallLock, EngineState, Interrupt
from d3engine.calls.chats import Chats
from d3engine.calls.new_requests import NewRequests, params_of_each, refuse_others
from d3engine.calls.request_registry import RequestRegistry
from d3engine.depth import DepthPolicy
from d3engine.errors import EngineDeadError, require, require_integer
from d3engine.loading.assembly import assemble
from d3engine.loading.depth import Certification
from d3engine.loading.executors import bridge_store
from d3engine.loading.host import pytorch_threads, pytorch_threads_for
from d3engine.loading.model_directory import default_sampling_params
from d3engine.loading.resolve import check_policy, check_switches, check_tokenizer, resolve_settings
from d3engine.loading.settings import EngineProperties
from d3engine.model.weights import LlamaWeights
from d3engine.request.engine_request import EngineRequest
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind, SamplingParams
from d3engine.sampling.verification import VerifyingSampler
from d3engine.scheduling.waiting import Admission
from d3engine.stats import EngineStats, engine_stats
from d3engine.text.chat_template import ChatPrompts
from d3engine.text.prompts import Prompt, as_list
from d3engine.text.tokenizer import load_tokenizer


class Engine(Chats, EngineProperties):
    """A Llama model ready to generate.

    It takes one call at a time: threads may share it if they take turns, and a call made while another is running
    raises `EngineBusyError`. Many prompts run together in one `generate`, or by `add_request` and `step`. Only
    `prepare`, `has_unfinished_requests` and `get_num_unfinished_requests` may be called at any time. What a signal
    handler raises while it works in the main thread (Ctrl-C, a time limit by SIGALRM) ends the call between two steps:
    its own requests end, and the engine goes on.

    Args:
        model: a model directory, a GGUF file, "demo" for the model that comes with the package, "smollm2" once it is
            fetched, or "owner/name" of the Hugging Face hub, at a branch, a tag or a commit as "owner/name@revision".
        depth: which layers each generated token runs: a policy such as `D3(alpha, start)`, or "auto": what
            `d3.json` beside the weights says, full depth without one. That file's setting was found for one task, which
            it names, and runs every request all the same. A request may bring its own. The log warns once of each
            policy that was never certified for the model.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        dtype: of activations, float weights, and the cache: "auto" (float32 on a CPU, the file's on a GPU), "float32",
            "bfloat16"; "float16" on a GPU. Quantized matrices stay as their directory has them; a GGUF file's do not.
        weight_dtype: of float matrices and the embedding alone: `dtype`, or on a CPU "bfloat16" or "float16" under
            float32 activations: half of the bytes, and a file's own tokens. "auto" keeps a file's bfloat16, and rounds
            what a GGUF file has quantized to it, where the native library decodes and no `dtype` is named.
        pack_weights: hold bfloat16 matrices in 12 bits a weight, for the native library on a CPU: a quarter less memory
            to hold and to read, and the very same weights.
        max_model_len: tokens of prompt and answer at most; None: what the model was made for, or what fits the memory.
        max_num_seqs: sequences that run at once at most.
        max_num_batched_tokens: rows of one step at most; longer prompts are computed in pieces.
        block_size: KV entries per block.
        kv_cache_dtype: of cache entries: "auto", that of activations, or "fp8" ("fp8_e4m3"), 8-bit floats with a scale
            for each head of each entry: two to four times as many fit. On a GPU it takes compute capability 8.9.
        kv_cache_memory_bytes: size of the KV cache; None: 1 GiB on a CPU (or one whole sequence if that is more), a
            share of the device's memory on a GPU.
        gpu_memory_utilization: that share, counting what weights, CUDA graphs and the largest step take.
        enable_prefix_caching: let prompts share the blocks of a common beginning.
        admission: when waiting requests join the batch: `Immediate()` or `IntervalAdmission(steps)`.
        enforce_eager: run without CUDA graphs and without the native library: each operation is called by the host.
        num_scheduler_steps: tokens of each answer that a batch may generate without the host, which looks at them
            afterwards, or meanwhile for requests that stream; None: 16 with CUDA graphs or the native library, and
            always 1 without. None lets a small model's native runs of few answers be longer, up to 128 tokens, and all
            of its runs four times as long for streaming callers.
        num_threads: threads on a CPU, of the native library and of PyTorch, which gets fewer where layers are small;
            None: PyTorch's, within CPUs and their quota. Outside of the engine's calls PyTorch's are as before.
        tensor_parallel_size: devices that the model is spread over, each a process of its own: of this machine, or of
            those that torchrun has started. On CPUs without the native library.
        batch_invariant: let a request's tokens and logits be the same bits in any batch, however its prompt
            is cut, and after a preemption or a prefix hit. On a GPU slower; refused where it cannot be had.
        stream_interval: tokens from one output of a request to the next; its first and its last come at once.
        seed: from which requests without a seed get theirs.
        tokenizer: a directory or a GGUF file to take the tokenizer from; None: the model's.
        skip_tokenizer_init: work with token ids alone.
        weights: ready weights instead of those in the directory (random ones for a benchmark, say).

    Raises:
        InvalidValueError: for an argument that is not allowed.
        ModelFormatError: for files that cannot be loaded.
        MissingExtraError: for a model of the hub without the extra `hub`, a GGUF file without `gguf`.
        FailedError: for one that could not be downloaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        depth: DepthPolicy | str = "auto",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        weight_dtype: str | torch.dtype = "auto",
        pack_weights: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        admission: Admission | None = None,
        enforce_eager: bool = False,
        num_scheduler_steps: int | None = None,
        num_threads: int | None = None,
        tensor_parallel_size: int = 1,
        batch_invariant: bool = False,
        stream_interval: int = 1,
        seed: int = 0,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        weights: LlamaWeights | None = None,
    ) -> None:
        require_integer("seed", seed, 0, 2**63 - 1)
        check_switches(skip_tokenizer_init=skip_tokenizer_init)
        check_tokenizer(tokenizer, skip_tokenizer_init)
        settings = resolve_settings(
            model,
            depth=depth,
            device=device,
            dtype=dtype,
            weight_dtype=weight_dtype,
            held=None if weights is None else weights.weight_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            admission=admission,
            enforce_eager=enforce_eager,
            num_scheduler_steps=num_scheduler_steps,
            num_threads=num_threads,
            tensor_parallel_size=tensor_parallel_size,
            batch_invariant=batch_invariant,
            stream_interval=stream_interval,
            pack_weights=pack_weights,
        )
        self.settings = settings
        self.default_sampling_params = default_sampling_params(settings.directory)
        self.tokenizer = None if skip_tokenizer_init else load_tokenizer(Path(tokenizer or settings.directory))
        with pytorch_threads(settings.num_threads):
            self.bridges = bridge_store(settings)
            self._requests = NewRequests(  # what does not fit the model is refused before the weights are loaded
                settings.config,
                self.tokenizer,
                settings.depth,
                settings.max_model_len,
                seed=seed,
                bridges=self.bridges,
                check=partial(check_policy, settings),
                log=Certification(settings.directory, settings.config.num_layers).log,
            )
            self.scheduler, self.executor = assemble(settings, self.tokenizer, weights, self.bridges)
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
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer `prompts` and return their outputs in order.

        A prompt is a text, token ids (a list, or an array of numpy or torch), `{"prompt": text}` or
        `{"prompt_token_ids": ids}`; one prompt may stand alone. One `SamplingParams` serves all prompts, or one stands
        for each; without, generation_config.json decides. Every prompt is checked before the first one runs. vLLM's
        other arguments are refused by name unless they ask for nothing.
        """
        refuse_others(of_vllm, "generate")
        with self._call() as interrupt:
            self._life.check()
            prompts = as_list(prompts)
            given = self.default_sampling_params if sampling_params is None else sampling_params
            params = params_of_each(len(prompts), given)
            ids = [self._in_flight.new_id() for _ in prompts]
            requests = []
            for asked in zip(prompts, params, strict=True):
                requests.append(self.prepare(*asked))
                interrupt.deliver()
            done: dict[str, RequestOutput] = {}
            try:
                answers = self._in_flight.claim(ids)
                for request, request_id in zip(requests, ids, strict=True):
                    self._queue(request, request_id, RequestOutputKind.FINAL_ONLY, call=ids[0])
                with tqdm(total=len(ids), desc="generate", unit="request") if use_tqdm else nullcontext() as bar:
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

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the output of one prompt as it grows, after every step; leaving the loop aborts the request.

        Each output holds all there is so far. With `output_kind=RequestOutputKind.DELTA` it holds what is new alone,
        which for long answers is much less work; with FINAL_ONLY there is one output, at the end. The reader may use
        the engine between two outputs: none of the stream's is lost by it.
        """
        with self._call():
            return self._stream(self._in_flight.new_id(), self.prepare(prompt, params))

    def _stream(self, request_id: str, request: EngineRequest) -> Iterator[RequestOutput]:
        try:
            with self._call():
                self._life.check()
                outputs = self._in_flight.claim([request_id])
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
        **of_vllm: Any,
    ) -> None:
        """Queue a request; `step()` will return its outputs, as its `output_kind` says. Lower `priority` runs first.

        Among equals requests take turns: the second sequence of one runs after the first of another.

        Raises `InvalidValueError` for a prompt or parameters that can never run; the engine is as before.
        """
        refuse_others(of_vllm, "add_request")
        require(isinstance(request_id, str), "request_id", request_id, "a non-empty string")
        self.add(self.prepare(prompt, params, request_id, priority))

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None, priority: int = 0
    ) -> EngineRequest:
        """Read and check a request for `add`, which is then quick; nothing is queued, and nothing is changed.

        Any thread may call it at any time, while another steps the engine too. Raises `InvalidValueError` for what can
        never run.
        """
        self._life.check()
        given = self.default_sampling_params if params is None else params
        with pytorch_threads(self._pytorch_threads):  # bridges are loaded for the first request that names them
            prepared = self._requests.prepare(prompt, given, request_id, priority)
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
        """Forget all shared prompt blocks; running requests keep theirs."""
        with self._call():
            self._life.check()
            self.scheduler.prefix_cache.clear()

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it began."""
        with self._call():
            self._life.check_open()
            nominal, timings = self._in_flight.nominal.mean(), self._in_flight.timings
            return engine_stats(self.scheduler, self.executor, self.settings.block_bytes, nominal, timings)

    def close(self) -> None:
        """Drop weights, cache and requests; calling it again does nothing."""
        with self._call():
            if self._life.close():
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
                self._in_flight.deliver(plan, tokens, outputs, begun)

    def _queue(
        self, prepared: EngineRequest, request_id: str, kind: RequestOutputKind, *, call: str | None = None
    ) -> None:
        self._in_flight.add(self._requests.sequences(prepared, request_id, call), prepared.prompt, kind)

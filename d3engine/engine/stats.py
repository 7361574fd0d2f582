"""What `Engine.stats()` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from d3engine.executor.interface import Executor
from d3engine.request.outputs import REQUEST_SECONDS, STEP_ROWS, STEP_SECONDS, Histogram, HistogramCounter, Timings
from d3engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine now, and since it began.

    `nominal_mean_layers` is what the schedules promise over max_tokens of every request, `realised_mean_layers` the
    layers truly run for the tokens truly generated; None before there are any. `kv_bytes_saved` is what the running
    sequences do not hold now although full depth would, `kv_bytes_saved_at_end` the sum of the same over finished
    sequences when each ended. `kv_blocks_cached` are held by the prefix cache alone.

    `executor` says in words what decodes: "native (avx512, threads: 2)", "CUDA graphs" or "eager"; `backend` is what
    computes, as the argument of `Engine` names it: "native", "torch" or "triton". With CUDA graphs:
    how many were captured, in how many seconds, with what memory. `graph_steps` ran in graphs, `native_steps` in the
    native library; the others, such as prompts beside graphs, are `eager_steps`, whose operations the host called, for
    one sequence at least.
    `bridge_bytes` is the memory of the bridges that policies have named, `student_bytes` that of the matrices of
    students that are made, beyond the model's own.
    `layers_run` are all layers run for the tokens generated, `layers_full` what full depth would have run for them;
    `token_layers[d]` counts the tokens that took d layers (the last: or more, as a drafted token's share may). Of each
    step: its seconds and rows; a run of steps that a device takes by itself counts as steps of equal length. Of each
    request that has ended: seconds in the queue, from there to its first token, and from there to its last.
    `last_step_time` is on the monotonic clock; the last three are None before the first step.

    `prompts` has the requests that run and whose prompts are not yet computed: id -> (tokens, of which cached, of which
    computed by now, the cached ones included).

    Sequences that draft count as full depth nominally; realised are all layers run for all rows of their drafts and
    verifications, over the tokens that came of them. `accepted_at[i]` counts the accepted tokens that were the i-th of
    their draft, from 0. The rates are None before anything was drafted.
    """

    num_waiting: int
    num_running: int
    num_steps: int
    num_preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    nominal_mean_layers: float | None
    realised_mean_layers: float | None
    kv_blocks_total: int
    kv_blocks_in_use: int
    kv_blocks_cached: int
    kv_bytes_in_use: int
    kv_bytes_saved: int
    kv_bytes_saved_at_end: int
    executor: str = "eager"
    backend: str = "torch"
    graphs_captured: int = 0
    graph_capture_seconds: float = 0.0
    graph_memory_bytes: int = 0
    graph_steps: int = 0
    native_steps: int = 0
    eager_steps: int = 0
    bridge_bytes: int = 0
    student_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    accepted_at: tuple[int, ...] = ()
    acceptance_rate: float | None = None
    tokens_per_verification: float | None = None
    layers_run: int = 0
    layers_full: int = 0
    token_layers: tuple[int, ...] = ()
    step_seconds: Histogram = field(default_factory=HistogramCounter(STEP_SECONDS).histogram)
    step_rows: Histogram = field(default_factory=HistogramCounter(STEP_ROWS).histogram)
    queue_seconds: Histogram = field(default_factory=HistogramCounter(REQUEST_SECONDS).histogram)
    prefill_seconds: Histogram = field(default_factory=HistogramCounter(REQUEST_SECONDS).histogram)
    decode_seconds: Histogram = field(default_factory=HistogramCounter(REQUEST_SECONDS).histogram)
    last_step_time: float | None = None
    last_step_seconds: float | None = None
    last_step_rows: int | None = None
    prompts: dict[str, tuple[int, int, int]] = field(default_factory=dict)


def engine_stats(
    scheduler: Scheduler, executor: Executor, block_bytes: int, nominal_mean_layers: float | None, timings: Timings
) -> EngineStats:
    """The stats of a scheduler whose blocks have `block_bytes` bytes, and of the executor that runs its plans."""
    counters, pool = scheduler.counters, scheduler.cache.pool
    cached = scheduler.prefix_cache.num_idle_blocks()
    in_use = pool.num_held - cached
    generated = counters.generated_tokens
    return EngineStats(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_steps=counters.steps,
        num_preemptions=counters.preemptions,
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=generated,
        nominal_mean_layers=nominal_mean_layers,
        realised_mean_layers=counters.generated_layers / generated if generated else None,
        kv_blocks_total=pool.num_blocks,
        kv_blocks_in_use=in_use,
        kv_blocks_cached=cached,
        kv_bytes_in_use=in_use * block_bytes,
        kv_bytes_saved=scheduler.blocks_saved_now() * block_bytes,
        kv_bytes_saved_at_end=counters.blocks_saved * block_bytes,
        **asdict(executor.stats),
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        verifications=counters.verifications,
        accepted_at=tuple(counters.accepted_at),
        acceptance_rate=counters.accepted_tokens / counters.drafted_tokens if counters.drafted_tokens else None,
        tokens_per_verification=(
            1 + counters.accepted_tokens / counters.verifications if counters.verifications else None
        ),
        layers_run=counters.generated_layers,
        layers_full=generated * scheduler.cache.num_layers,
        token_layers=tuple(counters.token_layers),
        **timings.now(),
        prompts=scheduler.prompts_under_way(),
    )

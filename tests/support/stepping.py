"""Greedy requests, engines that run them to their end, and the plans of their steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from d3engine import Engine, RequestOutput, SamplingParams
from d3engine.executor.interface import Computed
from d3engine.scheduling.plan import Plan


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | more)


def generated(directory: Path | str, prompts: list[list[int]], params: Any, **options: Any) -> list[RequestOutput]:
    """The outputs of an engine of this model without a tokenizer, which ends with them."""
    with Engine(directory, skip_tokenizer_init=True, **options) as engine:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        engine.scheduler.check_integrity()
        return outputs


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end; the last output of every request that was returned."""
    last = {}
    for _ in range(500):
        if not engine.has_unfinished_requests():
            return last
        last |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not finish")


def watch(engine: Engine) -> list[Plan]:
    """The plans of the engine's steps, from here on."""
    plans: list[Plan] = []
    schedule = engine.scheduler.schedule

    def watched() -> Plan | None:
        plan = schedule()
        plans.extend([] if plan is None else [plan])
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    return plans


def see_steps(
    engine: Engine,
    before: Callable[[Plan], object] = lambda plan: None,
    after: Callable[[Plan, Computed], object] = lambda plan, computed: None,
) -> None:
    """Show each plan from here on before the executor runs it, and with what was computed after."""
    run = engine.executor.run

    def seen(plan: Plan) -> Computed:
        before(plan)
        computed = run(plan)
        after(plan, computed)
        return computed

    engine.executor.run = seen  # type: ignore[method-assign]

"""What a run is said to have cost, against the rows that really went through layers, LM head and projections."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fixture_types import MakeLlama
from tiny_models import TinyLlama

from d3engine.depth import (
    D3,
    DepthPolicy,
    EarlyExit,
    FullDepth,
    LayerTable,
    Lossless,
    PromptLookup,
    SelfSpeculative,
    Speculative,
)
from d3engine.depth.statistics import LLAMA2_7B, flops_ratio
from d3engine.engine.engine import Engine
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.work import Cost, Work, is_known_beforehand, work_of

LAYERS = 5

WAKING = LayerTable([[True] * 5, [True, False, True, False, True], [True, True, False, True, True]], "project")

POLICIES = [
    FullDepth(),
    D3(0.8, 0.4),
    D3(0.8, 0.4, on_skip="project"),
    WAKING,
    EarlyExit(0.02, "softmax_max"),
    EarlyExit(0.02, "softmax_diff", min_layer=1, every=2, on_skip="copy"),
    EarlyExit(0.02, "softmax_max", batch="batch_min"),
    EarlyExit(0.97, "cosine"),
    EarlyExit(2.0, "softmax_max", every=3),
    Lossless(D3(0.5, 0.8), 4),
    SelfSpeculative(D3(0.5, 0.8), 4, adaptive=True),
]


@pytest.fixture(scope="module")
def llama(tiny_llama: MakeLlama) -> TinyLlama:
    return tiny_llama(num_hidden_layers=LAYERS, hidden_size=32, intermediate_size=48)


Watched = tuple[Engine, Counter[str]]


def new_engine(llama: TinyLlama, depth: DepthPolicy) -> Watched:
    """An engine, and the rows that go through each kind of operation of its model."""
    options: dict[str, Any] = {"max_num_seqs": 4, "enable_prefix_caching": False, "device": "cpu"}
    options |= {"max_model_len": 96, "enforce_eager": True}  # operations are counted where the host calls them
    engine = Engine(llama.directory, depth=depth, skip_tokenizer_init=True, **options)
    return engine, watch(engine)


@pytest.fixture(scope="module")
def engine(llama: TinyLlama) -> Watched:
    return new_engine(llama, FullDepth())


def watch(engine: Engine) -> Counter[str]:
    """Rows through each kind of operation of the engine's model from now on."""
    seen: Counter[str] = Counter()
    executor: Any = engine.executor
    model = getattr(executor, "first", executor).model

    def counting(name: str, place: int) -> None:
        run = getattr(model, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            seen[name] += arguments[place].shape[0]
            return run(*arguments, **options)

        setattr(model, name, counted)

    counting("layer", 1)
    counting("project", 1)
    counting("logits", 0)
    return seen


def run(watched: Watched, policy: DepthPolicy) -> tuple[Work, Counter[str]]:
    """The work of six answers, some of which may end within a draft, and the rows seen but for those of prompts."""
    engine, seen = watched
    numbers = random.Random(7)
    prompts = [[numbers.randrange(300) for _ in range(numbers.randint(1, 20))] for _ in range(6)]
    free = SamplingParams(temperature=2, seed=1, max_tokens=16, ignore_eos=True, depth=policy)  # hot: drafts fit
    stops = [output.outputs[0].token_ids[7] for output in engine.generate(prompts, free, use_tqdm=False)]
    stopping = [replace(free, stop_token_ids=[stop] if nth else None) for nth, stop in enumerate(stops)]
    seen.clear()
    outputs = engine.generate(prompts, stopping, use_tqdm=False)
    if policy.drafts:
        assert sum(output.metrics.num_discarded_tokens for output in outputs) > 0
    seen["layer"] -= LAYERS * (sum(map(len, prompts)) - len(prompts))
    return sum((work_of(output, policy, LAYERS) for output in outputs), Work()), seen


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_work_of_answers_is_what_the_model_ran(engine: Watched, policy: DepthPolicy) -> None:
    work, seen = run(engine, policy)
    assert (work.layers, work.heads, work.projections) == (seen["layer"], seen["logits"], seen["project"])


def test_of_a_second_model_that_drafts_nothing_is_counted(llama: TinyLlama) -> None:
    policy = Speculative(str(llama.directory), 3)
    work, seen = run(new_engine(llama, policy), policy)
    assert (work.layers, work.heads) == (seen["layer"], seen["logits"])


def test_lookups_draft_without_the_lm_head(engine: Watched) -> None:
    """A drafted token that was looked up takes a row of its verification alone."""
    model, seen = engine
    policy = PromptLookup(4)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, depth=policy)
    prompt = [5, 6, 7] * 6
    seen.clear()
    (output,) = model.generate([prompt], params, use_tqdm=False)
    assert output.metrics.num_drafted_tokens > 0
    work = work_of(output, policy, LAYERS)
    assert (work.layers, work.heads) == (seen["layer"] - LAYERS * (len(prompt) - 1), seen["logits"])


def test_the_policies_tried_do_different_work(engine: Watched) -> None:
    """Otherwise the counts above would prove little."""
    early, drafted = (run(engine, policy)[0] for policy in (POLICIES[4], POLICIES[9]))
    assert early.tokens < early.heads
    assert early.projections > 0
    assert early.layers < LAYERS * early.tokens
    assert drafted.heads > drafted.tokens
    assert drafted.layers > LAYERS * drafted.tokens


def cost(policy: DepthPolicy, work: Work, nominal: float | None = None) -> Cost:
    return Cost(policy, LLAMA2_7B, work, 0, nominal, 1.0)


def test_a_flops_ratio_is_made_of_layers_heads_and_projections() -> None:
    plain = cost(D3(0.9, 0.6), Work(10, 240, 10))
    assert plain.realised_flops_ratio == pytest.approx(
        flops_ratio(24, 32, LLAMA2_7B.layer_parameters, LLAMA2_7B.head_parameters)
    )
    per_token = 32 * LLAMA2_7B.layer_parameters + LLAMA2_7B.head_parameters
    qkv = 3 * 4096 * 4096
    run_flops = 240 * LLAMA2_7B.layer_parameters + 25 * LLAMA2_7B.head_parameters + 80 * qkv
    early = cost(EarlyExit(0.5), Work(10, 240, 25, 80))
    assert early.realised_flops_ratio == pytest.approx(10 * per_token / run_flops)
    assert early.nominal_flops_ratio is None


def test_bridged_windows_count_for_each_token_that_skips(engine: Watched) -> None:
    """Windows crossed by bridges are counted for every token that leaves layers out."""
    bare, bridged = D3(0.8, 0.4), D3(0.8, 0.4, bridges="auto")
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, depth=bare)
    (output,) = engine[0].generate([1, 2, 3], params, use_tqdm=False)
    crossings = sum(depth < LAYERS for depth in output.outputs[0].depths)
    assert crossings > 0
    assert work_of(output, bridged, LAYERS) == replace(work_of(output, bare, LAYERS), crossings=crossings)
    two_windows = LayerTable([[0, 1, 2, 3, 4], [0, 2, 4]], on_skip="none", bridges="auto")
    assert work_of(output, two_windows, LAYERS).crossings == 2 * 8
    run_flops = 240 * LLAMA2_7B.layer_parameters + 10 * LLAMA2_7B.head_parameters + 9 * 4096**2
    full_flops = 10 * (32 * LLAMA2_7B.layer_parameters + LLAMA2_7B.head_parameters)
    ratio = cost(D3(0.9, 0.6, bridges="auto"), Work(10, 240, 10, crossings=9)).realised_flops_ratio
    assert ratio == pytest.approx(full_flops / run_flops)


def test_drafts_may_run_more_layers_than_there_are() -> None:
    """Drafts may run more layers than there are, and the ratio says so."""
    drafted = cost(Lossless(D3(0.9, 0.6)), Work(10, 400, 20))
    assert drafted.realised_mean_layers == 40
    assert drafted.realised_flops_ratio is not None
    assert drafted.realised_flops_ratio < 1
    assert cost(Speculative("demo"), Work(10, 400, 20)).realised_flops_ratio is None


def test_only_a_schedule_is_known_beforehand() -> None:
    known = [is_known_beforehand(policy, LAYERS) for policy in POLICIES]
    assert known == [True] * 4 + [False] * 7

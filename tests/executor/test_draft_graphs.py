"""A draft model and the verification of its drafts run in graphs, which are rehearsed here: steps are called again."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fixture_types import MakeLlama
from stepping import finish, see_steps
from tiny_models import TARGET, TinyLlama, random_prompts, save_without_layer

from d3engine import Engine, FullDepth, PromptLookup, RequestOutput, SamplingParams, Speculative, UnifiedSkip
from d3engine.executor.cuda_graph import GraphExecutor
from d3engine.executor.draft_target import DraftTargetExecutor
from d3engine.executor.eager import EagerExecutor
from d3engine.executor.graph_shapes import Repeats, Step
from d3engine.executor.memory import workspace_bytes
from d3engine.executor.verification import cycle_of
from d3engine.scheduling.plan import Chosen, Plan

LENGTH = 3
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "cut": replace(DRAWN, top_p=0.9, top_k=20),
    "penalised": replace(DRAWN, presence_penalty=0.5, repetition_penalty=1.2),
    "restricted": replace(DRAWN, logit_bias={3: 2.0}),
    "reported": replace(GREEDY, logprobs=2),
}
PROMPTS = random_prompts([7, 12, 3, 20, 1], vocab_size=40)


pytestmark = pytest.mark.usefixtures("graphs")


def new_engine(target: TinyLlama, depth: Any, **changes: Any) -> Engine:
    arguments: dict[str, Any] = {"max_num_seqs": 6, "block_size": 4, "max_model_len": 80, "device": "cpu"}
    return Engine(target.directory, depth=depth, skip_tokenizer_init=True, **(arguments | changes))


def lengths_of_their_own(params: SamplingParams) -> list[SamplingParams]:
    return [replace(params, max_tokens=18 - 3 * nth, seed=nth) for nth in range(len(PROMPTS))]


def assert_same(found: list[RequestOutput], wanted: list[RequestOutput], *, depths: bool = True) -> None:
    for one, other in zip(found, wanted, strict=True):
        (own,), (full,) = one.outputs, other.outputs
        assert own.token_ids == full.token_ids
        assert not depths or own.depths == full.depths
        if full.logprobs is not None:
            assert own.logprobs is not None
            for mine, theirs in zip(own.logprobs, full.logprobs, strict=True):
                assert {token: one.logprob for token, one in mine.items()} == pytest.approx(
                    {token: one.logprob for token, one in theirs.items()}, abs=1e-4
                )


def counts(engine: Engine) -> tuple[Any, ...]:
    stats = engine.stats()
    return stats.drafted_tokens, stats.accepted_tokens, stats.verifications, stats.accepted_at, stats.layers_run


POLICIES: list[dict[str, Any]] = [
    {"draft_length": LENGTH},
    {"draft_length": 5, "adaptive": True},
    {"draft_length": None},
    {"draft_length": 4, "stop_probability": 0.1},
]


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_batch_in_graphs_answers_as_without(
    target: TinyLlama, draft: str, kind: str, options: dict[str, Any]
) -> None:
    """Tokens and counts are those of the torch backend, and the tokens those of no drafts."""
    params, policy = lengths_of_their_own(KINDS[kind]), Speculative(draft, **options)
    engine, eager = new_engine(target, policy), new_engine(target, policy, enforce_eager=True)
    found, wanted = (one.generate(PROMPTS, params, use_tqdm=False) for one in (engine, eager))
    assert_same(found, wanted)
    assert counts(engine) == counts(eager)
    plain = new_engine(target, FullDepth(), enforce_eager=True).generate(PROMPTS, params, use_tqdm=False)
    assert_same(found, plain, depths=False)
    stats = engine.stats()
    assert stats.eager_steps == 1, "all prompts are of one step"
    assert stats.graph_steps >= 5
    assert stats.verifications > 5


@pytest.mark.parametrize(("kind", "steps"), [("greedy", 1), ("cut", 1), ("penalised", 2), ("reported", 2)])
def test_host_steps_of_a_draft_in_graphs_are_few(target: TinyLlama, draft: str, kind: str, steps: int) -> None:
    """Drafts of 5 tokens and their verification are one plan, or two where the host chooses what verifies."""
    engine = new_engine(target, Speculative(draft, 5))
    rows: list[int] = []

    def note(plan: Plan) -> None:
        drafts = plan.drafts is not None and plan.drafts.model is not None and plan.drafts.model.sampled.size
        rows.append(plan.drafts.model.num_rows if drafts else 0)

    see_steps(engine, before=note)
    engine.generate(PROMPTS[:1], KINDS[kind], use_tqdm=False)
    assert max(rows) == 2, "the last accepted token, and the last of a draft before that was accepted whole"
    stats = engine.stats()
    assert len(rows) <= steps * stats.verifications + 2  # the prompt's, and a last token that needs no draft
    assert stats.drafted_tokens > 3 * stats.verifications


def test_a_preempted_batch_in_graphs_answers_as_without(target: TinyLlama, draft: str) -> None:
    """Answers are those of no drafts where the memory is too small for all."""
    roomy, params = new_engine(target, FullDepth(), enforce_eager=True), replace(GREEDY, max_tokens=40)
    wanted = roomy.generate(PROMPTS, params, use_tqdm=False)
    memory = roomy.settings.block_bytes * 4 * 24
    policy = Speculative(draft, LENGTH)
    given: dict[str, Any] = {"kv_cache_memory_bytes": memory, "enable_prefix_caching": False}
    engine = new_engine(target, policy, **given)
    ahead: set[bool] = set()

    def note(plan: Plan) -> None:
        if plan.drafts is not None and plan.drafts.model is not None and plan.drafts.model.sampled.size:
            ahead.add(plan.drafts.lengths is not None)

    see_steps(engine, before=note)
    assert_same(engine.generate(PROMPTS, params, use_tqdm=False), wanted, depths=False)
    assert ahead == {True, False}, "without room for a whole draft it is made token by token"
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.kv_blocks_in_use == 0
    assert stats.verifications > 5


def assert_in_phase(plan: Plan) -> None:
    """No sequence drafts in a step in which another one verifies: both models would run for half of the batch each."""
    if plan.drafts is not None and plan.drafts.model is not None:
        assert not (plan.drafts.judging and plan.drafts.model.sampled.size)


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_a_late_sequence_joins_drafts_in_graphs(target: TinyLlama, draft: str, kind: str) -> None:
    """A sequence that comes while others draft answers as alone, and they as without it."""
    params = replace(KINDS[kind], max_tokens=30)
    alone = new_engine(target, FullDepth(), enforce_eager=True)
    wanted = [alone.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS[:3]]
    engine = new_engine(target, Speculative(draft, LENGTH), max_num_batched_tokens=10)
    found: dict[str, list[int]] = {}
    see_steps(engine, before=assert_in_phase)
    engine.add_request("0", PROMPTS[0], params)
    for nth in (1, 2):
        for _ in range(3):
            engine.step()
        engine.add_request(str(nth), PROMPTS[nth], params)
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        engine.scheduler.check_integrity()
    assert [found[str(nth)] for nth in range(3)] == wanted


def test_rows_of_other_policies_share_steps_with_drafts(target: TinyLlama, draft: str) -> None:
    """Steps in which a row leaves out layers run eagerly, and the draft model's in graphs all the same."""
    engine, longer = new_engine(target, Speculative(draft, LENGTH)), replace(GREEDY, max_tokens=40)
    mixed = [replace(GREEDY, max_tokens=9), replace(longer, depth=FullDepth()), replace(longer, depth=UnifiedSkip(2))]
    found = engine.generate(PROMPTS[:3], mixed, use_tqdm=False)
    eager = new_engine(target, FullDepth(), enforce_eager=True)
    wanted = [eager.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(PROMPTS[:3], mixed, strict=True)]
    assert_same(found, wanted, depths=False)
    stats = engine.stats()
    assert 2 < stats.eager_steps < 20, "as long as the first drafts"
    assert stats.graph_steps > 20


def test_lookups_are_verified_in_graphs(target: TinyLlama) -> None:
    """The answers and counts of drafts that no model makes are those of the torch backend."""
    prompts, policy = [prompt * 3 for prompt in PROMPTS[:3]], PromptLookup(4)
    engine, eager = new_engine(target, policy), new_engine(target, policy, enforce_eager=True)
    found, wanted = (one.generate(prompts, GREEDY, use_tqdm=False) for one in (engine, eager))
    assert_same(found, wanted)
    assert counts(engine) == counts(eager)
    assert counts(engine)[0] > 0
    assert engine.stats().eager_steps == 1
    assert engine.stats().graph_steps == engine.stats().num_steps - 1


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_answer_that_ends_within_a_draft_in_graphs_ends_there(target: TinyLlama, draft: str, kind: str) -> None:
    """What a draft holds beyond a stop token is neither verified nor counted, as on the torch backend."""
    policy = Speculative(draft, 8)
    engine, eager = new_engine(target, policy), new_engine(target, policy, enforce_eager=True)
    full = eager.generate(PROMPTS, KINDS[kind], use_tqdm=False)
    before, stops = counts(eager), {token for one in full for token in one.outputs[0].token_ids[5:12:3]}
    params = replace(KINDS[kind], stop_token_ids=sorted(stops))
    found, wanted = (one.generate(PROMPTS, params, use_tqdm=False) for one in (engine, eager))
    assert_same(found, wanted)
    assert {one.outputs[0].finish_reason for one in found} == {"stop"}
    of_eager = [after - first for after, first in zip(counts(eager)[:3], before[:3], strict=True)]
    assert list(counts(engine)[:3]) == of_eager


def test_draft_that_the_host_began_goes_on_in_graphs(target: TinyLlama) -> None:
    """Penalties count the tokens that were drafted before: a target that drafts for itself is always right."""
    params = [replace(KINDS["restricted"], max_tokens=2 + nth) for nth in range(3)]
    params += [replace(GREEDY, presence_penalty=2, frequency_penalty=2)] * 3
    engine, begun = new_engine(target, Speculative(str(target.directory), 6)), {0}

    def note(plan: Plan) -> None:
        if plan.drafts is not None and plan.drafts.model is not None and plan.drafts.lengths is not None:
            begun.update(len(one.draft.token_ids) for one in plan.drafts.model.sequences if one.draft is not None)

    see_steps(engine, before=note)
    engine.generate(random_prompts([4] * len(params), vocab_size=40), params, use_tqdm=False)
    assert max(begun) > 0, "drafts that only the host could go on with went on when its request had ended"
    assert engine.stats().acceptance_rate == 1


def test_cycle_of_numbers_that_are_no_tokens_ends_before_them() -> None:
    """Of four drafts one is right, one and a verification meet logits that are not finite, and one holds an end."""
    sequence = SimpleNamespace(would_end=lambda token, after: token == 6 and after == 3)
    given: list[list[int]] = [[], [], [], [4]]
    model = SimpleNamespace(stops=np.full(4, 11))
    drafts = SimpleNamespace(lengths=np.full(4, 3), model=model)
    plan: Any = SimpleNamespace(sequences=[sequence] * 4, stops=np.full(4, 11), drafts=drafts)
    drafted = Chosen(np.array([[5] * 4, [6] * 4, [7] * 4]), np.zeros((3, 4), np.float32))
    drafted.scores[1, 1] = np.nan
    rows = [5, 6, 7, 8, 5, 9, 0, 0, 5, 6, 7, 8, 4, 5, 3, 0, 0]
    verified = Chosen(np.array([rows]), np.zeros((1, len(rows)), np.float32))
    verified.scores[0, 9] = -np.inf
    found = cycle_of(plan, given, drafted, verified)
    assert found.counts[0].tolist() == [[3, 3, 8, 0, 13], [1, 1, 9, 0, 12], [3, 1, -1, 0, 12], [3, 2, 3, 0, 13]]
    assert [tokens[:count].tolist() for tokens, count in zip(found.drafted[0], found.counts[0, :, 0], strict=True)] == [
        [5, 6, 7],
        [5],
        [5, 6, 7],
        [4, 5, 6],
    ]


def test_a_draft_model_that_is_behind_catches_up(target: TinyLlama, draft: str) -> None:
    """It knows no cached prompts, so while others draft it computes one in pieces, whose drafts wait."""
    alone = new_engine(target, FullDepth(), enforce_eager=True)
    wanted = [alone.generate([PROMPTS[nth]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for nth in (0, 3)]
    engine = new_engine(target, Speculative(draft, LENGTH), max_num_batched_tokens=10)
    engine.generate(PROMPTS[3], GREEDY, use_tqdm=False)
    seen: list[bool] = []

    def note(plan: Plan) -> None:
        if plan.drafts is not None and plan.drafts.model is not None and plan.drafts.lengths is not None:
            seen.append(plan.drafts.model.sampled.size < plan.drafts.model.slots.size)

    see_steps(engine, before=note)
    engine.add_request("0", PROMPTS[0], GREEDY)
    engine.step()
    engine.step()
    engine.add_request("1", PROMPTS[3], GREEDY)
    found = finish(engine)
    assert found["1"].num_cached_tokens > 10
    assert {True, False} == set(seen)
    assert [found[name].outputs[0].token_ids for name in ("0", "1")] == wanted


def test_drafts_of_more_rows_than_graphs_hold_run_eagerly(target: TinyLlama, draft: str) -> None:
    """Of 20 drafts of 3 tokens all are verified in one eager step; the draft model runs in graphs all the same."""
    prompts = random_prompts([5 + nth % 7 for nth in range(20)], vocab_size=40, seed=3)
    engine = new_engine(target, Speculative(draft, LENGTH), max_num_seqs=20)
    found = engine.generate(prompts, GREEDY, use_tqdm=False)
    plain = new_engine(target, FullDepth(), max_num_seqs=20, enforce_eager=True)
    assert_same(found, plain.generate(prompts, GREEDY, use_tqdm=False), depths=False)
    first, second = graphs_of(engine)
    assert first.logit_rows == second.logit_rows == 64
    assert first.stats.eager_steps > 2
    assert second.stats.eager_steps == 1, "the prompts'"


def test_graphs_of_dynamic_rope_verify_alone(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """A draft model whose rotations depend on the length of the prompt runs no graphs, its target's answers do."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny = tiny_llama(**TARGET, rope_parameters=rope, max_position_embeddings=32)
    policy = Speculative(save_without_layer(tiny, 1, tmp_path / "draft"), LENGTH)
    engine, plain = (new_engine(tiny, depth, max_model_len=64) for depth in (policy, FullDepth()))
    params = replace(GREEDY, max_tokens=30)
    assert_same(*(one.generate(PROMPTS, params, use_tqdm=False) for one in (engine, plain)), depths=False)
    assert isinstance(engine.executor, DraftTargetExecutor)
    assert isinstance(engine.executor.second, EagerExecutor)
    assert engine.stats().graph_steps > 5
    assert engine.stats().eager_steps == 1


# -- memory, and what is there before the first request --------------------------------------------------------------


def graphs_of(engine: Engine) -> tuple[GraphExecutor, GraphExecutor]:
    pair = engine.executor
    assert isinstance(pair, DraftTargetExecutor)
    assert isinstance(pair.first, GraphExecutor)
    assert isinstance(pair.second, GraphExecutor)
    return pair.first, pair.second


def test_prepared_graphs_are_all_that_drafts_need(target: TinyLlama, draft: str) -> None:
    """What is captured ahead of need is all that answers of the policy need, of both models."""
    engine = new_engine(target, Speculative(draft, LENGTH), max_num_seqs=2)
    while engine.executor.prepare_next():
        pass
    first, second = graphs_of(engine)
    captured = engine.stats().graphs_captured
    sizes = 4  # 1, 2, 4 and 8 rows
    for one in (first, second):
        assert one.stats.graphs_captured == one.num_deepest == 4 * sizes  # for three ways to choose, and for the host
    for kind in ("greedy", "drawn", "cut", "restricted", "reported"):
        for count in (1, 2):
            engine.generate(PROMPTS[:count], KINDS[kind], use_tqdm=False)
    assert engine.stats().graphs_captured == captured
    assert engine.stats().graph_steps > 20


def test_workspace_counts_the_graphs_of_both_models(
    target: TinyLlama, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models' graphs are captured to be measured, both pools are left out, and those to come are added."""
    monkeypatch.setattr(Repeats, "bytes_for", lambda recorder, count: 1000 * count)
    built: list[Any] = []

    def build(num_blocks: int) -> Any:
        engine = new_engine(target, Speculative(draft, LENGTH), max_num_seqs=2)
        built.append((engine, sum(one.pool.nbytes for one in graphs_of(engine))))
        return engine.executor

    def free_bytes() -> int:
        return 10**9 - (built[0][1] + 12345 if built else 0)

    config = new_engine(target, FullDepth(), max_num_seqs=2).settings.scheduler_config
    found = workspace_bytes(build, config, num_layers=4, block_size=4, free_bytes=free_bytes)
    first, second = graphs_of(built[0][0])
    assert found == 12345 + 1000 * (first._num_expected + second._num_expected)
    assert first.stats.graphs_captured == second.stats.graphs_captured == 1


def test_drafts_without_memory_for_graphs_go_on(
    target: TinyLlama, draft: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a capture finds no memory each model says so once, and its steps run without."""
    import torch

    def record(recorder: Repeats, step: Step) -> Step:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Repeats, "record", record)
    wanted = new_engine(target, FullDepth(), enforce_eager=True).generate(PROMPTS, GREEDY, use_tqdm=False)
    engine = new_engine(target, Speculative(draft, LENGTH))
    for _ in range(2):
        assert_same(engine.generate(PROMPTS, GREEDY, use_tqdm=False), wanted, depths=False)
    assert engine.stats().graphs_captured == 0
    assert len([one for one in caplog.records if "no memory for a CUDA graph" in one.getMessage()]) == 2

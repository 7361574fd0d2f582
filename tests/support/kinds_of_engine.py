"""Engines of several kinds, each with requests that are to be answered in a batch as alone."""

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from batches import LAYERS, POLICIES, Request, assert_close_states, assert_same, some_requests
from bridge_files import some_maps, write_maps
from e4m3 import sums_of_doubles
from eagle3_heads import EAGLE3_TARGET, save_head
from peft_adapters import ADAPTERS, save_adapter, save_all
from tiny_models import TinyLlama, random_prompts, save_sure_llama, save_tiny_llama, save_without_layer
from trained_students import SKIPPED, WIDTHS, Trained

from d3engine import (
    D3,
    Capture,
    Distilled,
    DraftAndVerify,
    EarlyExit,
    Engine,
    FullDepth,
    LayerTable,
    Lossless,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
    SkipDecode,
    Speculative,
    Steer,
    UnifiedSkip,
    Width,
)
from d3engine.depth import DepthPolicy
from d3engine.model.bridges import BRIDGES_FILE
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import pooling_params

SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48}
MakeEngine = Callable[..., Engine]


@dataclass(frozen=True)
class Kind:
    """An engine with these requests, for a seed."""

    # `alone` are the arguments of the engine that answers each by itself, `asked_alone` what that is asked; `same`
    # asserts that an answer in a batch is that one. Both are run `within` a context.

    make: MakeEngine
    requests: Callable[[int], list[Request]]
    same: Callable[[RequestOutput, RequestOutput, Request], None] = lambda found, wanted, _: assert_same(found, wanted)
    alone: dict[str, Any] | None = None
    asked_alone: Callable[[Request], Request] = lambda request: request
    within: Callable[[], AbstractContextManager[None]] = nullcontext


class Given(NamedTuple):
    """What kinds are made of: fixtures of those names, and an empty folder."""

    make_engine: MakeEngine
    tiny_llama: Callable[..., TinyLlama]
    folder: Path


def maker(directory: Path, **own: Any) -> MakeEngine:
    given: dict[str, Any] = {"max_num_seqs": 8, "block_size": 4, "max_model_len": 96, "depth": FullDepth()} | own
    return partial(Engine, directory, device="cpu", skip_tokenizer_init=True, **given)


def always(requests: Sequence[Request]) -> Callable[[int], list[Request]]:
    return lambda seed: list(requests)


# -- what of two answers is equal --------------------------------------------------------------------------------------


def same_tokens(found: RequestOutput, wanted: RequestOutput, request: Request | None = None) -> None:
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one.token_ids == other.token_ids


def same_drafts(found: RequestOutput, wanted: RequestOutput, request: Request) -> None:
    """What was drafted and accepted, too."""
    assert_same(found, wanted)
    for count in ("num_drafted_tokens", "num_accepted_tokens", "num_verifications"):
        assert getattr(found.metrics, count) == getattr(wanted.metrics, count)


def same_bits(found: RequestOutput, wanted: RequestOutput, request: Request | None = None) -> None:
    """To the last bit of every log-probability and every hidden state."""
    assert_same(found, wanted)
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one.logprobs == other.logprobs
        if one.hidden_states is not None and other.hidden_states is not None:
            assert np.array_equal(one.hidden_states.positions, other.hidden_states.positions)
            for layer in one.hidden_states.layers:
                assert np.array_equal(one.hidden_states[layer], other.hidden_states[layer])


# -- the kinds ---------------------------------------------------------------------------------------------------------


def of_policies(given: Given) -> Kind:
    return Kind(given.make_engine, lambda seed: some_requests(seed, 15), alone={"enforce_eager": True})


def over_8_bits(given: Given) -> Kind:
    """By PyTorch whatever its requests ask for, with sums in float64, rounded once."""
    # Another order of a sum may choose the next of 8-bit values. Elsewhere it depends on neighbours which steps the
    # native library takes; and on some machines so does the order of PyTorch's own float32 sums, by the number of rows.
    make = partial(given.make_engine, kv_cache_dtype="fp8", enforce_eager=True)
    return Kind(make, lambda seed: some_requests(seed, 15), within=sums_of_doubles)


def batch_invariant(given: Given, *, cache: str) -> Kind:
    """Under all policies that such an engine takes."""
    policies = [one for one in POLICIES if one.exit_rule(LAYERS) is None and one.schedule(LAYERS).on_skip != "project"]

    def requests(seed: int) -> list[Request]:
        found = some_requests(seed, 12)
        return [
            replace(one, params=replace(one.params, logprobs=3, depth=policies[nth % len(policies)]))
            for nth, one in enumerate(found)
        ]

    return Kind(partial(given.make_engine, batch_invariant=True, kv_cache_dtype=cache), requests, same_bits)


def of_own_policies(policies: Sequence[DepthPolicy], count: int) -> list[Request]:
    """Some draw; many begin alike."""
    numbers = random.Random(5)
    found = []
    for nth in range(count):
        given: dict[str, Any] = {"max_tokens": 9, "temperature": 2.0 * (nth % 2), "seed": nth, "ignore_eos": True}
        params = SamplingParams(depth=policies[nth % len(policies)], **given)
        found.append(Request((*range(20, 20 + 4 * numbers.randint(1, 4)), numbers.randrange(300)), params))
    return found


def bridged(given: Given, *, eager: bool) -> Kind:
    directory = given.folder / "model"
    shutil.copytree(given.tiny_llama(**SIZES).directory, directory)
    write_maps(some_maps(LAYERS, SIZES["hidden_size"]), directory, directory / BRIDGES_FILE)
    table = LayerTable([range(LAYERS), [0, 5], [0, 1, 5], range(LAYERS), [0, 2, 4], [0, 1, 2, 3]], bridges="auto")
    policies = [
        *(D3(0.95, 0.5, bridges="auto"), D3(0.9, 0.1, tail=1, bridges="auto"), FullDepth()),
        *(D3(0.9, 0.5, on_skip="copy", bridges="auto"), UnifiedSkip(1.5, bridges="auto"), D3(0.95, 0.5)),
        *(SkipDecode(20, 2, bridges="auto"), table),
    ]
    requests = always(of_own_policies(policies, 2 * len(policies)))
    return Kind(maker(directory, enforce_eager=eager), requests, alone={"enforce_eager": True})


def with_students(given: Given, *, eager: bool = False, to_the_bit: bool = False) -> Kind:
    """A student, and ladders of others of which each row is at its own place."""
    trained = Trained(given.tiny_llama(**SIZES), given.folder / "model")
    policy, ladder = Distilled(SKIPPED), Width(trained.ladder, 0.95, WIDTHS)
    policies: list[DepthPolicy] = [policy, FullDepth(), ladder, D3(0.9, 0.5), Distilled(SKIPPED, on_skip="copy")]
    policies += [Width(trained.ladder, steps=[2, 4, 7]), ladder, policy]
    requests = of_own_policies(policies, 16)
    if to_the_bit:
        requests = [replace(one, params=replace(one.params, logprobs=3)) for one in requests]
        return Kind(maker(trained.directory, batch_invariant=True, depth=ladder), always(requests), same_bits)
    alone = {"enforce_eager": True}
    return Kind(maker(trained.directory, enforce_eager=eager, depth=ladder), always(requests), alone=alone)


def drafting_students(given: Given) -> Kind:
    """Drafts by a student that leaves layers out, by narrower and narrower ones, and by layers; students themselves."""
    trained = Trained(given.tiny_llama(**SIZES), given.folder / "model")
    ladder, student = Width(trained.ladder, 0.95, WIDTHS), Distilled(SKIPPED)
    policies = [SelfSpeculative(ladder, 3), SelfSpeculative(student, 2), SelfSpeculative(D3(0.8, 0.3), 3), student]
    policies += [SelfSpeculative(ladder, 5, stop_probability=0.01, adaptive=True), FullDepth()]
    requests = [replace(one, params=replace(one.params, logprobs=2)) for one in of_own_policies(policies, 18)]
    return Kind(maker(trained.directory, depth=policies[0]), always(requests), same_drafts)


DRAFTS: list[DepthPolicy] = [
    D3(0.9, 0.5),
    D3(0.8, 0.3, tail=2),
    D3(0.97, 0.7),
    D3(0.5, 0.1),  # its window begins at the first layer: no layer at all is left, nothing can be kept
    SkipDecode(12, 2),
    UnifiedSkip(2),
    LayerTable([range(LAYERS), [0, 5], [0, 1, 5], range(LAYERS), [0, 2, 4], [1, 2, 3], [0]], on_skip="project"),
    LayerTable([range(LAYERS), [0, 1, 2, 3, 5], [0, 1]], on_skip="none"),
]


def policies_that_draft(length: int, **options: Any) -> list[DepthPolicy]:
    lossless: list[DepthPolicy] = [Lossless(d, length, **options) for d in DRAFTS if isinstance(d, D3)]
    return lossless + [SelfSpeculative(d, length, **options) for d in DRAFTS]


def self_drafting(given: Given) -> Kind:
    """Drafts by layers of the model and other policies, greedy and drawing, of one and of several sequences."""
    numbers = random.Random(11)
    policies = [*policies_that_draft(3), FullDepth(), D3(0.9, 0.5), UnifiedSkip(2, on_skip="copy")]
    policies += [EarlyExit(0.06), EarlyExit(0.85, "cosine", on_skip="copy"), DRAFTS[6]]
    policies += policies_that_draft(5, adaptive=True, stop_probability=0.2)[::3]
    numbers.shuffle(policies)
    requests = []
    for nth, policy in enumerate(policies):
        length = numbers.randint(1, 30)
        period = [numbers.randrange(300) for _ in range(3 if nth % 2 else length)]  # drafts are right now and then
        temperature = numbers.choice([0.0, 0.7, 1.5])
        params = SamplingParams(
            temperature=temperature,
            top_p=numbers.choice([1.0, 0.9]),
            seed=numbers.randrange(2**63),
            n=numbers.choice([1, 1, 1, 2]) if temperature else 1,
            max_tokens=numbers.randint(2, 20),
            logprobs=numbers.choice([None, 1]),
            ignore_eos=True,
            depth=policy,
        )
        requests.append(Request(tuple((period * length)[:length]), params))
    return Kind(maker(given.tiny_llama(**SIZES).directory), always(requests), same_drafts)


PART_DRAFTS: list[DraftAndVerify] = [
    DraftAndVerify([1, 3], [2], 4, 0.4),
    DraftAndVerify([], [0, 4], 8, 0.2),
    DraftAndVerify([2], [2], 3, 0.0, None),
    DraftAndVerify([0, 1, 2, 3, 4], [], 2, 0.3, 0.5),
    DraftAndVerify([4], [0, 1, 2, 3, 4], 5, 0.25),
]
"""For a model of five layers."""


def drafting_by_parts(given: Given) -> Kind:
    """Beside early exits that look at the input of a layer in two parts, and other drafts."""
    others = [FullDepth(), D3(0.9, 0.5), EarlyExit(0.9, "cosine"), EarlyExit(0.5, on_skip="copy")]
    others.append(Lossless(D3(0.8, 0.4)))
    requests = []
    for nth, policy in enumerate(one for pair in zip(PART_DRAFTS, others, strict=True) for one in pair):
        params = SamplingParams(temperature=0, max_tokens=9 + nth, ignore_eos=True, depth=policy, logprobs=1)
        params = replace(params, temperature=1.5, seed=7) if nth == 2 else params
        requests.append(Request(tuple(random_prompts([1 + 7 * nth % 20], seed=nth)[0]), params))
    return Kind(maker(save_sure_llama(given.folder, num_layers=5).directory), always(requests), same_drafts)


def second_model(given: Given) -> Kind:
    """Greedy and drawn, drafted by the second model, by layers of the first, by lookups, and not at all."""
    target = given.tiny_llama(vocab_size=40, **SIZES | {"num_hidden_layers": 4})
    draft = save_without_layer(target, 2, given.folder)
    numbers = random.Random(11)
    policies = [None, Speculative(draft, 2), Speculative(draft, 5, stop_probability=0.3, adaptive=True)]
    policies += [Lossless(D3(0.8, 0.5), 3), FullDepth(), UnifiedSkip(2), Speculative(draft), PromptLookup(4)]
    policies += [PromptLookup()]
    requests = []
    for nth, prompt in enumerate(random_prompts([numbers.randint(1, 30) for _ in range(18)], seed=11, vocab_size=40)):
        params = SamplingParams(
            temperature=numbers.choice([0.0, 0.8]),
            seed=nth,
            max_tokens=numbers.randint(2, 18),
            ignore_eos=True,
            depth=policies[nth % len(policies)],
            logprobs=numbers.choice([None, 1]),
            prompt_logprobs=numbers.choice([None, None, 0]),
        )
        requests.append(Request(tuple(prompt), params))

    make = maker(target.directory, depth=Speculative(draft, 3), max_num_seqs=6)
    with make() as probe:
        is_native = probe.stats().backend == "native"

    def same(found: RequestOutput, wanted: RequestOutput, request: Request) -> None:
        same_tokens(found, wanted)
        if is_native:  # PyTorch's sums depend on the rows of a step
            assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
        if not isinstance(request.params.depth, Speculative | PromptLookup | None):
            same_drafts(found, wanted, request)  # others decode plainly where a batch leaves no room for their drafts

    return Kind(make, always(requests), same)


def eagle3(given: Given) -> Kind:
    target = given.tiny_llama(**EAGLE3_TARGET)
    head = str(save_head(target, given.folder))
    requests = []
    for nth, prompt in enumerate(random_prompts([1, 2, 9, 17, 5, 26], vocab_size=24)):
        params = SamplingParams(
            temperature=nth % 2,
            seed=nth,
            max_tokens=18,
            ignore_eos=True,
            repetition_penalty=1.0 + nth % 3 / 5,
            depth=Speculative(head, None if nth % 2 else 4),
        )
        requests.append(Request(tuple(prompt), params))
    make = maker(target.directory, depth=Speculative(head), max_num_seqs=4, backend="torch")
    return Kind(
        make,
        always(requests),
        same_tokens,
        {"depth": FullDepth()},
        lambda request: replace(request, params=replace(request.params, depth=None)),
    )


def adapted(given: Given) -> Kind:
    """Each prompt with each adapter of LoRA, and with none; all come twice."""
    model = save_all(given.folder)
    prompts = random_prompts([5, 37, 9], seed=3)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    requests = [Request(tuple(prompt), params, lora=name) for prompt in prompts for name in (None, *ADAPTERS)]
    make = maker(model.model, lora_modules=model.paths, num_threads=2, max_num_seqs=12, backend="native")
    return Kind(make, always(requests * 2), same_bits)


def hooked(given: Given, *, backend: str) -> Kind:
    """Hidden states are captured and changed; requests come twice, the second time to what the prefix cache has."""
    numbers = np.random.default_rng(0)
    vector = numbers.normal(size=48).astype(np.float32)
    down, up = (0.2 * numbers.normal(size=shape).astype(np.float32) for shape in ((3, 48), (48, 3)))
    prompts = random_prompts([1, 5, 40, 40], seed=5)
    prompts[3][:32] = prompts[2][:32]  # blocks that may be shared
    every = list(range(5))

    def asked(prompt: int, **params: Any) -> Request:
        drawn = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2} | params
        return Request(tuple(prompts[prompt]), SamplingParams(**drawn))

    requests = [
        asked(2),
        asked(2, capture=Capture([0, 2, 4])),
        asked(2, capture=Capture([1, 4], "generated"), steer=Steer({2: (down, up)})),
        asked(3, steer={0: vector, 2: (down, up), 3: vector[::-1].copy()}),
        asked(3, capture=Capture(3, slice(20, None, 3)), steer=Steer({0: vector}, "generated")),
        asked(1, capture=Capture(every, "last"), depth=D3(alpha=0.7, start=0.3)),
        asked(1, depth=D3(alpha=0.7, start=0.3)),
        asked(0, temperature=1.5, seed=3, max_tokens=9, ignore_eos=False, capture=[4], steer={1: vector}),
    ]
    model = save_tiny_llama(given.folder, num_hidden_layers=4)
    make = maker(model.directory, num_threads=2, backend=backend)
    return Kind(make, always(requests * 2), same_bits) if backend == "native" else Kind(make, always(requests * 2))


def embedding(given: Given, *, eager: bool) -> Kind:
    """Prompts are pooled in every way, among answers; all come twice."""

    def same(found: RequestOutput, wanted: RequestOutput, request: Request) -> None:
        assert_same(found, wanted)
        assert (found.embedding is None) == (request.params.pooling is None)
        if found.embedding is not None and wanted.embedding is not None:
            assert np.abs(np.subtract(found.embedding, wanted.embedding)).max() < (1e-4 if eager else 1e-6)

    prompts = random_prompts([1, 2, 7, 40, 60, 33], seed=1)
    answer = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [
        Request(tuple(prompt), params)
        for nth, prompt in enumerate(prompts)
        for params in (*map(pooling_params, ("mean", "last", "cls")), *[answer] * (nth % 2))
    ]
    make = maker(save_tiny_llama(given.folder).directory, enforce_eager=eager)
    return Kind(make, always(requests * 2), same)


def everything(given: Given) -> Kind:
    """Drafts of every kind, students, bridges, adapters, hidden states and embeddings in one engine."""
    tiny, numbers = given.tiny_llama(**SIZES), np.random.default_rng(0)
    directory = Trained(tiny, given.folder / "model").directory
    write_maps(some_maps(LAYERS, SIZES["hidden_size"]), directory, directory / BRIDGES_FILE)
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        save_adapter(directory, given.folder / name, seed, **config)
    draft = save_without_layer(tiny, 2, given.folder / "draft")
    steer = Steer({1: numbers.normal(size=SIZES["hidden_size"]).astype(np.float32)}, "generated")
    capture = Capture([0, 3, LAYERS])
    every = list(range(LAYERS))
    kinds: list[tuple[DepthPolicy | None, str | None, dict[str, Any]]] = [
        (None, "all", {}),
        (Speculative(draft, 3), None, {"temperature": 1.0, "n": 2}),
        (PromptLookup(), "some", {"frequency_penalty": 0.5}),
        (Lossless(D3(0.8, 0.3), 3), "patterns", {"temperature": 1.5}),
        (SelfSpeculative(D3(0.9, 0.4, bridges="auto"), 3), None, {"capture": capture}),
        (Distilled(SKIPPED), None, {"capture": capture, "steer": steer}),
        (Distilled(SKIPPED, on_skip="copy"), None, {"prompt_logprobs": 1}),
        (D3(0.9, 0.5, bridges="auto"), "all", {"capture": capture}),
        (D3(0.9, 0.5, on_skip="copy", bridges="auto"), "some", {"steer": steer, "temperature": 1.0, "n": 2}),
        (LayerTable([every, [0, 5], [0, 1, 5], every], bridges="auto"), "patterns", {"min_tokens": 9}),
        (UnifiedSkip(2), "all", {"capture": capture, "logit_bias": {7: 4.0}}),
    ]
    requests = []
    for nth, (depth, lora, asked) in enumerate(kinds):
        params = {"temperature": 0, "seed": nth, "max_tokens": 12 + nth, "ignore_eos": True, "logprobs": 2} | asked
        prompt = (random_prompts([7], seed=nth // 2)[0] * 4)[: 9 + 2 * nth]  # lookups find a draft in it
        requests.append(Request(tuple(prompt), SamplingParams(depth=depth, **params), lora=lora))
    requests += [Request(one.prompt, pooling_params("last")) for one in requests[:3]]

    def same(found: RequestOutput, wanted: RequestOutput, request: Request) -> None:
        same_tokens(found, wanted)
        assert found.prompt_logprobs == wanted.prompt_logprobs
        assert found.embedding == wanted.embedding
        for one, other in zip(found.outputs, wanted.outputs, strict=True):
            assert one.logprobs == other.logprobs
            assert_close_states(one.hidden_states, other.hidden_states)

    modules = {name: str(given.folder / name) for name in ADAPTERS}
    return Kind(maker(directory, depth=Speculative(draft, 4), lora_modules=modules), always(requests * 2), same)


KINDS: dict[str, Callable[[Given], Kind]] = {
    "policies": of_policies,
    "8-bit cache": over_8_bits,
    "batch-invariant": partial(batch_invariant, cache="auto"),
    "batch-invariant, 8-bit cache": partial(batch_invariant, cache="fp8"),
    "bridges by PyTorch": partial(bridged, eager=True),
    "bridges": partial(bridged, eager=False),
    "students by PyTorch": partial(with_students, eager=True),
    "students": with_students,
    "batch-invariant students": partial(with_students, to_the_bit=True),
    "drafts by students": drafting_students,
    "drafts by own layers": self_drafting,
    "drafts by parts of layers": drafting_by_parts,
    "drafts by a second model": second_model,
    "drafts by EAGLE-3": eagle3,
    "adapters": adapted,
    "hidden states": partial(hooked, backend="native"),
    "hidden states by PyTorch": partial(hooked, backend="torch"),
    "everything": everything,
    "embeddings by PyTorch": partial(embedding, eager=True),
    "embeddings": partial(embedding, eager=False),
}

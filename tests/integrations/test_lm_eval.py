"""The adapter to lm-evaluation-harness, request by request, against the harness's own HF backend on one tiny model."""

import logging
from typing import Any

import pytest
import torch
from tiny_models import TinyLlama

from d3engine.depth import D3, FullDepth
from d3engine.errors import D3EngineError, InvalidValueError
from d3engine.executor.sampler import Sampler
from d3engine.request.params import SamplingParams

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[test]'")
pytest.importorskip("datasets", reason="datasets is not installed: pip install '.[eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from d3engine.integrations.lm_eval import D3EngineLM

CACHE = {"kv_cache_memory_bytes": 2**24}
MAX_LENGTH = 191  # one token less than the tiny model has positions
pytestmark = pytest.mark.usefixtures("offline")


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


PAIRS = [
    ("Question: what is it?\nAnswer:", " a pen"),
    ("Question: what is it?\nAnswer:", " a hat"),
    ("ends in a space ", "and goes on"),
    ("", "without any context"),
    ("one", "x"),
    ("<s>has its own beginning", " already"),
    ("too long " * 40, "so its beginning is lost"),
    ("x", "y" * MAX_LENGTH),
]


def test_loglikelihoods_are_those_of_the_hf_backend(ours: D3EngineLM, theirs: HFLM) -> None:
    asked = requests("loglikelihood", *PAIRS)
    found = ours.loglikelihood(asked, disable_tqdm=True)
    wanted = theirs.loglikelihood(asked, disable_tqdm=True)
    for (logprob, greedy), (their_logprob, their_greedy) in zip(found, wanted, strict=True):
        assert logprob == pytest.approx(their_logprob, abs=2e-3, rel=1e-5)
        assert greedy == their_greedy
    assert len({round(logprob, 3) for logprob, _ in found}) == len(PAIRS)


def test_continuation_is_greedy_if_greedy_decoding_gives_it(ours: D3EngineLM, theirs: HFLM) -> None:
    """A continuation is greedy exactly if greedy decoding gives it."""
    context = "Question: how many?\nAnswer:"
    ids = ours.tok_encode(context)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, depth=FullDepth(), logprobs=2)
    output = ours.engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0]
    answer = output.token_ids
    assert output.logprobs is not None
    (second,) = (token for token, logprob in output.logprobs[3].items() if logprob.rank == 2)
    other = [*answer[:3], second]
    asked = [(None, ids, continuation) for continuation in (answer, answer[:1], other, [other[3], *answer[1:]])]
    found = ours._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, True, False, False]
    wanted = theirs._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [greedy for _, greedy in wanted] == [True, True, False, False]
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-3)


def test_rolling_loglikelihoods_are_those_of_the_hf_backend(ours: D3EngineLM, theirs: HFLM) -> None:
    texts = ["short", "a text of several windows. " * 20, "z" * (MAX_LENGTH - 1), "z" * MAX_LENGTH]
    asked = requests("loglikelihood_rolling", *((text,) for text in texts))
    found = ours.loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), rel=1e-5)


def test_generated_texts_are_those_of_hf_greedy(ours: D3EngineLM, theirs: HFLM) -> None:
    contexts = ["Question: what?\nAnswer:", "a", "<s>its own beginning", "too long " * 40]
    free = theirs.generate_until(
        requests("generate_until", *((context, {"until": [], "max_gen_toks": 12}) for context in contexts)),
        disable_tqdm=True,
    )
    stops = [text[5:7] for text in free]
    asked = requests(
        "generate_until",
        *((context, {"until": [], "max_gen_toks": 12, "do_sample": False}) for context in contexts),
        *(
            (context, {"until": stop, "max_gen_toks": 12, "temperature": 0.0})
            for context, stop in zip(contexts, stops, strict=True)
        ),
    )
    found = ours.generate_until(asked, disable_tqdm=True)
    assert found == theirs.generate_until(asked, disable_tqdm=True)
    assert found[: len(free)] == free
    assert all(len(cut) < len(whole) for cut, whole in zip(found[len(free) :], free, strict=True))


def test_a_chat_is_rendered_as_the_hf_backend_renders_it(ours: D3EngineLM, theirs: HFLM) -> None:
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " Begin with "}]
    for length, wants_more in ((1, True), (2, False)):
        rendered = ours.apply_chat_template(history[:length], add_generation_prompt=wants_more)
        assert rendered == theirs.apply_chat_template(history[:length], add_generation_prompt=wants_more)
        assert ours.tok_encode(rendered) == theirs.tok_encode(rendered), "BOS must come once"
    assert "add_generation_prompt" in ours.chat_template(True)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.chat_template(False) is None
    assert "/" not in ours.tokenizer_name


def test_answers_run_at_the_policys_depth_and_count_by_task(tiny: TinyLlama) -> None:
    """Answers run at the depth of the policy and are counted by task."""
    policy = D3(alpha=0.6, start=0.4)
    model = D3EngineLM(str(tiny.directory), depth="d3", alpha=0.6, start=0.4, **CACHE)
    gen = ("Question: what?\nAnswer:", {"until": [], "max_gen_toks": 12})
    asked = [Instance(request_type="generate_until", doc={}, arguments=gen, idx=0, metadata=("a task", 0, 1))]
    (text,) = model.generate_until(asked, disable_tqdm=True)
    params = SamplingParams(temperature=0, max_tokens=12, depth=policy)
    output = model.engine.generate(["Question: what?\nAnswer:"], params, use_tqdm=False)[0].outputs[0]
    usage = model.usage["a task"]
    assert text == output.text
    assert (usage.work.tokens, usage.work.layers) == (len(output.token_ids), sum(output.depths))
    assert usage.work.layers < 3 * usage.work.tokens
    assert usage.nominal_layers == policy.schedule(3).depths(12).sum()


def test_a_policy_does_not_change_log_likelihoods_and_says_so(
    tiny: TinyLlama, ours: D3EngineLM, caplog: pytest.LogCaptureFixture
) -> None:
    asked = requests("loglikelihood", *PAIRS[:3])
    shallow = D3EngineLM(ours.engine, depth=D3(alpha=0.6, start=0.4))
    with caplog.at_level(logging.WARNING):
        found = shallow.loglikelihood(asked, disable_tqdm=True)
    assert found == ours.loglikelihood(asked, disable_tqdm=True)
    assert "full depth" in caplog.text


def test_results_are_handed_to_the_harness_cache_as_they_come(ours: D3EngineLM) -> None:
    """A result is handed to the harness's cache as soon as it is computed."""
    kept: list[tuple[str, tuple[Any, ...], Any]] = []

    class Hook:
        def add_partial(self, kind: str, args: tuple[Any, ...], result: Any) -> None:
            kept.append((kind, tuple(args), result))

    before = ours.cache_hook
    ours.set_cache_hook(Hook())  # type: ignore[arg-type]
    try:
        pair = ("context", " more")
        gen = ("context", {"until": ["q"], "max_gen_toks": 3})
        (score,) = ours.loglikelihood(requests("loglikelihood", pair), disable_tqdm=True)
        (text,) = ours.generate_until(requests("generate_until", gen), disable_tqdm=True)
        (total,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", ("text",)), disable_tqdm=True)
    finally:
        ours.set_cache_hook(before)
    assert kept == [
        ("loglikelihood", pair, score),
        ("generate_until", gen, text),
        ("loglikelihood_rolling", ("text",), total),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": "d3", "alpha": 0.9}, "start"),
        ({"depth": "deep"}, "policy"),
        ({"alpha": 0.9}, "alpha"),
        ({"depth": "full", "no_such_option": 1}, "no_such_option"),
        ({"batch_size": "many"}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_batch_size": 8}, "max_batch_size"),
        ({"max_length": 10_000}, "max_length"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(tiny: TinyLlama, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        D3EngineLM(str(tiny.directory), **CACHE, **arguments)


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"until": ["a"], "num_beams": 4}, "num_beams"),
        ({"until": ["a"], "max_gen_toks": MAX_LENGTH}, "max_gen_toks"),
        ({"until": ["a"], "do_sample": True, "temperature": -1.0}, "temperature"),
    ],
)
def test_what_is_asked_in_vain_is_refused_by_name(ours: D3EngineLM, gen_kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        ours.generate_until(requests("generate_until", ("context", gen_kwargs)), disable_tqdm=True)


def test_an_engine_option_beside_an_open_engine_is_refused(ours: D3EngineLM) -> None:
    with pytest.raises(InvalidValueError, match="pretrained"):
        D3EngineLM(ours.engine, batch_size=4)


class _NoNumbers(Sampler):
    """A sampler that gets nothing but NaN."""

    def __call__(self, logits: torch.Tensor, plan: Any) -> Any:
        return super().__call__(torch.full_like(logits, torch.nan), plan)


def test_an_answer_that_a_fault_ended_is_an_error(tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    # With PyTorch the sampler chooses, not the native library.
    model = D3EngineLM(str(tiny.directory), depth="full", backend="torch", **CACHE)
    monkeypatch.setattr(model.engine.sampler, "__class__", _NoNumbers)
    with pytest.raises(D3EngineError, match="fault"):
        model.generate_until(requests("generate_until", ("a", {"until": [], "max_gen_toks": 4})), disable_tqdm=True)
    assert not model.engine.has_unfinished_requests()

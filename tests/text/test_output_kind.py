"""What outputs hold: everything so far, only what is new, or everything once at the end."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from batches import Request, assert_same, some_requests
from deltas import joined
from fixture_types import MakeEngine

from d3engine import D3, Engine, FullDepth, RequestOutput, RequestOutputKind, SamplingParams, SelfSpeculative

KINDS = list(RequestOutputKind)
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def of_kind(params: SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    return replace(params, output_kind=kind)


def step_through(engine: Engine, requests: list[Request], kind: RequestOutputKind) -> dict[int, list[RequestOutput]]:
    """All outputs of each request, in order."""
    for nth, request in enumerate(requests):
        engine.add_request(str(nth), list(request.prompt), of_kind(request.params, kind), request.priority)
    outputs: dict[int, list[RequestOutput]] = {nth: [] for nth in range(len(requests))}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
    return outputs


@pytest.mark.parametrize("seed", range(3))
def test_deltas_joined_are_the_final_output(make_engine: MakeEngine, seed: int) -> None:
    """Requests of every kind: several answers, log-probabilities, preemptions, policies that draft."""
    requests = some_requests(seed + 40, 10)
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    final = step_through(make_engine(**small), requests, FINAL_ONLY)
    deltas = step_through(make_engine(**small), requests, DELTA)
    for nth in range(len(requests)):
        assert [output.finished for output in final[nth]] == [True]
        assert [output.finished for output in deltas[nth]] == [False] * (len(deltas[nth]) - 1) + [True]
        assert_same(joined(deltas[nth]), final[nth][0])


@pytest.mark.parametrize("kind", KINDS)
def test_streams_hold_what_their_kind_says(kind: RequestOutputKind) -> None:
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
        whole = engine.generate("Question: Tom has", params, use_tqdm=False)[0].outputs[0]
        outputs = [output.outputs[0] for output in engine.stream("Question: Tom has", of_kind(params, kind))]
    texts, lengths = [output.text for output in outputs], [len(output.token_ids) for output in outputs]
    assert (outputs[-1].finish_reason, len(whole.token_ids)) == ("length", 12)
    if kind is DELTA:
        assert ("".join(texts), lengths) == (whole.text, [1] * 12)
        assert [len(output.logprobs or ()) for output in outputs] == [1] * 12
    elif kind is FINAL_ONLY:
        assert outputs == [whole]
    else:
        assert lengths == list(range(1, 13))
        assert outputs[-1] == whole
        assert all(later.startswith(text) for text, later in pairwise(texts))


def test_generate_returns_whole_answers_whatever_the_kind(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=8)
    answers = [engine.generate([1, 2, 3], of_kind(params, kind), use_tqdm=False)[0].outputs for kind in KINDS]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0][0].token_ids) == 8


@pytest.mark.parametrize("depth", [FullDepth(), D3(0.9, 0.5), SelfSpeculative(D3(0.9, 0.3))], ids=repr)
def test_long_answer_read_as_deltas_copies_each_token_once(make_engine: MakeEngine, depth: Any) -> None:
    """A long answer read as deltas copies each of its tokens once."""
    # What a cumulative stream copies grows with the square of the answer's length.
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=0, depth=depth)

    def items(output: RequestOutput) -> int:
        answer = output.outputs[0]
        return len(answer.token_ids) + len(answer.depths) + len(answer.logprobs or ())

    def copied(kind: RequestOutputKind) -> int:
        return sum(map(items, make_engine().stream([1, 2, 3], of_kind(params, kind))))

    assert copied(DELTA) == copied(FINAL_ONLY) == 3 * 50
    assert copied(RequestOutputKind.CUMULATIVE) > 3 * 50 * 10


def test_the_prompt_is_copied_once_for_all_deltas_of_a_request(make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=DELTA)
    engine = make_engine()
    outputs = list(engine.stream([1, 2, 3], params))
    assert len({id(output.prompt_token_ids) for output in outputs}) == 1
    for output in engine.stream([1, 2, 3], params):  # and it is the reader's own
        output.prompt_token_ids.clear()
    assert output.metrics.finished_time is not None
    assert engine.generate([1, 2, 3], params, use_tqdm=False)[0].prompt_token_ids == [1, 2, 3]


def test_an_aborted_request_says_so_in_its_last_delta(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=20, ignore_eos=True, n=2, output_kind=DELTA))
    first = engine.step()
    assert [[part.index for part in output.outputs] for output in first] == [[0, 1]]
    engine.abort_request("a")
    (last,) = engine.step()
    assert last.finished
    assert [(part.index, part.finish_reason, part.token_ids) for part in last.outputs] == [
        (0, "abort", []),
        (1, "abort", []),
    ]


def test_without_detokenizing_there_are_tokens_and_no_text() -> None:
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        params = SamplingParams(temperature=0, max_tokens=5, logprobs=1, ignore_eos=True)
        with_text, without = engine.generate(
            ["Question: Tom"] * 2, [params, replace(params, detokenize=False)], use_tqdm=False
        )
    assert without.outputs[0].text == ""
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids
    assert {entry.decoded_token for row in without.outputs[0].logprobs or () for entry in row.values()} == {None}
    assert None not in {entry.decoded_token for row in with_text.outputs[0].logprobs or () for entry in row.values()}


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, FINAL_ONLY])
def test_answer_ends_at_a_token_that_makes_no_text(monkeypatch: pytest.MonkeyPatch, kind: RequestOutputKind) -> None:
    """Also where many tokens are taken at once."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        whole = engine.generate("Question: Tom has", params, use_tqdm=False)[0].outputs[0]
        place = next(nth for nth in range(4, 12) if whole.token_ids[nth] not in whole.token_ids[:nth])
        piece_of = type(engine.tokenizer).convert_id_to_token

        def panic(tokenizer: Any, token_id: int) -> str | None:
            if token_id == whole.token_ids[place]:
                raise ValueError("no such piece")
            return piece_of(tokenizer, token_id)

        monkeypatch.setattr(type(engine.tokenizer), "convert_id_to_token", panic)
        *_, last = engine.stream("Question: Tom has", of_kind(params, kind))
    answer = last.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("abort", "ValueError: no such piece")
    assert answer.token_ids == whole.token_ids[: place + 1]
    assert len(answer.depths) == place + 1
    assert whole.text.startswith(answer.text)
    assert answer.text

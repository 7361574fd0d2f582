"""Streams, steps and aborts: whoever reads, in whatever order, gets their own outputs and all of them."""

from collections.abc import Generator

import pytest
from fixture_types import MakeEngine
from scripted import greedy, likeliest
from stepping import finish

import d3engine
from d3engine import Engine, FullDepth, IntervalAdmission, InvalidValueError, RequestOutput, RequestOutputKind


def test_streams_grow_by_what_each_step_brings(engine: Engine) -> None:
    lengths = [len(output.outputs[0].token_ids) for output in engine.stream("a", greedy(6))]
    assert lengths == [1, 2, 3, 4, 5, 6]


def test_stream_between_first_and_last_waits_its_interval(make_engine: MakeEngine) -> None:
    """Between the first token and the last a stream waits for as many as its interval."""
    engine = make_engine(stream_interval=4)
    whole = engine.generate("a", greedy(11), use_tqdm=False)[0].outputs[0]
    deltas = [o.outputs[0] for o in engine.stream("a", greedy(11, output_kind=RequestOutputKind.DELTA))]
    assert [len(delta.token_ids) for delta in deltas] == [1, 4, 4, 2]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [len(o.outputs[0].token_ids) for o in engine.stream("a", greedy(6))] == [1, 5, 6]
    engine.add_request("two", "a", likeliest(9, n=2, output_kind=RequestOutputKind.DELTA))
    found: list[int] = []
    while engine.has_unfinished_requests():
        found += [sum(len(answer.token_ids) for answer in output.outputs) for output in engine.step()]
    assert found == [2, 4, 4, 4, 4]


@pytest.mark.parametrize("interval", [0, 2.5, True])
def test_an_interval_of_no_whole_tokens_is_refused(make_engine: MakeEngine, interval: object) -> None:
    with pytest.raises(InvalidValueError, match="stream_interval must be an integer of at least 1"):
        make_engine(stream_interval=interval)


def test_leaving_a_stream_aborts_its_request(engine: Engine) -> None:
    stream = engine.stream("a", greedy(30))
    next(stream)
    assert engine.get_num_unfinished_requests() == 1
    assert isinstance(stream, Generator)
    stream.close()
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_running == 0


def test_abort_ends_a_request_with_what_it_has(engine: Engine) -> None:
    """An abort ends a request with what it has and others go on."""
    engine.add_request("a", "one", greedy(20))
    engine.add_request("b", "one", greedy(5))
    engine.add_request("c", "waits", likeliest(20, n=3))
    engine.step()
    engine.step()
    engine.abort_request(["a", "c", "unknown"])
    engine.abort_request("a")
    assert engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 1
    last = finish(engine)
    assert [c.finish_reason for c in last["a"].outputs + last["c"].outputs] == ["abort"] * 4
    assert last["a"].finished
    assert last["a"].outputs[0].token_ids == [100, 101]
    assert last["b"].outputs[0].token_ids == [100, 101, 102, 103, 104]


def test_generate_leaves_outputs_of_others_to_step(engine: Engine) -> None:
    """Generate leaves the outputs of unfinished requests to step."""
    engine.add_request("short", "mine", greedy(2))
    engine.add_request("long", "mine too", greedy(20))
    engine.step()
    answers = engine.generate(["x", "y"], greedy(6), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in answers] == [6, 6]
    last = finish(engine)
    assert len(last["short"].outputs[0].token_ids) == 2
    assert len(last["long"].outputs[0].token_ids) == 20
    assert all(output.finished for output in last.values())


def test_generate_does_not_take_an_id_in_use(engine: Engine) -> None:
    """Generate does not take the id of a request that a caller has named."""
    engine.add_request("request-1", "mine", greedy(4))
    engine.generate("x", greedy(6), use_tqdm=False)
    assert finish(engine)["request-1"].prompt == "mine"


def test_leaving_a_stream_loses_no_output_of_other_requests(engine: Engine) -> None:
    engine.add_request("mine", "a", greedy(1))
    stream = engine.stream("b", greedy(20))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert finish(engine)["mine"].finished


def test_streams_that_are_read_in_turns_all_come_to_their_end(engine: Engine) -> None:
    streams = [engine.stream("a", greedy(2)), engine.stream("b", greedy(5))]
    done = [0, 0]
    real_step, calls = engine.step, 0

    def counted() -> list[RequestOutput]:
        nonlocal calls
        calls += 1
        assert calls < 50, "a stream waits for an output that another stream has taken"
        return real_step()

    engine.step = counted  # type: ignore[method-assign]
    for _ in range(8):
        for nth, stream in enumerate(streams):
            output = next(stream, None)
            done[nth] = len(output.outputs[0].token_ids) if output else done[nth]
    assert done == [2, 5]


def test_waves_admit_between_them_and_an_idle_engine_at_once(make_engine: MakeEngine) -> None:
    """Waves let requests join only between them but an idle engine at once."""
    engine = make_engine(admission=IntervalAdmission(4), depth=FullDepth())
    engine.step()
    engine.add_request("a", "a", greedy(20))
    joined = []
    for step in range(10):
        if step == 1:
            engine.add_request("b", "b", greedy(3))
        engine.step()
        joined.append(engine.scheduler.num_running)
    assert joined == [1, 1, 1, 1, 2, 2, 1, 1, 1, 1]
    with pytest.raises(InvalidValueError, match=r"steps must be .*; got 0"):
        IntervalAdmission(0)


def test_the_old_name_of_an_admission_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"d3engine\.Waves is now d3engine\.IntervalAdmission"):
        assert d3engine.Waves is IntervalAdmission

"""Whoever calls when, and whenever Ctrl-C is pressed: a call is done whole or not at all, and alone.
Calls and signals come from inside a step, by way of the executor, so that nothing depends on timing."""

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fixture_types import MakeEngine
from stepping import finish, greedy, see_steps

from d3engine import Engine, EngineBusyError, EngineDeadError, InvalidValueError, Speculative
from d3engine.engine import call_lock as interrupts
from d3engine.errors import D3EngineError
from d3engine.executor.draft_target import DraftTargetExecutor
from d3engine.request.params import RequestOutputKind

Handle = Callable[[int], None]
PROMPT, OTHER = [11, 12, 13], [21, 22]


def in_step(engine: Engine, number: int, act: Callable[[], object]) -> None:
    """Let `act` happen in the middle of the engine's step `number`, counted from 1 and from now."""
    steps = iter(range(1, 1000))
    see_steps(engine, after=lambda plan, computed: act() if next(steps) == number else None)


def press() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_stays() -> Iterator[None]:
    """Nothing here may leave another handler behind than it found."""
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is before


# -- one call at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_thread", [False, True])
def test_call_during_another_is_refused_and_the_first_goes_on(make_engine: MakeEngine, from_thread: bool) -> None:
    """A call during another is refused, and the running one goes on."""
    want = make_engine().generate(PROMPT, greedy(), use_tqdm=False)[0].outputs
    engine = make_engine()
    stream = engine.stream(OTHER, greedy())
    next(stream)
    calls: list[Callable[[], object]] = [
        lambda: engine.generate(OTHER, greedy(), use_tqdm=False),
        lambda: engine.add_request("late", OTHER, greedy()),
        lambda: engine.abort_request("request-1"),
        lambda: engine.stream(OTHER, greedy()),
        engine.step,
        engine.stats,
        engine.reset_prefix_cache,
        engine.close,
    ]
    refused: list[object] = []

    def intrude() -> None:
        for call in calls:
            with pytest.raises(EngineBusyError, match="one call at a time"):
                call()
            refused.append(call)
        assert engine.has_unfinished_requests()
        assert engine.get_num_unfinished_requests() == 2

    def intrude_from_thread() -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    in_step(engine, 3, intrude_from_thread if from_thread else intrude)
    assert engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs == want
    assert refused == calls
    assert [output.finished for output in stream][-1]


def test_threads_that_take_turns_share_an_engine(make_engine: MakeEngine) -> None:
    prompts = [[10 + k, 20 + k] for k in range(4)]
    want = [make_engine().generate(prompt, greedy(), use_tqdm=False)[0].outputs for prompt in prompts]
    engine, turn, got = make_engine(), threading.Lock(), {}

    def work(k: int) -> None:
        with turn:
            stream = engine.stream(prompts[k], greedy())
        finished = False
        while not finished:
            with turn:
                output = next(stream)
            got[k], finished = output.outputs, output.finished
        with turn:
            stream.close()  # type: ignore[attr-defined]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [got[k] for k in range(4)] == want


def test_stream_forgotten_during_a_step_ends_after_it(make_engine: MakeEngine) -> None:
    """A stream forgotten in the middle of a step ends after it."""
    engine = make_engine()
    want = engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs
    streams = [engine.stream(OTHER, greedy(50))]
    next(streams[0])
    engine.add_request("a", PROMPT, greedy())
    in_step(engine, 2, streams.clear)
    engine.step()
    assert engine.get_num_unfinished_requests() == 2
    engine.step()
    assert engine.get_num_unfinished_requests() == 1
    assert finish(engine)["a"].outputs == want
    assert engine.stats().kv_blocks_in_use == 0
    engine.scheduler.check_integrity()


# -- who gets which output -------------------------------------------------------------------------------------------


def test_reader_who_steps_the_engine_reads_the_same_stream(make_engine: MakeEngine) -> None:
    """A reader that steps the engine itself reads the same stream."""
    engine = make_engine()
    want = list(engine.stream(PROMPT, greedy()))
    engine.add_request("other", OTHER, greedy(3))
    stepped, read = {}, []
    for output in engine.stream(PROMPT, greedy()):
        read.append(output)
        stepped |= finish(engine)
    assert [output.outputs for output in read] == [output.outputs for output in want]
    assert stepped.keys() == {"other"}
    assert not engine.has_unfinished_requests()


def test_answers_inside_a_stream_leave_it_as_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine()
    want = [output.outputs for output in engine.stream(PROMPT, greedy())]
    read = []
    for output in engine.stream(PROMPT, greedy()):
        read.append(output.outputs)
        engine.generate(OTHER, greedy(3), use_tqdm=False)
    assert read == want


def test_an_aborted_stream_ends(make_engine: MakeEngine) -> None:
    engine = make_engine()
    reasons = []
    for output in engine.stream(PROMPT, greedy(50)):
        reasons.append(output.outputs[0].finish_reason)
        engine.abort_request(output.request_id)
    assert reasons == [None, "abort"]


def test_an_id_is_free_again_when_its_last_output_was_returned(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", PROMPT, greedy())
    engine.step()
    engine.abort_request("a")
    with pytest.raises(InvalidValueError, match=r"request_id must be an id of no unfinished request.*got 'a'"):
        engine.add_request("a", OTHER, greedy(1))
    assert [(output.request_id, output.outputs[0].finish_reason) for output in engine.step()] == [("a", "abort")]
    engine.add_request("a", OTHER, greedy(1))
    assert [(output.request_id, output.outputs[0].finish_reason) for output in engine.step()] == [("a", "length")]


def test_waiting_outputs_are_returned_before_a_steps_fault(make_engine: MakeEngine) -> None:
    """Waiting outputs are returned though the step fails; then its fault is raised."""
    engine = make_engine()
    engine.add_request("first", OTHER, greedy(2))
    engine.generate(PROMPT, greedy(), use_tqdm=False)  # in whose steps "first" has finished
    engine.add_request("second", PROMPT, greedy())
    in_step(engine, 1, lambda: 1 / 0)
    waited = engine.step()
    assert [(output.request_id, output.finished) for output in waited] == [("first", False), ("first", True)]
    assert engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        engine.step()


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_generate_raises_between_steps(make_engine: MakeEngine) -> None:
    """Ctrl-C in `generate` is heard between two steps, and the engine goes on."""
    engine = make_engine()
    want = engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs
    engine.add_request("other", PROMPT, greedy())
    in_step(engine, 3, press)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([OTHER] * 20, greedy(), use_tqdm=False)
    assert engine.get_num_unfinished_requests() == 1  # none of generate's is left to run later
    assert finish(engine)["other"].outputs == want
    assert engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs == want
    assert engine.stats().kv_blocks_in_use == 0
    engine.scheduler.check_integrity()


def test_ctrl_c_in_step_loses_no_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    want = [output.outputs for output in engine.stream(PROMPT, greedy())]
    engine.add_request("a", PROMPT, greedy())
    in_step(engine, 2, press)
    got = engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_unfinished_requests():
        got += engine.step()
    assert [output.outputs for output in got] == want


def test_ctrl_c_in_a_stream_ends_its_request_alone(make_engine: MakeEngine) -> None:
    engine, longer = make_engine(), greedy(100)  # a step may take all tokens of the streamed answer at once
    want = engine.generate(PROMPT, longer, use_tqdm=False)[0].outputs
    engine.add_request("other", PROMPT, longer)
    in_step(engine, 2, press)
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream(OTHER, greedy(50)))
    assert engine.get_num_unfinished_requests() == 1
    assert finish(engine)["other"].outputs == want


@pytest.mark.parametrize("where", ["outputs", "scheduler"])
@pytest.mark.parametrize("how", ["Ctrl-C", "an exception out of nowhere"])
def test_a_request_is_queued_whole_or_not_at_all(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, where: str, how: str
) -> None:
    engine = make_engine()
    want = engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs
    owner = {"outputs": engine._in_flight.outputs, "scheduler": engine.scheduler}[where]
    add = owner.add

    def interrupted(*arguments: Any, **named: Any) -> None:
        if how == "Ctrl-C":
            press()
        add(*arguments, **named)
        if how != "Ctrl-C":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request("a", PROMPT, greedy())
    assert engine.get_num_unfinished_requests() == engine.stats().num_waiting == (1 if how == "Ctrl-C" else 0)
    last = finish(engine)
    assert [output.outputs for output in last.values()] == ([want] if how == "Ctrl-C" else [])
    assert engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs == want


@pytest.mark.parametrize("nth", [1, 3])
def test_ctrl_c_while_generate_queues_leaves_no_prompt(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Ctrl-C while `generate` queues its prompts leaves none behind."""
    engine = make_engine()
    add, calls = engine.scheduler.add, iter(range(1, 100))

    def interrupted(sequence: Any) -> None:
        add(sequence)
        if next(calls) == nth:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT] * 5, greedy(), use_tqdm=False)
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_waiting == 0
    assert engine.generate(PROMPT, greedy(2), use_tqdm=False)[0].finished


def test_ctrl_c_pressed_twice_does_not_wait_for_the_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    in_step(engine, 1, lambda: (press(), press()))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, greedy(), use_tqdm=False)
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.generate(PROMPT, greedy(), use_tqdm=False)


def test_signal_handlers_of_a_caller_stay(make_engine: MakeEngine) -> None:
    heard: list[int] = []

    def own(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        engine = make_engine()
        in_step(engine, 1, lambda: (press(), heard.append(0)))
        assert engine.generate(PROMPT, greedy(), use_tqdm=False)[0].finished
        assert heard == [signal.SIGINT, 0]  # at once
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_installed_in_the_middle_of_a_call_stays(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = signal.getsignal(signal.SIGINT)
    try:
        in_step(engine, 1, lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        engine.generate(PROMPT, greedy(), use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class LateError(Exception):
    """What the handler of a time limit raises."""


def late(number: int, frame: Any) -> None:
    raise LateError(number)


@pytest.fixture
def handle() -> Iterator[Callable[[int], None]]:
    """Installs `late` as the handler of a signal, which must still be in its place after the test."""
    before: dict[int, Any] = {}

    def install(number: int) -> None:
        before[number] = signal.signal(number, late)

    yield install
    after = {number: signal.signal(number, old) for number, old in before.items()}
    assert set(after.values()) == {late}


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGRTMIN])
@pytest.mark.parametrize("times", [1, 3])
def test_exception_of_a_signal_handler_ends_only_the_call(
    make_engine: MakeEngine, handle: Handle, number: signal.Signals, times: int
) -> None:
    """An exception of any signal handler ends the call and not the engine."""
    engine = make_engine()
    want = engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs
    handle(number)
    in_step(engine, 2, lambda: [signal.raise_signal(number) for _ in range(1 if number == signal.SIGINT else times)])
    with pytest.raises(LateError):
        engine.generate([PROMPT, OTHER], greedy(100), use_tqdm=False)
    assert not engine.has_unfinished_requests()
    assert engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs == want


def test_signals_of_one_step_are_all_raised(make_engine: MakeEngine, handle: Handle) -> None:
    engine = make_engine()
    handle(signal.SIGALRM)
    in_step(engine, 1, lambda: (signal.raise_signal(signal.SIGALRM), press()))
    with pytest.raises((KeyboardInterrupt, LateError)) as caught:
        engine.generate(PROMPT, greedy(100), use_tqdm=False)
    assert {type(caught.value), type(caught.value.__context__)} == {KeyboardInterrupt, LateError}
    assert engine.generate(PROMPT, greedy(), use_tqdm=False)[0].finished


def test_a_time_limit_ends_a_stream_of_one_output_at_its_step(make_engine: MakeEngine, handle: Handle) -> None:
    engine, steps = make_engine(num_scheduler_steps=1), []
    handle(signal.SIGALRM)
    see_steps(engine, steps.append)
    in_step(engine, 2, lambda: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(LateError):
        list(engine.stream(PROMPT, greedy(100, output_kind=RequestOutputKind.FINAL_ONLY)))
    assert len(steps) == 2


def test_what_a_step_has_computed_outlives_a_time_limit(make_engine: MakeEngine, handle: Handle) -> None:
    engine = make_engine()
    want = engine.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs
    handle(signal.SIGALRM)
    engine.add_request("a", PROMPT, greedy())
    in_step(engine, 1, lambda: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(LateError):
        engine.step()
    assert finish(engine)["a"].outputs == want


def test_handler_raising_during_restore_leaves_all_restored(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises while handlers are put back leaves none out of place."""
    handle(signal.SIGALRM)
    put_back, calls = interrupts._put_back, []

    def interrupted(held: Any) -> None:
        calls.append(held)
        late(0, None)

    with monkeypatch.context() as patched:
        patched.setattr(interrupts, "_put_back", interrupted)
        with pytest.raises(LateError), interrupts.held_back():
            pass
    assert len(calls) == 2
    with pytest.raises(LateError):  # nothing is held back any more
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is not late
    with pytest.raises(LateError), interrupts.held_back():  # at its end
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is late
    assert interrupts._put_back is put_back


def test_another_thread_touches_no_signals(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seen: list[object] = []
    in_step(engine, 1, lambda: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=lambda: seen.append(engine.generate(PROMPT, greedy(), use_tqdm=False)))
    thread.start()
    thread.join()
    assert seen[0] is signal.default_int_handler
    assert len(seen) == 2


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [True, False])
def test_a_closed_engine_holds_nothing_and_says_so(eager: bool) -> None:
    engine = Engine("demo", depth=Speculative("demo"), max_model_len=64, enforce_eager=eager)
    engine.add_request("unfinished", "Question:", greedy())
    stream = engine.stream("Question:", greedy())
    next(stream)
    pair = engine.executor
    first, second = (
        (pair.first, pair.second) if isinstance(pair, DraftTargetExecutor) else (pair, pair._draft_model)  # type: ignore[attr-defined]
    )
    held = [weakref.ref(first), weakref.ref(first.pool), weakref.ref(second)]
    del pair, first, second
    in_step(engine, 1, lambda: 1 / 0)
    engine.step()  # returns the outputs that waited
    with pytest.raises(EngineDeadError):
        engine.step()
    with engine:
        pass
    engine.close()
    gc.collect()
    assert [part() for part in held] == [None, None, None]
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0
    calls: list[Callable[[], object]] = [
        lambda: engine.generate([], use_tqdm=False),
        lambda: engine.add_request("new", "Question:", greedy()),
        lambda: engine.prepare("Question:"),
        lambda: engine.abort_request("unfinished"),
        lambda: engine.stream("Question:", greedy()),
        lambda: next(stream),
        engine.step,
        engine.stats,
        engine.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(D3EngineError, match="the engine is closed"):
            call()

"""A run in the background, whose caller takes each step's tokens, equals the same run in one call."""

import os
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from native_models import Case, Shape

from d3engine.kernels.native.library import Decoder
from d3engine.kernels.native.model import NativeError
from d3engine.kernels.native.runs import Draws

STEPS = 6


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(Shape(layers=3, hidden=128, intermediate=320, rows=4, vocab=2000))


def control() -> np.ndarray:
    return np.zeros(2, np.int32)


def assert_takes(decoder: Decoder, wanted: tuple[np.ndarray, np.ndarray], first: int = 0, end: int = STEPS) -> None:
    for step in range(first, end):
        tokens, scores = decoder.take()
        np.testing.assert_array_equal(tokens[0], wanted[0][step])
        np.testing.assert_array_equal(scores[0], wanted[1][step])


@pytest.mark.parametrize("threads", [1, 3])
def test_each_step_is_that_of_the_run_in_one_call(case: Case, threads: int) -> None:
    draws = Draws(np.array([0.0, 0.5, 1.0, 3.0], np.float32), np.arange(4), np.zeros(4, np.int64))
    decoder = case.decoder(num_threads=threads)
    for asked in (None, draws):
        wanted = decoder.run(case.rows, STEPS, draws=asked)
        words = control()
        decoder.begin(case.rows, STEPS, words, draws=asked)
        assert_takes(decoder, wanted)
        assert words.tolist() == [0, STEPS]
        decoder.finish()


def test_all_steps_that_are_done_may_be_taken_at_once(case: Case) -> None:
    decoder = case.decoder()
    wanted = decoder.run(case.rows, STEPS)
    words = control()
    decoder.begin(case.rows, STEPS, words)
    tokens, scores = decoder.take()
    while words[1] < STEPS:  # the last one has not begun, and so those before it may not be done
        os.sched_yield()
    for _ in range(2):
        some = decoder.take(all_done=True)
        tokens, scores = (np.concatenate(pair) for pair in zip((tokens, scores), some, strict=True))
        assert len(tokens) >= STEPS - 1
        if len(tokens) == STEPS:
            break
    np.testing.assert_array_equal(tokens, wanted[0])
    np.testing.assert_array_equal(scores, wanted[1])
    decoder.finish()


def test_the_tables_may_be_written_while_the_run_goes_on(case: Case) -> None:
    decoder = case.decoder()
    wanted = decoder.run(case.rows, STEPS)
    rows = replace(case.rows, tables=case.rows.tables.copy())
    decoder.begin(rows, STEPS, control())
    rows.tables[:] = -1
    assert_takes(decoder, wanted)
    decoder.finish()


def test_a_stopped_run_takes_no_step_and_the_next_one_begins(case: Case) -> None:
    decoder = case.decoder()
    wanted = decoder.run(case.rows, STEPS)
    words = control()
    decoder.begin(case.rows, STEPS, words)
    assert_takes(decoder, wanted, end=2)
    words[0] = 1
    decoder.finish()
    begun = int(words[1])
    assert 2 <= begun <= STEPS
    assert_takes_again(decoder, case, wanted)
    assert words[1] == begun


def assert_takes_again(decoder: Decoder, case: Case, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    decoder.begin(case.rows, STEPS, control())
    assert_takes(decoder, wanted)
    decoder.finish()


def test_take_runs_a_step_that_the_thread_left_undone(case: Case) -> None:
    decoder = case.decoder()
    wanted = decoder.run(case.rows, STEPS)
    words = np.array([1, 0], np.int32)  # ended before its thread begins
    decoder.begin(case.rows, STEPS, words)
    assert_takes(decoder, wanted, end=1)
    assert words[1] == 1
    decoder.finish()


def test_a_busy_decoder_refuses_runs_until_it_is_finished(case: Case) -> None:
    decoder = case.decoder()
    wanted = decoder.run(case.rows, STEPS)
    decoder.begin(case.rows, STEPS, control())
    with pytest.raises(NativeError, match="at work"):
        decoder.run(case.rows, 1)
    decoder.finish()
    np.testing.assert_array_equal(decoder.run(case.rows, STEPS)[0], wanted[0])


def test_runs_out_of_bounds_are_refused_before_they_begin(case: Case) -> None:
    decoder = case.decoder()
    with pytest.raises(NativeError, match="a token id"):
        decoder.begin(replace(case.rows, tokens=case.rows.tokens + 2000), 1, control())
    decoder.finish()
    assert_takes_again(decoder, case, decoder.run(case.rows, STEPS))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that Linux tells of")
def test_destroying_a_decoder_in_a_run_joins_its_threads(case: Case) -> None:
    """And writes nothing more into a pool that may be freed."""
    before = set(os.listdir("/proc/self/task"))
    decoder = case.decoder(num_threads=2)
    words = control()
    decoder.begin(case.rows, STEPS, words)
    decoder.take()
    assert len(set(os.listdir("/proc/self/task")) - before) >= 1
    finalizer = decoder._finalizer
    del decoder
    assert not finalizer.alive
    deadline = time.monotonic() + 300  # against hanging; the kernel may show a thread a moment after it was joined
    while not set(os.listdir("/proc/self/task")) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_forked_process_takes_the_rest_of_a_run_by_itself(case: Case, threads: int) -> None:
    decoder = case.decoder(num_threads=threads)
    wanted = decoder.run(case.rows, STEPS)
    decoder.begin(case.rows, STEPS, control())
    assert_takes(decoder, wanted, end=1)
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # rather than hang
        status = 1
        try:
            assert_takes(decoder, wanted, first=1)
            decoder.finish()
            assert_takes_again(decoder, case, wanted)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert_takes(decoder, wanted, first=1)
    decoder.finish()

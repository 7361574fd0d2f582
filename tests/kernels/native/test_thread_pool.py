"""The thread pool: each tile once, callers one at a time, and no waiting for missing threads."""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from native_models import Case, Shape

from d3engine.kernels.native import build
from d3engine.kernels.native.model import NativeError

SHAPE = Shape(layers=3, hidden=128, intermediate=320, rows=4, vocab=2000)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(SHAPE)


def test_two_engines_of_a_process_decode_at_the_same_time() -> None:
    cases = [Case(SHAPE), Case(SHAPE)]
    wanted = cases[0].decode(8)[0]
    decoders = [case.decoder(num_threads=3) for case in cases]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            runs = [pool.submit(d.run, c.rows, 8) for c, d in zip(cases, decoders, strict=True)]
            for run in runs:
                np.testing.assert_array_equal(run.result()[0], wanted)


def test_a_second_caller_of_one_decoder_is_refused(case: Case) -> None:
    decoder = case.decoder()
    wanted = decoder.run(case.rows, 8)[0]
    refused = threading.Event()

    def calls_until_refused() -> str:
        try:
            while not refused.is_set():
                np.testing.assert_array_equal(decoder.run(case.rows, 8)[0], wanted)
        except NativeError as error:
            return str(error)
        finally:
            refused.set()
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = [run.result(timeout=600) for run in [pool.submit(calls_until_refused) for _ in range(2)]]
    assert "the decoder is at work in another thread" in said


def test_a_forked_process_decodes_on(case: Case) -> None:
    """The child has no helpers of its parent, which keeps them."""
    decoder = case.decoder(num_threads=3)
    wanted = decoder.run(case.rows, 4)[0]
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # rather than hang
        os._exit(0 if np.array_equal(decoder.run(case.rows, 4)[0], wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(decoder.run(case.rows, 4)[0], wanted)


def test_helpers_without_work_take_no_processor_time(case: Case) -> None:
    decoder = case.decoder(num_threads=4)
    decoder.run(case.rows, 4)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15
    decoder.run(case.rows, 4)  # and wake up


def said_by(program: str, folder: Path) -> tuple[int, str, str]:
    """The exit status, output and errors of a program of this folder, linked with the thread pool alone."""
    built, source = folder / program, Path(__file__).with_name(f"{program}.cpp")
    pool = [str(build.FOLDER / "threading" / name) for name in ("thread_pool.cpp", "process.cpp")]
    files = [str(source), *pool, f"-I{build.FOLDER}", "-o", str(built)]
    subprocess.run([*build.find_compiler(), *build.FLAGS, "-O0", *files], check=True)
    done = subprocess.run([str(built)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout.strip(), done.stderr


def test_every_tile_of_a_job_runs_once(tmp_path: Path) -> None:
    """On any number of threads, with fewer tiles than threads or more than a notice can hold."""
    assert said_by("every_tile", tmp_path) == (0, "each once", "")


def test_a_straggler_is_left_out_for_twice_its_delay(tmp_path: Path) -> None:
    """By a simulated clock; the program reports what is wrong."""
    assert said_by("straggler", tmp_path) == (0, "as it should be", "")

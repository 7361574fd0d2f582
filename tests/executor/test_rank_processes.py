"""The ranks of a model as processes: how they begin, agree, and end, each for itself and all together."""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fixture_types import MakeEngine, MakeLlama, MakePrompts
from rank_tests import PROMPT, asked, engine_of, left_to_test_parallel
from saved_llama import change
from stepping import finish
from tiny_models import save_without_layer

from d3engine import D3, AsyncEngine, EarlyExit, Engine, InvalidValueError, Lossless, SamplingParams, Speculative
from d3engine.engine.ranks import Place
from d3engine.errors import EngineDeadError, ModelFormatError
from d3engine.executor.tensor_parallel import worker as follower
from d3engine.executor.tensor_parallel.group import dist
from d3engine.executor.tensor_parallel.worker import Leader
from d3engine.executor.tensor_parallel.worker_channel import WorkerChannel

HANG_GUARD_SECONDS = 300


def asked_of_each() -> list[SamplingParams]:
    """A request of every kind that ranks run differently: greedy, drawn, cut, leaving early, drafted."""
    common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "seed": 5}
    return [
        SamplingParams(temperature=0, depth=D3(0.8, 0.3), **common),
        SamplingParams(temperature=1.5, depth=D3(0.8, 0.3), **common),
        SamplingParams(temperature=1.5, top_p=0.8, logprobs=2, **common),
        SamplingParams(temperature=0, depth=EarlyExit(0.9, "cosine"), **common),
        SamplingParams(temperature=0, depth=Lossless(D3(0.8, 0.3), 3), **common),
    ]


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    outputs = engine.generate(prompts, asked_of_each(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.ranks" in " ".join(child.cmdline())]


def test_rank_processes_answer_as_one_and_die_by_name(tiny_llama: MakeLlama, make_prompts: MakePrompts) -> None:
    """Ranks in processes answer as one; the death of one ends the engine by its name."""
    directory, _ = tiny_llama(num_hidden_layers=4)
    prompts = make_prompts([3, 17, 9, 5, 11])
    with engine_of(directory) as whole:
        wanted = tokens_of(whole, prompts)
    engine = engine_of(directory, tensor_parallel_size=2)
    (rank,) = children()
    os.kill(rank.pid, signal.SIGTERM)  # which systemd sends to all processes of a service: rank 0 ends the others
    assert tokens_of(engine, prompts) == wanted
    assert engine.stats().executor == "eager, on 2 ranks"
    engine.add_request("one", prompts[0], asked_of_each()[0])
    engine.step()
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended by signal 9"):
        finish(engine)
    assert not children()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended by signal 9"):
        engine.step()
    engine.close()


# -- the two ends of a rank's connection, without a process ----------------------------------------------------------


def joined(patience: float = HANG_GUARD_SECONDS) -> tuple[WorkerChannel, Any]:
    ours, theirs = Pipe()
    return WorkerChannel([ours], patience=patience), theirs


def test_a_rank_that_cannot_begin_says_why() -> None:
    for error, expected in (
        (ModelFormatError("model.safetensors: tensor 'x' holds NaN or infinity"), "tensor 'x' holds NaN"),
        (MemoryError("too little"), "rank 1 of 2: too little"),
    ):
        workers, link = joined()
        Leader(link).fail(error)
        with pytest.raises((ModelFormatError, EngineDeadError), match=expected) as raised:
            workers.hear()
        assert isinstance(raised.value, ModelFormatError) == isinstance(error, ModelFormatError)
        workers.close()


def test_a_rank_that_ends_before_it_is_ready_is_not_waited_for() -> None:
    workers, link = joined()
    link.close()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended or cannot be reached"):
        workers.hear()
    workers.close()


def test_rank_that_ends_before_it_joins_is_not_waited_for(tmp_path: Path) -> None:
    """A rank that ends before it joins the others is not waited for there."""
    workers, link = joined()
    place = Place(0, 2, 0, dist.FileStore(str(tmp_path / "store"), 2), is_local=True)
    Leader(link).say("loaded")
    assert workers.hear() == ["loaded"]
    link.close()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended or cannot be reached"):
        workers.call(lambda: place.join(torch.device("cpu")))
    workers.close()


def test_stopped_rank_ends_the_engine_and_is_killed() -> None:
    """A rank that is stopped ends the engine by its name and is killed."""
    ours, theirs = Pipe()
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    os.kill(process.pid, signal.SIGSTOP)
    workers = WorkerChannel([ours], [process], patience=1.0)
    freed = threading.Event()
    workers.free_by(freed.set)
    assert process.wait(HANG_GUARD_SECONDS) == -signal.SIGKILL
    assert freed.wait(HANG_GUARD_SECONDS)
    said = r"rank 1 of 2 has said nothing for 1 seconds: its process is stopped, or its machine cannot be reached"
    with pytest.raises(EngineDeadError, match=said):
        workers.send_plan(b"")
    workers.close()
    theirs.close()


def test_silent_rank_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lives is waited for however long it says nothing else."""
    monkeypatch.setattr(follower, "BEAT_SECONDS", 0.1)
    workers, link = joined(patience=2.0)
    leader = Leader(link)
    nothing = threading.Event()
    workers.call(lambda: nothing.wait(2.5))
    leader.say("at last")
    assert workers.hear() == ["at last"]
    workers.close()


def test_fault_of_one_rank_is_the_reason_of_all() -> None:
    """The fault of one rank is the reason and not that others miss it."""
    pairs = [Pipe() for _ in range(3)]
    workers = WorkerChannel([ours for ours, _ in pairs])
    freed: list[bool] = []
    workers.free_by(lambda: freed.append(True))
    Leader(pairs[0][1]).fail(EngineDeadError("other ranks cannot be reached"))
    Leader(pairs[1][1]).fail(ValueError("the fault itself"))
    Leader(pairs[2][1]).fail(EngineDeadError("other ranks cannot be reached"))
    reason = workers.explain(EngineDeadError("lost"))
    assert str(reason) == "rank 2 of 4: the fault itself"
    with pytest.raises(EngineDeadError, match="rank 2 of 4: the fault itself"):
        workers.send_plan(b"")
    workers.close()
    assert freed == [True]


def test_a_fault_of_rank_0_is_every_ranks_and_its_end_ends_them() -> None:
    workers, link = joined()
    leader = Leader(link)
    workers.close("rank 0 has run out of memory")
    with pytest.raises(EngineDeadError, match="rank 0 has run out of memory"):
        leader.hear()
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(EngineDeadError, match="rank 0 has ended"):
        Leader(theirs).hear()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "allowed"),
    [
        (0, "an integer from 1 to 1024"),
        (True, "an integer from 1 to 1024"),
        (5, "so few that each rank has a head of its own: there are 4 query heads over 2 key/value heads"),
    ],
)
def test_number_of_ranks_without_enough_heads_is_refused(size: Any, allowed: str, tiny_llama: MakeLlama) -> None:
    """A number of ranks that the model has not enough heads for is refused."""
    with pytest.raises(InvalidValueError, match=f"tensor_parallel_size must be {allowed}"):
        engine_of(tiny_llama().directory, tensor_parallel_size=size)


def test_ready_weights_beside_ranks_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidValueError, match="weights must be None beside tensor_parallel_size=2"):
        make_engine(tensor_parallel_size=2)


# -- with more processes -----------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from d3engine import D3, Engine, SamplingParams
from rank_tests import PROMPT, asked
if __name__ == "__main__":
    size = int(sys.argv[2])
    with Engine(sys.argv[1], tensor_parallel_size=size, skip_tokenizer_init=True, dtype="float32") as engine:
        print(os.getpid(), engine.generate([PROMPT], asked(), use_tqdm=False)[0].outputs[0].token_ids, flush=True)
        if len(sys.argv) > 3:
            os.kill(os.getpid(), 9)
"""


def run_program(tmp_path: Path, command: list[str], *arguments: object) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    support = str(Path(__file__).parents[1] / "support")
    environment = os.environ | {"PYTHONPATH": support, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command, str(program), *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wanted_of(directory: Path) -> list[int]:
    with Engine(directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True) as engine:
        return engine.generate([PROMPT], asked(), use_tqdm=False)[0].outputs[0].token_ids


def test_four_processes_answer_as_one_and_end_together(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """Four processes answer as one and end with the one that plans, however it ends."""
    left_to_test_parallel()
    directory, _ = tiny_llama(num_attention_heads=8, num_key_value_heads=4)
    program = run_program(tmp_path, [], directory, 4, "and is killed")
    assert program.stdout is not None
    line = program.stdout.readline()
    ranks = psutil.Process(int(line.split()[0])).children() if program.poll() is None else []
    program.communicate(timeout=HANG_GUARD_SECONDS)
    assert line.split(maxsplit=1)[1].strip() == str(wanted_of(directory))
    assert program.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(ranks, timeout=HANG_GUARD_SECONDS)
    assert not alive


@pytest.mark.parametrize("size", [2, 4])
def test_program_under_torchrun_prints_once_and_ends(size: int, tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """A program under torchrun prints once and ends everywhere."""
    left_to_test_parallel()
    directory, _ = tiny_llama(num_attention_heads=8, num_key_value_heads=4)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    program = run_program(tmp_path, torchrun, directory, size)
    output, errors = program.communicate(timeout=HANG_GUARD_SECONDS)
    assert program.returncode == 0, errors
    assert [line.split(maxsplit=1)[1] for line in output.splitlines()] == [str(wanted_of(directory))]


def test_other_number_of_ranks_than_torchruns_is_refused(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """Another number of ranks than torchrun has started is refused."""
    left_to_test_parallel()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = run_program(tmp_path, torchrun, tiny_llama().directory, 4)
    _, errors = program.communicate(timeout=HANG_GUARD_SECONDS)
    assert program.returncode != 0
    assert "tensor_parallel_size must be the number of ranks that torchrun has started, 2; got 4" in errors


def test_the_death_of_an_engines_process_ends_its_ranks(tiny_llama: MakeLlama) -> None:
    left_to_test_parallel()
    directory, _ = tiny_llama()

    async def kill() -> list[psutil.Process]:
        arguments: dict[str, Any] = {"tensor_parallel_size": 2, "skip_tokenizer_init": True, "device": "cpu"}
        async with AsyncEngine(directory, transport="process", **arguments) as engine:
            (process,) = psutil.Process().children()
            ranks = process.children()
            assert len(ranks) == 1
            process.kill()
            with pytest.raises(EngineDeadError, match="by signal 9"):
                async for _ in engine.generate(PROMPT, asked(), request_id="one"):
                    pass
            return ranks

    _, alive = psutil.wait_procs(asyncio.run(kill()), timeout=HANG_GUARD_SECONDS)
    assert not alive


def test_rank_stopped_while_it_answers_ends_the_engine(tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is stopped while it answers ends the engine, and no process is left."""
    left_to_test_parallel()
    with engine_of(tiny_llama().directory, tensor_parallel_size=2) as engine:
        (rank,) = children()
        engine.add_request("one", PROMPT, asked())
        engine.step()
        workers: WorkerChannel = engine.executor._workers  # type: ignore[attr-defined]
        workers._patience = 3.0
        os.kill(rank.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="rank 1 of 2 has said nothing for 3 seconds"):
            finish(engine)
    assert not children()


def test_a_rank_killed_as_all_join_ends_the_start(tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    left_to_test_parallel()

    def join(place: Place, device: torch.device) -> Any:
        (rank,) = children()
        os.kill(rank.pid, signal.SIGKILL)
        return itself(place, device)

    itself = Place.join
    monkeypatch.setattr(Place, "join", join)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended by signal 9"):
        engine_of(tiny_llama().directory, tensor_parallel_size=2)
    assert not children()


def test_second_model_drafts_with_the_ranks_of_the_first(
    tiny_llama: MakeLlama, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    """A second model drafts with the ranks of the first."""
    left_to_test_parallel()
    tiny = tiny_llama(num_hidden_layers=4)
    policy = Speculative(save_without_layer(tiny, 2, tmp_path / "draft"), 3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for size in (1, 2):
        with engine_of(tiny.directory, tensor_parallel_size=size, depth=policy) as engine:
            outputs = engine.generate(make_prompts([3, 9]), params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert engine.stats().drafted_tokens > 0
    assert found[0] == found[1]


def test_fault_of_one_rank_names_its_tensor(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """A fault in the part of one rank names its tensor, and no process is left."""
    left_to_test_parallel()
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama().directory, directory)
    change(directory, lambda tensors: tensors["lm_head.weight"][-1].fill_(math.nan))  # of rank 1's tokens
    with pytest.raises(ModelFormatError, match=r"'lm_head.weight' holds NaN or infinity"):
        engine_of(directory, tensor_parallel_size=2)
    assert not children()

"""A model on several devices: ranks load their parts and do the same in the same order,
when rank 0 says; a failure ends all with its reason."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from d3engine.depth import FullDepth
from d3engine.engine.executors import build_executor, room
from d3engine.engine.host import pytorch_threads_for
from d3engine.engine.settings import EngineSettings, plain_settings, settings_of_plain
from d3engine.errors import EngineDeadError, InvalidValueError
from d3engine.executor.interface import Executor
from d3engine.executor.tensor_parallel.executor import TensorParallelExecutor
from d3engine.executor.tensor_parallel.group import GroupCollectives, Store, dist, join_group
from d3engine.executor.tensor_parallel.worker import Leader
from d3engine.executor.tensor_parallel.worker_channel import WorkerChannel, first_value
from d3engine.model.config import ModelConfig
from d3engine.model.shard import ARGUMENT, Part, Ranks, shard_of
from d3engine.model.weights import LlamaWeights, load_weights
from d3engine.request.admission import Immediate
from d3engine.utils.children import child_environment, main_command

_ENGINES = itertools.count()
"""Under torchrun every rank makes the same engines in the same order: by its number they find each other."""


def start_ranks(size: int) -> tuple[WorkerChannel, Place]:
    """Rank 0 of `size`, with processes for the others; in sessions of their own, so that Ctrl-C is for this one."""
    folder = TemporaryDirectory(prefix="d3engine-")
    store = str(Path(folder.name) / "store")
    links: list[Connection] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                numbers = map(str, (theirs.fileno(), rank, size, os.getpid()))
                processes.append(
                    subprocess.Popen(
                        main_command(__name__, *numbers, store),
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                        env=child_environment(),
                    )
                )
                links.append(Connection(ours.detach()))
    except OSError as error:
        WorkerChannel(links, processes, cleanup=folder.cleanup).close()
        raise EngineDeadError(f"rank {len(processes) + 1} of {size} cannot be started: {error}") from error
    place = Place(0, size, 0, dist.FileStore(store, size), is_local=True)
    return WorkerChannel(links, processes, cleanup=folder.cleanup), place


def main() -> None:
    """A process that `start_ranks` has started."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the engine's own process does
    link, rank, size, parent = map(int, sys.argv[1:5])
    store = dist.FileStore(sys.argv[5], size)
    status = 1
    # Whatever it is, rank 0 has been told, and says it.
    with contextlib.suppress(BaseException):
        follow(Leader(Connection(link), parent), Place(rank, size, rank, store, is_local=True))
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_under_torchrun() -> bool:
    """Whether torchrun has started this process, as one of several ranks."""
    return bool(dist.is_available() and dist.is_torchelastic_launched())


def own_index() -> int:
    """Which of the ranks on this machine this process is; the first where no launcher has started it."""
    return int(os.environ.get("LOCAL_RANK", 0)) if is_under_torchrun() else 0


def meet_under_torchrun(size: int) -> tuple[WorkerChannel, Place]:
    """Rank 0 of a world that torchrun has started. On every other rank it serves rank 0's engine, and does not return.

    Raises `SystemExit` there once that engine is closed, `EngineDeadError` if it has ended by a fault;
    `InvalidValueError` where torchrun has started another number of ranks.
    """
    world = int(os.environ["WORLD_SIZE"])
    if world != size:
        raise InvalidValueError(ARGUMENT, size, f"the number of ranks that torchrun has started, {world}")
    found, rank, _ = next(iter(dist.rendezvous("env://")))
    store = dist.PrefixStore(f"d3engine-{next(_ENGINES)}", found)
    is_local = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    place = Place(rank, size, own_index(), store, is_local=is_local)
    host = "127.0.0.1" if is_local else os.environ["MASTER_ADDR"]
    if rank == 0:
        return WorkerChannel(_accept(store, host, size)), place
    key = bytes.fromhex(store.get("key").decode())
    link = Client((host, int(store.get("port"))), authkey=key)
    leader = Leader(link)
    leader.say(rank)
    follow(leader, place)
    raise SystemExit(0)


def _accept(store: Store, host: str, size: int) -> list[Connection]:
    """The connections of ranks 1, 2 ... in order, each of a process that knows the key in the store."""
    key = secrets.token_bytes(32)
    with Listener((host, 0), backlog=size, authkey=key) as listener:
        store.set("key", key.hex())
        store.set("port", str(listener.address[1]))
        met: dict[int, Connection] = {}
        while len(met) < size - 1:
            link = listener.accept()
            met[first_value(link)] = link
    return [met[rank] for rank in sorted(met)]


@dataclass(frozen=True)
class Place:
    """Where one rank stands: `index` among the ranks of its machine, and where all of them meet."""

    rank: int
    size: int
    index: int
    store: Store
    is_local: bool

    def join(self, device: torch.device) -> GroupCollectives:
        return join_group(self.store, self.rank, self.size, device, is_local=self.is_local)


def rank_device(device: torch.device, index: int) -> torch.device:
    """The device of the rank that is number `index` on its machine."""
    return torch.device("cuda", index) if device.type == "cuda" else device


def lead(
    settings: EngineSettings, workers: WorkerChannel, place: Place, draft: ModelConfig | None
) -> tuple[Executor, int]:
    """Rank 0: what runs plans on all ranks, and how many blocks each has; `draft` lies on this rank beside it.

    Raises `EngineDeadError` for a rank that ends over it, `ModelFormatError` for files that one cannot load.
    """
    try:
        # Other ranks never ask for a policy, and might not know it.
        told = plain_settings(replace(settings, depth=FullDepth()))
        workers.tell({"settings": told, "threads": pytorch_threads_for(settings.config, torch.get_num_threads())})
        own, part, weights = _load(settings, place, show_progress=True)
        workers.hear()
        workers.tell("all have loaded")
        collectives = workers.call(partial(place.join, own.device))
        workers.free_by(collectives.abort)
        build = partial(build_executor, own, weights, ranks=Ranks(part, collectives))
        blocks: int = min(room(own, build, draft), *workers.hear())
        workers.tell(blocks)
        executor = TensorParallelExecutor(build(blocks), workers, settings.block_size)
    except BaseException as fault:
        cause = workers.explain(fault)
        workers.close(str(cause) or repr(cause))
        if cause is fault:
            raise
        raise cause from fault
    return executor, blocks


def follow(leader: Leader, place: Place) -> None:
    """Another rank: load, and run what rank 0 plans until that is done; failures are sent to it, and raised."""
    leader.rely_on()
    try:
        start = leader.hear()
        torch.set_num_threads(start["threads"])
        own, part, weights = _load(settings_of_plain(start["settings"], Immediate()), place, show_progress=False)
        leader.say("loaded")
        leader.hear()
        build = partial(build_executor, own, weights, ranks=Ranks(part, place.join(own.device)))
        leader.say(room(own, build, None))
        leader.follow(build(leader.hear()))
    except BaseException as error:
        leader.fail(error)
        raise
    finally:
        leader.leave()


def _load(settings: EngineSettings, place: Place, *, show_progress: bool) -> tuple[EngineSettings, Part, LlamaWeights]:
    part = shard_of(settings.config, place.rank, place.size)
    own = settings.of_part(part, rank_device(settings.device, place.index))
    if own.device.type == "cuda":
        torch.cuda.set_device(own.device)
    weights = load_weights(
        settings.directory,
        settings.config,
        dtype=own.dtype,
        weight_dtype=own.weight_dtype,
        device=own.device,
        show_progress=show_progress,
        part=part,
    )
    return own, part, weights

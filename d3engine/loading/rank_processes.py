"""How ranks come to be: processes that rank 0 starts, or those that torchrun has started.

The one idea: either way a rank is at the other end of a connection, so the end of one is noticed by the other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import sys
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory

from d3engine.children import child_environment, main_command
from d3engine.errors import EngineDeadError, InvalidValueError
from d3engine.executor.tensor_parallel.follower import Leader
from d3engine.executor.tensor_parallel.group import Store, dist
from d3engine.executor.tensor_parallel.hearing import first_value
from d3engine.executor.tensor_parallel.team import Team
from d3engine.loading.ranks import Place, follow
from d3engine.model.part import ARGUMENT

_ENGINES = itertools.count()
"""Under torchrun every rank makes the same engines in the same order: by its number they find each other."""


def start_ranks(size: int) -> tuple[Team, Place]:
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
        Team(links, processes, cleanup=folder.cleanup).close()
        raise EngineDeadError(f"rank {len(processes) + 1} of {size} cannot be started: {error}") from error
    return Team(links, processes, cleanup=folder.cleanup), Place(0, size, 0, dist.FileStore(store, size), is_local=True)


def main() -> None:
    """A process that `start_ranks` has started."""
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
    """Which of the ranks on this machine this process is; the first where nobody else has started it as one."""
    return int(os.environ.get("LOCAL_RANK", 0)) if is_under_torchrun() else 0


def meet_under_torchrun(size: int) -> tuple[Team, Place]:
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
        return Team(_accept(store, host, size)), place
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

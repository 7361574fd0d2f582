"""A soak: minutes of clients that leave, stall, send rubbish and come back, and of others that must not notice.

What each request answers alone is asked first; every answer that is finished later must be the same one.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks.report import Parser
from benchmarks.serving.asking import prompt
from benchmarks.serving.processes import Place, Server, d3engine_server

SERVER_OPTIONS = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(6 * 2**20), "--timeout", "write=3")
"""So little room that sequences lose their places to others, and little patience with who does not read."""
TIMEOUTS = ("--timeout", "header=3", "--timeout", "body=3")
LOOK_SECONDS = 1.0
GROWTH = 0.02
"""Memory is flat where the line through its second half rises by no more than this part of it."""
RISE_SECONDS = 160.0
"""So long memory rises anyway, until everything has been done once; only what comes after is judged."""


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies, of each kind that a client might send."""
    found: list[tuple[str, dict[str, Any]]] = []
    for nth, depth in enumerate(({"policy": "full"}, {"policy": "d3", "alpha": 0.8, "start": 0.7}) * 3):
        sampled: dict[str, Any] = {"temperature": 0} if nth < 2 else {"temperature": 0.8, "seed": nth, "top_p": 0.9}
        body = {"prompt": prompt(nth), "max_tokens": 40 + 30 * nth, "ignore_eos": True, "depth": depth, **sampled}
        found.append(("/v1/completions", body))
    messages = [{"role": "user", "content": "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?"}]
    found.append(("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 60}))
    found.append(("/v1/completions", {"prompt": [1, 300, 301], "max_tokens": 30, "temperature": 0, "logprobs": 2}))
    return found


@dataclass
class Soak:
    """The clients of one server, and what they saw. `process` is the server's id, where it is one of its own."""

    url: str
    process: int | None = None
    clients: int = 16
    seed: int = 1
    alone: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def run(self, seconds: float, bar: tqdm[Any] | None = None) -> None:
        """Ask alone, then all at once for a given number of seconds, then see whether anything is left of it."""
        asyncio.run(self._run(seconds, bar))

    async def _run(self, seconds: float, bar: tqdm[Any] | None) -> None:
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            if not self.alone:
                self.alone = [await self._whole(session, path, body) for path, body in requests()]
            until = time.monotonic() + seconds
            watching = asyncio.create_task(self._watch(session, until, bar))
            await asyncio.gather(
                *(self._client(session, random.Random(self.seed + i), until) for i in range(self.clients))
            )
            await watching
            await self._see_what_is_left(session)

    # -- clients -----------------------------------------------------------------------------------------------------

    async def _client(self, session: Any, numbers: random.Random, until: float) -> None:
        deeds: list[Callable[[Any, random.Random], Awaitable[None]]] = [
            *[self._asks] * 4,
            *[self._streams] * 4,
            *[self._leaves] * 3,
            *(self._stalls, self._sends_rubbish, self._sends_rubbish, self._stops_half_way),
        ]
        while time.monotonic() < until:
            deed = numbers.choice(deeds)
            try:
                await deed(session, numbers)
                self.done[deed.__name__.strip("_")] += 1
            except Exception as error:
                self.faults.append(f"{deed.__name__.strip('_')}: {error!r}")

    async def _asks(self, session: Any, numbers: random.Random) -> None:
        which = numbers.randrange(len(self.alone))
        self._compare(which, await self._whole(session, *requests()[which]))

    async def _streams(self, session: Any, numbers: random.Random) -> None:
        which = numbers.randrange(len(self.alone))
        path, body = requests()[which]
        text = ""
        async with session.post(self.url + path, json={**body, "stream": True}) as answer:
            if answer.status == 429:
                self.done["refused: no room"] += 1
                return
            assert answer.status == 200, answer.status
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    text += _text(json.loads(line[6:]), "delta")
        self._compare(which, text)

    async def _leaves(self, session: Any, numbers: random.Random) -> None:
        """After some pieces of the stream, or before the first one."""
        path, body = requests()[numbers.randrange(len(self.alone))]
        pieces = numbers.randrange(5)
        reader, writer = await self._connection()
        try:
            writer.write(_head(path, body := json.dumps({**body, "stream": True}).encode()) + body)
            await writer.drain()
            for _ in range(pieces):
                await asyncio.wait_for(reader.readline(), 60)
        finally:
            writer.transport.abort() if numbers.random() < 0.5 else writer.close()

    async def _stalls(self, session: Any, numbers: random.Random) -> None:
        """Does not read what it has asked for, until the server lets go or for some seconds."""
        body = json.dumps({"prompt": prompt(1), "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5})
        _, writer = await self._connection(limit=1024)
        try:
            writer.write(_head("/v1/completions", body.encode()) + body.encode())
            await writer.drain()
            await asyncio.sleep(numbers.uniform(1, 6))
        finally:
            writer.transport.abort()

    async def _sends_rubbish(self, session: Any, numbers: random.Random) -> None:
        """Whatever it is, the answer is no 500."""
        kind = numbers.randrange(5)
        if kind == 0:
            reader, writer = await self._connection()
            writer.write(numbers.randbytes(200) + b"\r\n\r\n")
            await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return
        bodies = (
            b"{" * 5000,
            b'{"prompt": "a", "max_tokens": -1}',
            numbers.randbytes(300),
            b'{"prompt": [1, 99999999]}',
        )
        headers = {"Content-Type": "application/json"}
        async with session.post(self.url + "/v1/completions", data=bodies[kind - 1], headers=headers) as answer:
            assert answer.status in (400, 429), (answer.status, await answer.text())

    async def _stops_half_way(self, session: Any, numbers: random.Random) -> None:
        """In the head or in the body; then it waits for what the server does, and goes."""
        body = json.dumps(requests()[0][1]).encode()
        sent = _head("/v1/completions", body) + body
        reader, writer = await self._connection()
        try:
            writer.write(sent[: numbers.randrange(1, len(sent))])
            await asyncio.wait_for(reader.read(), numbers.choice((0.2, 60)))
        except TimeoutError:
            pass
        finally:
            writer.close()

    # -- what they do ------------------------------------------------------------------------------------------------

    async def _whole(self, session: Any, path: str, body: dict[str, Any]) -> str:
        async with session.post(self.url + path, json=body) as answer:
            if answer.status == 429:
                await asyncio.sleep(0.2)
                return await self._whole(session, path, body)
            assert answer.status == 200, (answer.status, await answer.text())
            return _text(await answer.json(), "message")

    def _compare(self, which: int, text: str) -> None:
        self.done["answers compared"] += 1
        if text != self.alone[which]:
            self.faults.append(f"request {which} answered {text[:80]!r}; alone {self.alone[which][:80]!r}")

    async def _connection(self, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return await asyncio.open_connection(host, int(port), limit=limit)

    # -- the server --------------------------------------------------------------------------------------------------

    async def _watch(self, session: Any, until: float, bar: tqdm[Any] | None) -> None:
        began = time.monotonic()
        while time.monotonic() < until:
            async with session.get(self.url + "/health") as answer:
                self.done["health asked"] += 1
                if answer.status != 200:
                    self.faults.append(f"/health said {answer.status}: {await answer.text()}")
            if self.process is not None:
                import psutil

                self.memory.append((time.monotonic() - began, psutil.Process(self.process).memory_info().rss))
            if bar is not None:
                bar.update(min(bar.total, time.monotonic() - began) - bar.n)
            await asyncio.sleep(LOOK_SECONDS)

    async def _see_what_is_left(self, session: Any) -> None:
        """Nothing may be, a while after the last client has gone."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_requests_in_flight")
        left: dict[str, float] = {}
        for _ in range(120):
            async with session.get(self.url + "/metrics") as answer:
                lines = [line.split() for line in (await answer.text()).splitlines() if not line.startswith("#")]
            values = {name.partition(":")[2]: float(value) for name, value in lines}
            left = {name: values[name] for name in names if values[name]}
            if not left:
                self.done["preemptions"] = int(values["num_preemptions_total"])
                return
            await asyncio.sleep(0.5)
        self.faults.append(f"a minute after the last client has gone there are left: {left}")

    def growth(self) -> float | None:
        """By which part the line through the second half of the memory's course rises; None of too short a soak."""
        later = self.memory[len(self.memory) // 2 :]
        if not later or later[0][0] < RISE_SECONDS:
            return None
        times, sizes = zip(*later, strict=True)
        slope = statistics.linear_regression(times, sizes).slope
        return slope * (times[-1] - times[0]) / statistics.mean(sizes)


def _text(answer: dict[str, Any], part: str) -> str:
    """What an answer, or a chunk of one, says."""
    assert "error" not in answer, answer
    said = [choice[part].get("content") if part in choice else choice["text"] for choice in answer["choices"]]
    return "".join(text or "" for text in said)


def _head(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


def see_drain(server: Server) -> list[str]:
    """What is wrong with how a server ends that is told to while it answers."""
    import http.client
    import threading
    import urllib.error
    import urllib.request

    import psutil

    body = json.dumps({"prompt": prompt(0), "max_tokens": 500, "ignore_eos": True}).encode()
    answers: list[bytes] = []

    def ask() -> None:
        given = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", body, given)
        answers.append(urllib.request.urlopen(request, timeout=600).read())

    asking = threading.Thread(target=ask)
    asking.start()
    while not answers and not server.metric("num_requests_in_flight"):
        pass
    psutil.Process(server.pid).send_signal(signal.SIGTERM)
    said = set()
    while psutil.pid_exists(server.pid) and psutil.Process(server.pid).status() != psutil.STATUS_ZOMBIE:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=60).close()
            said.add(200)
        except urllib.error.HTTPError as error:
            said.add(error.code)
        except (OSError, http.client.HTTPException):
            break
        time.sleep(0.02)
    asking.join()
    faults = (
        [] if answers and json.loads(answers[0])["usage"]["completion_tokens"] == 500 else ["an answer was cut off"]
    )
    return faults + ([] if 503 in said or not said - {200} else [f"/health said {said} while draining"])


def show(report: dict[str, Any], console: Console) -> None:
    """Say what happened, and what is wrong."""
    for name, count in sorted(report["done"].items()):
        console.print(f"{count:>9} {name}")
    sizes = [size / 2**20 for _, size in report["memory"]]
    if sizes:
        growth = report["growth"]
        least = 2 * RISE_SECONDS / 60
        is_flat = (
            f"too short to judge (from {least:.1f} minutes on)" if growth is None else f"then rises by {growth:.2%}"
        )
        console.print(
            f"memory: {sizes[0]:.0f} MiB at first, {sizes[len(sizes) // 2]:.0f} half way, {sizes[-1]:.0f} at the end; "
            + is_flat
        )
    for fault in report["faults"][:20]:
        console.print(f"FAULT {fault}", markup=False)
    console.print(f"{len(report['faults'])} faults")


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak a server of our own; 1 if anything was wrong."""
    parser = Parser("soak", __doc__, arguments)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16, help="at once")
    parser.add_argument("--model", default="demo", help="what `d3engine serve` takes")
    parser.add_argument("--seed", type=int, default=1, help="of what they do")
    given = parser.given()
    with d3engine_server(Place(given.model), 8, *SERVER_OPTIONS, *TIMEOUTS) as server:
        soak = Soak(server.url, server.pid, given.clients, given.seed)
        with tqdm(total=60 * given.minutes, unit="s", bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s") as bar:
            soak.run(60 * given.minutes, bar)
        soak.faults += see_drain(server)
    growth = soak.growth()
    if growth is not None and growth > GROWTH:
        soak.faults.append(f"memory grows: by {growth:.1%} in the second half")
    report = {"benchmark": "soak", "done": dict(soak.done), "faults": soak.faults, "growth": growth}
    parser.publish(report | {"memory": soak.memory}, show, width=120)
    return bool(soak.faults)


if __name__ == "__main__":
    sys.exit(main())

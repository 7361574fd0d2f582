"""What a kernel's machine code keeps in flight: its hottest loop, run through a model of one warp.

A kernel whose limit is memory bandwidth is fast if enough of its loads are under way at once. How many that are is not
in the source, and not in the PTX either: ptxas orders loads and their uses as it likes. So the SASS is read. One warp
issues its instructions in order, one a cycle; a load from memory takes `LATENCY` cycles, one from the L2 cache less,
and whatever reads the register waits. Asynchronous copies are waited for by groups. That is all of the model; what it
gives is the mean of the bytes that wait to arrive.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

LATENCY = 800
"""Cycles of a load from memory under load, on Hopper (600 to 1000)."""

_CACHED = 280  # of a load from L2
_SHARED = 30  # of a load from shared memory
_ARITHMETIC = 5
_ROUNDS = 24  # of a loop that goes round many times: the first half fills it
_CACHED_MARKS = (".EL", ".STRONG")  # activations stay in the cache (evict last); what others have just written is there
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);", re.M)
_REGISTER = re.compile(r"\bR(\d+)\b")
_WRITES_NOTHING = ("ST", "BRA", "BAR", "EXIT", "LDGSTS", "LDGDEPBAR", "DEPBAR", "NOP", "WARPSYNC", "RED")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of SASS: where it is, what it does, and its vector registers by number."""

    address: int
    operation: str
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    operands: str

    @property
    def memory_bytes(self) -> int:
        """Bytes that one thread loads from global memory; none where it only fills an unread stage."""
        loads = self.operation.startswith("LDG") and not self.operation.startswith("LDGDEPBAR")
        return 4 * _width(self.operation) if loads and not self.operands.endswith("!PT") else 0

    @property
    def is_streamed(self) -> bool:
        """Whether it may load what is read once, weights, keys and values: 16 bytes a thread, or a copy of 8."""
        wide = self.memory_bytes >= (8 if self.operation.startswith("LDGSTS") else 16)
        return wide and not _is_cached(self.operation)


def instructions(sass: str) -> list[Instruction]:
    """The instructions of the one function in `cuobjdump --dump-sass`'s answer."""
    found = []
    for address, operation, operands in _LINE.findall(sass):
        parts = [part.strip() for part in operands.split(",")]
        writes: tuple[int, ...] = ()
        if not operation.startswith(_WRITES_NOTHING) and (first := _REGISTER.match(parts[0])):
            writes = tuple(range(int(first[1]), int(first[1]) + _width(operation)))
            parts = parts[1:]
        reads = tuple(
            int(number) + more
            for part in parts
            for number in _REGISTER.findall(part)
            for more in range(2 if f"R{number}.64" in part else 1)
        )
        found.append(Instruction(int(address, 16), operation, writes, reads, operands.strip()))
    return found


def hottest_loop(code: list[Instruction]) -> list[Instruction]:
    """The innermost loop that loads most from memory; all of the code if none does."""
    best: list[Instruction] = []
    loading: list[int] = []  # where loops that load begin, in the order of their ends
    for begin, end in _loops(code):
        body = [one for one in code if begin <= one.address <= end]
        if not _loaded(body) or any(other >= body[0].address for other in loading):
            continue  # what stands around a loop is done once, where the loop goes round many times
        loading.append(body[0].address)
        if (_loaded(body), -len(body)) > (_loaded(best), -len(best)):
            best = body
    return best if _loaded(best) else code


def _is_cached(operation: str) -> bool:
    return any(mark in operation for mark in _CACHED_MARKS)


def _loaded(body: Iterable[Instruction]) -> int:
    return sum(instruction.memory_bytes for instruction in body if instruction.is_streamed)


def bytes_in_flight(sass: str, latency: int = LATENCY, rounds: int | None = None, before: int = 0) -> float:
    """Bytes that one thread has under way in the mean, of those that it reads once, in the loop that loads most.

    Of a loop that goes round `rounds` times the mean is over all of it and `before` loads from L2 in front of it, each
    of which waits for the last: a loop begins with nothing under way, and ends so. Of one that goes round for long,
    None, it is over its middle.
    """
    body = hottest_loop(instructions(sass))
    loaded = _loaded(body)
    if not loaded:
        return 0.0
    times = _Warp(latency).times(body)
    cycles = (times[-1] - times[_ROUNDS // 2 - 1]) / (_ROUNDS - _ROUNDS // 2)
    if rounds is None:
        return loaded * latency / cycles
    return loaded * rounds * latency / (before * _CACHED + latency + (rounds - 1) * cycles)


def cycles_alone(sass: str, rounds: int) -> float:
    """Cycles that one warp takes through all of the code: loops once, and those around others `rounds` times.

    What it loads comes from the L2 cache; barriers cost nothing here.
    """
    code = instructions(sass)
    ends = dict(_loops(code))
    around = {begin: end for begin, end in ends.items() if any(begin < other < end for other in ends)}
    warp, done, cycles = _Warp(_CACHED), -1, 0.0
    for instruction in code:
        if instruction.address > done:
            done = around.get(instruction.address, instruction.address)
            body = [one for one in code if instruction.address <= one.address <= done]
            cycles = warp.run(body * (rounds if instruction.address in around else 1))
    return cycles


def barriers_of_the_last(sass: str, turns: int) -> int:
    """Barriers, one after another, of the program that comes last to a counter and puts together what all have left.

    Loops behind the counter's atomic go round `turns` times. 0 without a counter.
    """
    code = instructions(sass)
    atomic = next((one.address for one in code if one.operation.startswith("ATOMG")), None)
    if atomic is None:
        return 0
    barriers = [one.address for one in code if one.address > atomic and one.operation.startswith("BAR")]
    loops = [(begin, end) for begin, end in _loops(code) if begin > atomic]
    return sum(int(turns ** sum(begin <= barrier <= end for begin, end in loops)) for barrier in barriers)


def waits_before_streaming(sass: str) -> tuple[int, int]:
    """Loads for which a warp waits, one behind another, and barriers, before each time that its hottest loop is run.

    They are those between the beginning of the loop around that one, or of the code where there is none, and the first
    wide load: nothing is under way there.
    """
    code = instructions(sass)
    hottest = hottest_loop(code)[0].address
    around = [(begin, end) for begin, end in _loops(code) if begin < hottest < end]
    begin = max(around, default=(0, 0))[0]
    waits = barriers = 0
    pending: set[int] = set()  # registers that loads will fill; -1: shared memory
    for one in code:
        if one.address < begin:
            continue
        if one.is_streamed:
            break
        barriers += one.operation.startswith("BAR")
        waited = {-1} if one.operation.startswith("DEPBAR") else {*one.reads}
        if pending & waited:
            waits, pending = waits + 1, set()
        if one.memory_bytes:
            pending |= {-1} if one.operation.startswith("LDGSTS") else {*one.writes}
    return waits, barriers


def _loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """Where loops begin and end."""
    found = []
    for one in code:
        target = re.search(r"(0x[0-9a-f]+)", one.operands) if one.operation.startswith("BRA") else None
        if target and int(target[1], 16) < one.address:
            found.append((int(target[1], 16), one.address))
    return found


def instructions_a_byte(sass: str) -> float:
    """Instructions of a warp for each byte that it streams, in the loop that loads most; 0 if nothing is streamed."""
    body = hottest_loop(instructions(sass))
    loaded = _loaded(body)
    return len(body) / (32 * loaded) if loaded else 0.0


def read_once(ptx: str) -> float:
    """The part of what `bytes_in_flight` counts that is read once: wide loads that are marked to leave the cache first.

    The rows that all programs read may come by asynchronous copies too, and machine code does not show whose copies are
    whose. 1 if nothing is marked.
    """
    first = set(re.findall(r"evict_first\.b64 (%\w+)", ptx))
    once = every = 0
    for line in re.findall(r"^.*\b(?:ld\.global|cp\.async\.c[ag])\..*;", ptx, re.M):
        size = _copied(line)
        is_first = line.rstrip(" ;").endswith(tuple(first)) if first else False
        once += size * is_first
        every += size * (is_first or "cp.async" in line)
    return once / every if once else 1.0


def _copied(line: str) -> int:
    """Bytes of a line of PTX that loads 8 or more at once, else 0."""
    if copy := re.search(r"\], (0x[0-9a-f]+|\d+)", line):
        size = int(copy[1], 0)
    else:
        load = re.search(r"(?:\.v(\d))?\.[bfus](\d+)\s", line)
        size = int(load[1] or 1) * int(load[2]) // 8 if load else 0
    return size if size >= 8 else 0


def programs_a_processor(registers: int, shared: int, warps: int, most_shared: int) -> int:
    """Programs that fit a processor at once, by registers, shared memory (bytes; `most_shared` of one) and threads."""
    by_registers = 65536 // (-(-max(registers, 16) // 8) * 8 * 32 * warps)
    by_shared = (most_shared + 1024) // (shared + 1024)  # each program takes 1 KiB more
    return max(1, min(by_registers, by_shared, 64 // warps, 32))


def before_the_wait(ptx: str) -> list[str]:
    """What a kernel under programmatic dependent launch does too early, before it waits for the one in front of it.

    Only weights may be loaded there, which are marked to leave the cache first: all else may not be written yet, or may
    still be read by another.
    """
    early, found, _ = ptx.partition("griddepcontrol.wait")
    if not found:
        return ["it never waits"]
    first = re.findall(r"evict_first\.b64 (%\w+)", early)
    loads = re.findall(r"^.*\b(?:ld|cp\.async)[\w.:]*\bglobal.*$", early, re.M)
    wrong = [
        load.strip() for load in loads if "evict_first" not in load and not load.rstrip(" ;").endswith(tuple(first))
    ]
    wrong += [line.strip() for line in re.findall(r"^.*\b(?:st|red|atom)\.global.*$", early, re.M)]
    return wrong + ["it returns"] * len(re.findall(r"^\s*(?:@\S+\s+)?ret;", early, re.M))


class _Warp:
    """One warp that issues in order: when each register is there, and each group of asynchronous copies."""

    def __init__(self, latency: int) -> None:
        self._latency = latency
        self._now = 0.0
        self._ready: dict[int, float] = {}
        self._open_group = 0.0
        self._groups: deque[float] = deque(maxlen=64)

    def times(self, body: list[Instruction]) -> list[float]:
        """When each round of the loop has been issued."""
        return [self.run(body) for _ in range(_ROUNDS)]

    def run(self, body: Iterable[Instruction]) -> float:
        """When all of it has been issued, after what was before."""
        for instruction in body:
            self._issue(instruction)
        return self._now

    def _issue(self, instruction: Instruction) -> None:
        name = instruction.operation
        waits = (self._ready.get(register, 0.0) for register in (*instruction.reads, *instruction.writes))
        self._now = max(self._now + 1, *waits, 0.0)
        if name.startswith("LDGSTS") and instruction.memory_bytes:
            self._open_group = max(self._open_group, self._now + self._delay(name))
        elif name.startswith("LDGDEPBAR"):
            self._groups.append(self._open_group)
        elif name.startswith("DEPBAR") and (left := re.search(r"SB0,\s*(0x[0-9a-f]+)", instruction.operands)):
            self._wait_for_all_but(int(left[1], 16))
        for register in instruction.writes:
            self._ready[register] = self._now + self._delay(name)

    def _wait_for_all_but(self, left: int) -> None:
        done = list(self._groups)[: len(self._groups) - left]
        self._now = max(self._now, *done, 0.0)

    def _delay(self, name: str) -> int:
        if name.startswith("LDG"):
            return _CACHED if _is_cached(name) else self._latency
        return _SHARED if name.startswith(("LDS", "LDSM", "LDC", "SHFL")) else _ARITHMETIC


def _width(operation: str) -> int:
    """Registers of 4 bytes that an operation's result takes."""
    if ".128" in operation:
        return 4
    return 2 if ".64" in operation or ".WIDE" in operation or operation.startswith("CS2R") else 1

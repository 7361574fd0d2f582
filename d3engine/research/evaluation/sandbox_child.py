"""The child process that runs the code of an answer; `sandbox` starts it as a file, so it
imports nothing of d3engine."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
from typing import Any

CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, close 3 57, lseek 8 62, fstat 5 80, stat 4 -,
lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
readlinkat 267 78, getdents64 217 61, getcwd 79 17, brk 12 214, mmap 9 222, mprotect 10 226, munmap 11 215,
mremap 25 216, madvise 28 233, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132,
restart_syscall 219 128, futex 202 98, pipe2 293 59, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
time 201 -, getrandom 318 278, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163,
sched_getaffinity 204 123, sched_yield 24 124, exit 60 93, exit_group 231 94
"""
"""System calls that the code may make, each with its number on x86-64 and on aarch64; all others fail with EPERM.

So there are no processes, threads, sockets, signals to others or sleep, and no file is changed, by root either.
"""

MACHINES = {"x86_64": (0xC000003E, 1, ((2, 1), (257, 2))), "aarch64": (0xC00000B7, 2, ((56, 2),))}
"""By `os.uname().machine`: the kernel's word for it (AUDIT_ARCH_*), its column in `CALLS`, and the numbers of open and
openat, each with the place of its flags among the arguments: they pass where they only read."""

_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # places in struct seccomp_data
_DEATH_SIGNAL, _SECCOMP, _NO_NEW_PRIVILEGES, _FILTER = 1, 22, 38, 2
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000


def main() -> None:
    """Run the request of stdin: the code, then the calls of its function, whose results go to the parent."""
    request = json.loads(sys.stdin.buffer.read())
    nonce, leave, write, dumps = request["nonce"], os._exit, os.write, json.dumps
    replies = os.dup(1)

    def reply(kind: str, value: Any = None) -> None:
        rest = f"\n{nonce} {kind} {dumps(value)}\n".encode("ascii")
        while rest:
            rest = rest[write(replies, rest) :]

    try:
        _confine(request["limits"])
    except (OSError, ValueError) as error:
        reply("refused", str(error))
        leave(1)
    reply("ready")
    module = type(sys)("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(request["code"], "solution.py", "exec", dont_inherit=True), module.__dict__)
        function = getattr(module, request["name"])
        returned = [_written(function(*arguments)) for arguments in request["calls"]]
    except BaseException as error:
        reply("failed", type(error).__name__)
    else:
        reply("returned", returned)
    leave(0)  # past what the code has registered for the end of the process


def _confine(limits: dict[str, int]) -> None:
    """Leave the process what plain computing needs; raises `OSError` where the system does not allow that."""
    import resource

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # a parent may ignore it, and a child inherits that
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    # Where the system allows it. The filter alone refuses sockets, so nothing depends on it.
    _ = library.unshare(_NEW_USER | _NEW_NETWORK) and library.unshare(_NEW_NETWORK)
    for name, most in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        # One more as hard limit of processor time: the signal of the soft one tells what has happened.
        allowed = most + 1 if kind == resource.RLIMIT_CPU else most
        allowed = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
        resource.setrlimit(kind, (min(most, allowed), allowed))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.environ.clear()
    program = _filter()
    kept = ctypes.create_string_buffer(program)
    about = struct.pack("HP", len(program) // 8, ctypes.addressof(kept))  # struct sock_fprog
    for option, value, pointer in (
        (_DEATH_SIGNAL, signal.SIGKILL, None),
        (_NO_NEW_PRIVILEGES, 1, None),
        (_SECCOMP, _FILTER, about),
    ):
        if library.prctl(option, value, pointer, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _filter() -> bytes:
    """The program by which the kernel refuses calls: struct sock_filter, eight bytes a step."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"a machine of {', '.join(MACHINES)} is needed, not {machine}")
    architecture, column, opens = MACHINES[machine]
    allowed = [row.split()[column] for row in CALLS.split(",")]
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE)]
    steps.append((_LOAD, 0, 0, _NUMBER))
    for number in allowed:
        if number != "-":  # this machine has no such call
            steps += [(_IF_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ALLOW)]
    for call, flags in opens:
        steps += [(_IF_EQUAL, 0, 4, call), (_LOAD, 0, 0, _ARGUMENTS + 8 * flags)]
        steps += [(_IF_ANY_BIT, 1, 0, writes), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    steps.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _written(value: Any) -> str:
    """A result as a literal of Python; "?" for what has none, or a long one."""
    try:
        text = repr(_plain(value))
    except (TypeError, ValueError, RecursionError):
        return "?"
    return text if len(text) <= 100_000 else "?"


def _plain(value: Any) -> Any:
    """A value of built-in types that is equal to one of subclasses, such as a `Counter`; raises `TypeError`."""
    if isinstance(value, frozenset):
        value = set(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    kinds: tuple[type, ...] = (int, float, str)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    kinds = (list, tuple, set)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(_plain(one) for one in value)
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    raise TypeError


if __name__ == "__main__":
    main()

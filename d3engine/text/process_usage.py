"""Memory and processor time of a child, on systems where the parent watches them because the kernel does not."""

from __future__ import annotations

import subprocess
import sys

if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    _QUERY, _TICKS = 0x1000, 10_000_000  # PROCESS_QUERY_LIMITED_INFORMATION; a FILETIME counts 100 ns
    _SIZES = "peak", "resident", "paged_peak", "paged", "pool_peak", "pool", "committed", "committed_peak"

    class _Memory(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS."""

        _fields_ = (
            ("size", wintypes.DWORD),
            ("faults", wintypes.DWORD),
            *((name, ctypes.c_size_t) for name in _SIZES),
        )

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.OpenProcess.restype = wintypes.HANDLE
    _kernel.OpenProcess.argtypes = [wintypes.DWORD, wintypes.BOOL, wintypes.DWORD]
    _kernel.CloseHandle.argtypes = [wintypes.HANDLE]
    _kernel.GetProcessTimes.argtypes = [wintypes.HANDLE, *[ctypes.POINTER(wintypes.FILETIME)] * 4]
    _kernel.K32GetProcessMemoryInfo.argtypes = [wintypes.HANDLE, ctypes.POINTER(_Memory), wintypes.DWORD]

    def usage_of(pid: int) -> tuple[int, float]:
        """Bytes of memory that a process has committed, and its seconds of processor time; 0 if it has just ended."""
        process = _kernel.OpenProcess(_QUERY, False, pid)
        if not process:
            return 0, 0.0
        memory, times = _Memory(ctypes.sizeof(_Memory)), [wintypes.FILETIME() for _ in range(4)]
        try:
            _kernel.K32GetProcessMemoryInfo(process, ctypes.byref(memory), memory.size)
            _kernel.GetProcessTimes(process, *map(ctypes.byref, times))
        finally:
            _kernel.CloseHandle(process)
        # Of the kernel and of the user.
        ticks = sum(time.dwHighDateTime << 32 | time.dwLowDateTime for time in times[2:])
        return memory.committed, ticks / _TICKS

else:

    def usage_of(pid: int) -> tuple[int, float]:
        """Resident bytes of a process, 0 if it has just ended; the kernel itself limits its processor time."""
        listed = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return int(listed.stdout.strip() or 0) * 1024, 0.0

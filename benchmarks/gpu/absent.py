"""A GPU's driver for machines without one: Triton compiles for it, and it writes down what it is told to launch.

`install` comes before the first kernel runs, in a process without TRITON_INTERPRET; only the call into CUDA is missing.
"""

from __future__ import annotations

from typing import Any, ClassVar

STREAM = 7
"""The number of the stream on which everything is launched."""

told: list[tuple[Any, ...]] = []
"""The launches since `told.clear()`: grid, stream, function, what Triton says about it, and the kernel's arguments."""


def install(arch: int = 90) -> None:
    """Make Triton's current device a GPU of that compute capability, without its point."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver(_Driver):
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    driver.set_active(Driver())


class _Utilities:
    """What Triton asks when it loads a kernel; functions are numbers that count up."""

    loaded = 0

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        self.loaded += 1
        return object(), self.loaded, 32, 0, 1024

    def unload_module(self, module: object) -> None:
        """Nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class _Launcher:
    """Writes down each launch of a kernel instead of doing it."""

    def __init__(self, source: Any, metadata: Any) -> None:
        """As Triton makes them."""

    def __call__(self, *given: Any) -> None:
        told.append(given)


class _Driver:
    utils: ClassVar[_Utilities] = _Utilities()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

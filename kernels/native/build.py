"""Compiles the C++ files of this folder into one shared library. Standard library only: an installer runs it."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
LIBRARY = "libd3native.dll" if sys.platform == "win32" else "libd3native.so"

FLAGS = (
    "-std=c++17",
    "-pthread",
    "-fvisibility=hidden",
    # Multiplication and addition are fused only where the code says so: sums must not depend on the compiler's choice.
    "-ffp-contract=off",
    # GCC 12 fuses them all the same where it vectorizes; our vector code is written out.
    "-fno-tree-vectorize",
    "-fno-tree-slp-vectorize",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-uninitialized",  # GCC 12 sees it in its own header of AVX-512
)
OPTIMIZED = ("-O3",)
# These files are compiled for their instruction set, all others for any machine of the architecture. The library
# chooses among them at run time, so it runs on other machines too.
ISA_FLAGS = {
    "avx512.cpp": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mfma",
        "-mprefer-vector-width=512",
    ),
    "avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
}
# Integers only: vectorizing changes no result.
VECTORIZED = ("bf12.cpp",)


_MSVC = (
    "{} compiles for Microsoft's runtime, for which the library is not written; install g++ for MinGW-w64"
    " (MSYS2 and w64devkit have one) and name it in CXX"
)


class BuildError(Exception):
    """No compiler, or a failed compilation."""


def sources(folder: Path = FOLDER) -> list[Path]:
    """All C++ files of the library, in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h", ".inc"))


def digest(folder: Path = FOLDER) -> str:
    """A hash of the sources, the flags and the kind of machine: 16 hexadecimal digits."""
    sha = hashlib.sha256(repr((FLAGS, OPTIMIZED, ISA_FLAGS, VECTORIZED, sys.platform, platform.machine())).encode())
    for path in sources(folder):
        sha.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:16]


def is_built(library: Path, folder: Path = FOLDER) -> bool:
    """Whether `library` was built from the sources in `folder`, with these flags, for this kind of machine."""
    return library.exists() and digest(folder).encode() in library.read_bytes()


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, or c++, g++ or clang++; raises `BuildError` if there is none."""
    named = os.environ.get("CXX")
    command = [next(filter(shutil.which, ("c++", "g++", "clang++")), "c++")]
    if named:  # a path of Windows has backslashes, which are no escapes
        command = [named] if shutil.which(named) else shlex.split(named)
    if shutil.which(command[0]) is None:
        raise BuildError(f"there is no C++ compiler {command[0]!r}")
    return command


def compile_library(
    target: Path, *, folder: Path = FOLDER, compiler: Sequence[str] = (), flags: Sequence[str] = OPTIMIZED
) -> None:
    """Compile all sources of `folder` into the shared library `target`, two files at a time.

    `compiler` is a command, `find_compiler()` if empty; it may be a cross compiler. An up-to-date library of this
    checkout is copied instead. Raises `BuildError` with the compiler's message.
    """
    command = [*(compiler or find_compiler())]
    triple = _triple(command)
    of_system, linking = _system_flags(triple)
    machine = _machine(triple.split("-")[0])
    is_x86 = machine == "x86_64"
    target.parent.mkdir(parents=True, exist_ok=True)
    is_for_here = (machine, _system(triple)) == (_machine(platform.machine()), sys.platform)
    if flags == OPTIMIZED and is_for_here and is_built(folder / LIBRARY, folder):
        if target != folder / LIBRARY:
            shutil.copy(folder / LIBRARY, target)
        return
    given = [*of_system, f"-I{folder}", f'-DD3_SOURCE_DIGEST="{digest(folder)}"']
    files = [path for path in sources(folder) if path.suffix == ".cpp"]
    with TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:

        def compile_one(path: Path) -> str:
            built = str(Path(work) / f"{path.stem}.o")
            own = [*(ISA_FLAGS.get(path.name, ()) if is_x86 else ())]
            own += ["-ftree-vectorize"] if path.name in VECTORIZED else []
            _run([*command, *FLAGS, *flags, *own, *given, "-c", str(path), "-o", built])
            return built

        # The instruction sets take longest, so they are compiled first.
        objects = list(pool.map(compile_one, sorted(files, key=lambda path: path.name not in ISA_FLAGS)))
        linked = Path(work) / target.name  # which a DLL has inside it
        _run([*command, "-shared", "-pthread", *linking, *flags, *objects, "-o", str(linked)])
        # A new file replaces the old one: a running process may have that one mapped.
        shutil.copy(linked, target.with_suffix(".new"))
        try:
            target.with_suffix(".new").replace(target)
        except PermissionError as error:  # Windows keeps a file that a process has mapped
            target.with_suffix(".new").unlink()
            raise BuildError(f"{target} cannot be replaced: end the programs that use it ({error})") from error


def _triple(command: Sequence[str]) -> str:
    """The machine and system that a compiler makes code for; raises `BuildError` for Microsoft's."""
    if Path(command[0]).stem.lower() in ("cl", "clang-cl"):
        raise BuildError(_MSVC.format(command[0]))
    triple = _run([*command, "-dumpmachine"]).strip()
    if "-msvc" in triple:  # behind which some versions of Clang write the runtime's
        raise BuildError(_MSVC.format(f"{command[0]} (for {triple})"))
    return triple


def _system(triple: str) -> str:
    """The system that a compiler makes code for, as `sys.platform` calls it."""
    if triple.endswith(("mingw32", "windows-gnu")):
        return "win32"
    return "darwin" if "-apple-" in triple else "linux"


def _system_flags(triple: str) -> tuple[list[str], list[str]]:
    """Flags for compiling and for linking."""
    if _system(triple) != "win32":
        return ["-fPIC"], []
    # GCC keeps the stack of Windows aligned to 16 bytes, and all the same may move wider vectors there by instructions
    # that fault unless they are aligned (its bug 54412; Debian's GCC is patched). The assembler makes others of them,
    # as fast. Clang, whose name for the system differs, aligns the stack, and does not know the flag.
    is_gcc = triple.endswith("mingw32")
    return ["-Wa,-muse-unaligned-vector-move"] if is_gcc else [], ["-static"]  # without a compiler's own DLLs


def _machine(name: str) -> str:
    """The common name of a processor, which systems and compilers call differently."""
    name = name.strip().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip() or 'in silence'}")
    return done.stdout


if __name__ == "__main__":
    try:
        compile_library(FOLDER / LIBRARY)
    except BuildError as error:
        sys.exit(str(error))

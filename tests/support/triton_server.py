"""A real Triton Inference Server: the one that nvidia-pytriton carries, with its Python backend run by our Python.
Three things stand in the way of that, and are put right here: the stub of the backend must lie beside it, it must
find the libpython of this very Python, and `python3` on the path must be this one."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stack_programs import free_port, wait_until_ready

HANG_SECONDS = 300.0


class Ports(NamedTuple):
    http: int
    grpc: int
    metrics: int


def _package() -> Path:
    """Where nvidia-pytriton lies; not imported, since that looks for libraries."""
    spec = find_spec("pytriton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@contextmanager
def triton_server(repository: Path, scratch: Path) -> Iterator[Ports]:
    """The server over a model repository, ready; its log is `scratch`/log."""
    package = _package()
    home = scratch / "tritonserver"
    backends = home / "backends"
    shutil.copytree(package / "tritonserver" / "backends", backends)
    stub = package / "tritonserver/python_backend_stubs/{}.{}/triton_python_backend_stub".format(*sys.version_info)
    shutil.copy(stub, backends / "python")
    python = scratch / "bin"
    python.mkdir()
    (python / "python3").symlink_to(sys.executable)
    libraries = [sysconfig.get_config_var("LIBDIR"), package.parent / "nvidia_pytriton.libs"]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(path for path in sys.path if "site-packages" in path),
        "OMP_NUM_THREADS": "1",
    }
    ports = Ports(free_port(), free_port(), free_port())
    command = [
        str(package / "tritonserver" / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        f"--backend-config=python,shm-region-prefix-name=d3-{os.getpid()}-",
        "--disable-auto-complete-config",
        "--exit-on-error=true",
    ]
    with (scratch / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{ports.http}/v2/health/ready", scratch / "log")
        yield ports
    finally:
        server.terminate()
        try:
            server.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()

"""llama.cpp's own server from the wheel xllamacpp, in a separate process: its defaults, without a store of prompts."""

from __future__ import annotations

import sys
import threading


def main() -> None:
    """Serve the GGUF file FILE at PORT with a number of SLOTS, entries of the cache in ALL, and THREADS."""
    import xllamacpp

    file, port, slots, entries, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.port = port
    params.n_parallel = slots
    params.n_ctx = entries
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0
    params.fit_params = False
    params.verbosity = -1
    server = xllamacpp.Server(params)
    threading.Event().wait()
    del server


if __name__ == "__main__":
    main()

"""llama.cpp's own server in a process of its own, from the wheel xllamacpp, which holds it compiled.

Its settings are its defaults (cache of 16 bits, continuous batching), but for the store of prompts that have ended:
no prompt comes twice here, so that it would only take time.
"""

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

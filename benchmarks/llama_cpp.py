"""llama.cpp as a peer: its decode steps on a GGUF file, without anything around them.

Driven through the C API of llama-cpp-python; a step is timed without choosing a token, which is to its favour.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np


class LlamaCpp:
    """A model and a context for `rows` sequences of `length` tokens.

    With `has_own_defaults` the file is mapped, entries of the KV cache are float16, and a prompt is cut as it likes.
    """

    def __init__(self, path: Path, *, threads: int, rows: int, length: int, has_own_defaults: bool = False) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        of_model = llama_cpp.llama_model_default_params()
        of_model.use_mmap, of_model.n_gpu_layers = has_own_defaults, 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), of_model)
        of_context = llama_cpp.llama_context_default_params()
        of_context.n_ctx = rows * (-(-length // 256) * 256)  # by sequence a multiple of 256
        of_context.n_batch = max(512, rows * length)
        if not has_own_defaults:
            of_context.n_ubatch = of_context.n_batch
        of_context.n_seq_max = rows
        of_context.n_threads = of_context.n_threads_batch = threads
        if not has_own_defaults:
            of_context.type_k = of_context.type_v = 0  # float32, as ours
        self._context = llama_cpp.llama_init_from_model(self._model, of_context)
        self._batch = llama_cpp.llama_batch_init(max(512, rows * length), 0, 1)
        assert self._context, f"llama.cpp could not load {path.name}"

    def answer(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Seconds of the prompt pass, and seconds per step of the `tokens` - 1 steps after it, the same token each."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        length = len(prompts[0])
        start = time.perf_counter()
        rows = [(row, place, token) for row, ids in enumerate(prompts) for place, token in enumerate(ids)]
        self.decode(rows, length - 1)
        prompt_seconds, start = time.perf_counter() - start, time.perf_counter()
        for step in range(tokens - 1):
            self.decode([(row, length + step, ids[-1]) for row, ids in enumerate(prompts)], length + step)
        return prompt_seconds, (time.perf_counter() - start) / max(1, tokens - 1)

    def decode(self, rows: list[tuple[int, int, int]], first: int) -> None:
        """Run (sequence, position, token) rows as one batch, with logits from position `first` on."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for nth, (sequence, position, token) in enumerate(rows):
            batch.token[nth], batch.pos[nth] = token, position
            batch.n_seq_id[nth], batch.seq_id[nth][0] = 1, sequence
            batch.logits[nth] = position >= first
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"
        self._api.llama_synchronize(self._context)

    def likeliest(self, count: int) -> list[int]:
        """The token with the highest logit at each of the `count` rows of the last batch that have logits."""
        size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        logits = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (count, size))
        return [int(token) for token in logits.argmax(axis=1)]

    def keep(self, length: int) -> None:
        """Forget all entries of the first sequence but the first `length`."""
        memory = self._api.llama_get_memory(self._context)
        assert self._api.llama_memory_seq_rm(memory, 0, length, -1), "this model's entries cannot be forgotten in part"

    def ends_with(self, token: int) -> bool:
        """Whether `token` ends an answer."""
        return bool(self._api.llama_vocab_is_eog(self._api.llama_model_get_vocab(self._model), token))

    def close(self) -> None:
        """Give back its memory."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


def version() -> str:
    """The version of llama-cpp-python, and what llama.cpp says it was built with."""
    import llama_cpp

    return f"{llama_cpp.__version__}: {llama_cpp.llama_print_system_info().decode().strip()}"

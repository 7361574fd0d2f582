"""The prefix cache in a file: it names everything that its entries depend on, and each
block has a digest, so answers stay the same to the bit."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from d3engine.engine.settings import EngineSettings
from d3engine.errors import D3EngineError
from d3engine.kernels.kv_pool import KVPool, values_and_scales
from d3engine.model.expected_tensors import fingerprint
from d3engine.scheduling.prefix_cache import Prefix, PrefixCache
from d3engine.utils.files import UnreadableFileError, is_there, open_regular, path_of, write_whole
from d3engine.utils.version import __version__

_log = logging.getLogger(__name__)

KEY_BYTES = hashlib.sha256().digest_size
_OF = "d3engine.prefixes"


@dataclass(frozen=True)
class PrefixFile:
    """Where an engine keeps its prefixes, which at most, and what their entries depend on."""

    path: Path
    most_bytes: int
    made_by: str

    @classmethod
    def of(cls, settings: EngineSettings, executor: str) -> PrefixFile | None:
        """That of `prefix_cache_file`; None without one. `executor` is as `stats()` names it."""
        if settings.prefix_cache_file is None:
            return None
        depends_on = {
            "version": __version__,
            "weights": fingerprint(settings.directory),
            "executor": executor.partition(", threads")[0],
            "long_rope": settings.config.rope.is_long(settings.max_model_len),
            "torch": torch.__version__,
        }
        types = ("dtype", "weight_dtype", "kv_dtype", "activations", "weight_compression")
        for name in (*types, "keeps_blocks", "block_size", "kernels", "batch_invariant"):
            depends_on[name] = str(getattr(settings, name))
        return cls(Path(settings.prefix_cache_file), settings.prefix_cache_file_bytes, json.dumps(depends_on))

    def write(self, cache: PrefixCache, pool: KVPool) -> None:
        """Keep the prefixes that were used last; without any the file stays as it is. A failure is logged."""
        parts, sizes = _parts(pool, cache.num_layers)
        prefixes = cache.lasting()[: self.most_bytes // sum(sizes)]
        if not prefixes:
            return
        blocks = torch.from_numpy(np.stack([one.blocks for one in prefixes]).astype(np.int64))  # [N, L]
        values = [part[blocks.to(part.device)].cpu().view(torch.uint8).flatten(1) for part in parts]
        tensors = {
            "keys": _rows(one.key for one in prefixes),
            "parents": _rows(one.parent.ljust(KEY_BYTES, b"\0") for one in prefixes),
            "tokens": _rows(one.tokens for one in prefixes),
            "values": torch.cat(values, dim=1),
        }
        tensors["digests"] = _rows(_digest(one, row) for one, row in zip(prefixes, tensors["values"], strict=True))
        try:
            write_whole(self.path, save(tensors, metadata={_OF: self.made_by}))
        except OSError as error:
            _log.warning("%s: the prefix cache was not kept: %s", self.path, error.strerror or error)
            return
        _log.info("%s: %d blocks of prompts kept", self.path, len(prefixes))

    def read(self, cache: PrefixCache, pool: KVPool) -> None:
        """Take in what fits, the prefixes that were used last; why a file is left aside is logged."""
        if not is_there(self.path):
            return
        try:
            count = self._read(cache, pool)
        except (D3EngineError, SafetensorError, OSError, ValueError, KeyError) as error:
            cache.clear()
            _log.warning("%s: left aside, the prefix cache begins empty: %s", self.path, error)
            return
        _log.info("%s: %d blocks of prompts read", self.path, count)

    def _read(self, cache: PrefixCache, pool: KVPool) -> int:
        parts, sizes = _parts(pool, cache.num_layers)
        with open_regular(self.path) as opened, safe_open(path_of(opened), framework="pt") as file:
            made_by = (file.metadata() or {}).get(_OF)
            if made_by is None:
                raise ValueError("it is no file of prefixes")
            if made_by != self.made_by:
                raise ValueError("it was written by another model, version, machine or setting")
            names = ("keys", "parents", "tokens", "digests")
            keys, parents, tokens, digests = found = [file.get_tensor(name).numpy() for name in names]
            values, count = file.get_slice("values"), min(len(keys), cache.room)
            if any(values.get_shape() != [len(one), sum(sizes)] for one in found):
                raise ValueError("its tensors are of other shapes")
            for place in reversed(range(count)):  # the last to come in are the first to stay
                parent = parents[place].tobytes()
                prefix = Prefix(keys[place].tobytes(), b"" if not any(parent) else parent, tokens[place].tobytes())
                row = values[place : place + 1][0]
                is_own = prefix.key == hashlib.sha256(prefix.parent + prefix.tokens).digest()
                if not is_own or prefix.key in cache or _digest(prefix, row) != digests[place].tobytes():
                    raise ValueError("a block is not what was written")
                blocks = torch.from_numpy(cache.restore(prefix).astype(np.int64))
                for part, own in zip(parts, torch.split(row, sizes), strict=True):
                    entries = own.clone().view(part.dtype).view(len(blocks), *part.shape[1:])
                    part[blocks.to(part.device)] = entries.to(part.device)
        return count


def is_foreign(path: Path) -> bool:
    """Whether a file is there that is neither one of prefixes nor what a power cut leaves of one."""
    try:
        with open_regular(path) as file:
            head = file.read(1024)
    except UnreadableFileError:  # reading and writing it say why
        return False
    return bool(head.strip(b"\0")) and _OF.encode() not in head


def _rows(rows: Iterable[bytes]) -> Tensor:
    """Byte strings of one length as uint8 [N, length]."""
    return torch.from_numpy(np.stack([np.frombuffer(row, dtype=np.uint8) for row in rows]))


def _parts(pool: KVPool, num_layers: int) -> tuple[list[Tensor], list[int]]:
    """The tensors of a pool, and the bytes that a logical block has in each."""
    parts = [part for part in values_and_scales(pool) if part is not None]
    return parts, [num_layers * part[0].nbytes for part in parts]


def _digest(prefix: Prefix, row: Tensor) -> bytes:
    digest = hashlib.sha256(prefix.key + prefix.parent + prefix.tokens)
    digest.update(row.numpy().data)
    return digest.digest()

"""The adapters of an engine: those that are loaded, by name, and those that requests ask for."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from d3engine.errors import InvalidValueError, ModelFormatError, require, require_integer, require_name
from d3engine.model.adapters import Adapter, read_adapter
from d3engine.model.config import ModelConfig
from d3engine.scheduling.sequence import Sequence as EngineSequence


class AdapterStore:
    """The adapters of one engine by name. Any thread may load and unload them, while another steps the engine.

    An adapter that is unloaded goes when the last of its requests has ended. `device` "meta" reads and checks files
    and keeps no values: for the process of an engine's callers.

    Args:
        max_rank: of a map.
        most: adapters that are loaded at once.
        dtype: of maps; None: as stored.
        absent: why there can be none, in words; None: there can be.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        max_rank: int,
        most: int,
        absent: str | None = None,
    ) -> None:
        self._config = config
        self._kind: dict[str, Any] = {"dtype": dtype, "device": device, "max_rank": max_rank}
        self._most = most
        self._absent = absent
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # of the thread that reads files, which takes `_lock` before and after alone
        self._by_name: OrderedDict[str, Adapter] = OrderedDict()  # the one used last stands last
        self._ids: dict[str, int] = {}
        self._passing: set[str] = set()  # those that a request has brought
        self._paths: dict[str, str] = {}  # replaced and never changed: to read it takes no lock
        self._on_read: Callable[[Adapter], None] = lambda adapter: None

    @property
    def paths(self) -> dict[str, str]:
        """Name -> directory of those that were loaded by name, and not by a request; asks no thread that loads."""
        return dict(self._paths)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(adapter.nbytes for adapter in self._by_name.values())

    def follow(self, on_read: Callable[[Adapter], None]) -> None:
        """Call `on_read` for each adapter that is loaded, and later for each one before a request can have it."""
        with self._reading:
            self._on_read = on_read
            for adapter in list(self._by_name.values()):
                on_read(adapter)

    def load(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Load an adapter to stay until `unload`; raises `InvalidValueError` for a name that is taken."""
        require_name("lora_name", name)
        with self._reading:
            with self._lock:
                known = self._by_name.get(name)
                if known is not None:
                    is_brought = name in self._passing and known.path == _absolute(path)
                    require(is_brought, "lora_name", name, "the name of no adapter that is loaded (unload it first)")
            adapter = known or self._read(name, _absolute(path))
            with self._lock:
                self._by_name[name] = adapter
                self._passing.discard(name)
                self._paths = self._paths | {name: str(adapter.path)}
            return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that have begun keep it. Raises `InvalidValueError` for an unknown name."""
        with self._lock:
            require(name in self._by_name, "lora_name", name, f"one of the loaded adapters ({self._shown()})")
            self._forget(name)
            self._paths = {one: path for one, path in self._paths.items() if one != name}

    def is_loaded(self, asked: object) -> bool:
        """Whether a `lora_request` needs no file and waits for none. Raises `InvalidValueError` as `of_request`."""
        name, _, path = _read_request(asked)
        with self._lock:
            known = self._by_name.get(name)
        return known is not None and (not path or known.path == _absolute(path))

    def of_request(self, asked: object) -> Adapter | None:
        """The adapter of a `lora_request`: None, a name, a path, or an object with vLLM's attributes.

        One that is named with its path is loaded now, and makes room for others when it is used no more.
        """
        if asked is None:
            return None
        name, number, path = _read_request(asked)
        adapter = self._known(name, path, number)
        if adapter is None:
            with self._reading:
                adapter = self._known(name, path, number)  # another thread may have read it meanwhile
                if adapter is None:
                    place = name if path is None and os.path.isdir(name) else path
                    adapter = self._brought(name, place, number)
        return adapter

    def _known(self, name: str, path: str | None, number: int | None) -> Adapter | None:
        with self._lock:
            adapter = self._by_name.get(name)
            if adapter is not None:
                allowed = f"{str(adapter.path)!r}, from which {name!r} is loaded"
                require(not path or adapter.path == _absolute(path), "lora_path", path, allowed)
                if number is not None:
                    self._check_number(name, number)
                self._by_name.move_to_end(name)
            return adapter

    def _brought(self, name: str, path: str | None, number: int | None) -> Adapter:
        with self._lock:
            allowed = f"the name of a loaded adapter ({self._shown()}), or one with its lora_path"
        require(bool(path), "lora_request", name, allowed)
        assert path is not None
        adapter = self._read(name, _absolute(path))
        with self._lock:
            self._by_name[name] = adapter
            self._passing.add(name)
            if number is not None:
                self._check_number(name, number)
        return adapter

    def _check_number(self, name: str, number: int) -> None:
        other = next((one for one, its in self._ids.items() if its == number and one != name), None)
        known = self._ids.setdefault(name, number)
        allowed = f"a number of {name!r} alone ({other!r} has it)" if other else f"{known}, which {name!r} has"
        require(other is None and known == number, "lora_int_id", number, allowed)

    def _read(self, name: str, path: Path) -> Adapter:
        """Read files, and make room for what they held; large ones take seconds, in which `_lock` is free."""
        if self._absent is not None:
            raise InvalidValueError("lora_request", name, f"None here: {self._absent}")
        with self._lock:
            allowed = f"absent: {self._most} adapters are loaded, max_loras at once (unload one)"
            require(len(self._by_name) < self._most or bool(self._passing), "lora_name", name, allowed)
        try:
            adapter = read_adapter(name, path, self._config, **self._kind)
        except ModelFormatError as error:
            raise InvalidValueError("lora_path", str(path), f"an adapter of this model ({error})") from None
        self._on_read(adapter)
        with self._lock:  # an adapter that cannot be read takes no other's place
            if len(self._by_name) >= self._most:
                self._forget(next(one for one in self._by_name if one in self._passing))
        return adapter

    def _forget(self, name: str) -> None:
        del self._by_name[name]
        self._passing.discard(name)
        self._ids.pop(name, None)

    def _shown(self) -> str:
        names = [name for name in self._by_name if name not in self._passing]
        return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "") if names else "there is none"


def _absolute(path: str | os.PathLike[str]) -> Path:
    is_path = isinstance(path, str | os.PathLike) and os.fspath(path) != "" and "\0" not in os.fspath(path)
    require(is_path, "lora_path", path, "a directory")
    return Path(os.path.abspath(path))


def _read_request(asked: object) -> tuple[str, int | None, str | None]:
    """Name, number and path of a `lora_request`."""
    if isinstance(asked, str | os.PathLike):
        name = os.fspath(asked)
        require_name("lora_request", name)
        return name, None, None
    allowed = "None, the name of an adapter, a path, or LoRARequest(lora_name, lora_int_id, lora_path)"
    get: Callable[..., Any] = asked.get if isinstance(asked, Mapping) else partial(getattr, asked)
    name, number, path = get("lora_name", None), get("lora_int_id", None), get("lora_path", "")
    require(isinstance(name, str) and isinstance(path, str | os.PathLike | None), "lora_request", asked, allowed)
    require_name("lora_name", name)
    if number is not None:
        require_integer("lora_int_id", number, 1)
    return str(name), number, None if path is None else os.fspath(path)


def adapters_of(sequences: Sequence[EngineSequence]) -> list[Adapter | None] | None:
    """The adapter of each sequence; None where none has one."""
    own = [sequence.adapter for sequence in sequences]
    return None if all(adapter is None for adapter in own) else own

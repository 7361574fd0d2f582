"""Which GGUF file of a repository a quantization stands for, by the files' names alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

DEFAULT_QUANTIZATION = "Q4_K_M"
"""Taken where none is named, as llama.cpp and Ollama do."""

_GGUF = ".gguf"
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|B?FP?16|FP?32))(?=$|[-./])", re.IGNORECASE | re.ASCII
)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""In the names of files beside a model: projectors of pictures, statistics of a quantization."""


def gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """The models among the files of a repository: name without suffix and part number -> its files in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(_GGUF) and not _NO_MODEL.search(file):
            models.setdefault(_PART.sub("", file[: -len(_GGUF)]), []).append(file)
    return models


def quantization_of(model: str) -> str | None:
    """The quantization in the name of a model, as llama.cpp writes it; None where the name has none."""
    found = _QUANTIZATION.findall(model)
    return found[-1].upper() if found else None


def choose_models(models: Collection[str], quantization: str) -> list[str]:
    """The models that a quantization names, in any case: one is the answer, several are ambiguous.

    A file's whole name, with or without its suffix, stands for that file, and a piece of a name between separators
    counts where no quantization is the one named ("IQ3" does not name "IQ3_M").
    """
    wanted = quantization.casefold().removesuffix(_GGUF)
    piece = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?=$|[-./])")
    return (
        [model for model in models if wanted in (model.casefold(), _base(model).casefold())]
        or [model for model in models if (quantization_of(model) or "").casefold() == wanted]
        or [model for model in models if piece.search(model.casefold())]
    )


def names_of(models: Collection[str]) -> dict[str, str]:
    """Model -> what to write behind the colon: its quantization, or its name where two have the same or none."""
    kinds = [quantization_of(model) for model in models]
    return {
        model: kind if kind is not None and kinds.count(kind) == 1 else _base(model)
        for model, kind in zip(models, kinds, strict=True)
    }


def are_all(parts: Collection[str]) -> bool:
    """Whether the files of a model are all parts that their names count."""
    found = [part for part in (_PART.search(file[: -len(_GGUF)]) for file in parts) if part]
    numbers = [int(part["number"]) for part in found]
    return not found or (len(found) == len(parts) and numbers == list(range(1, int(found[0]["count"]) + 1)))


def _base(model: str) -> str:
    return model.rpartition("/")[2]

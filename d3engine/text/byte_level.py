"""How byte-level tokenizers write bytes as characters (GPT-2's table; Llama 3)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType


@cache
def byte_of_character() -> Mapping[str, int]:
    """Return GPT-2's table: printable Latin-1 characters are themselves, other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return MappingProxyType(table | {chr(0x100 + i): byte for i, byte in enumerate(others)})


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes that a piece stands for.

    An added token's text may have characters outside the table; it is then plain text, as in `tokenizers`.
    """
    table = byte_of_character()
    if all(char in table for char in piece):
        return bytes(table[char] for char in piece)
    return piece.encode("utf-8")

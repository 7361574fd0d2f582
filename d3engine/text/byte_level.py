"""How byte-level tokenizers write bytes as characters (GPT-2's table; Llama 3)."""

from __future__ import annotations


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 characters are themselves, other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}

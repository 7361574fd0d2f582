"""Fill-in-the-middle prompts: what stands before a gap and after it, by the special tokens of code models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from d3engine.text.tokenizer import Tokenizer

FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Refact
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
"""The tokens before the prefix, the suffix and the middle, of the models that write them in this order."""
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|cursor|>", "<file_sep>", "<EOT>", "▁<EOT>")
"""Tokens that end a middle, beside the model's own ends of text and those of the format."""
FILE = "<|file_sep|>"
"""Before the name of each file of a repository, as Qwen2.5-Coder was trained."""


@dataclass(frozen=True)
class InfillFormat:
    """The special tokens of one tokenizer; `ends` end a middle."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]
    file: int | None

    def prompt(
        self, tokenizer: Tokenizer, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """The prompt whose answer stands between the two; `files` are names and texts of others, before it."""

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        begin = tokenizer.encode("") if tokenizer.bos_token_id is not None else []
        found = [token for token in begin if token == tokenizer.bos_token_id]
        for name, text in files:
            found += [*([] if self.file is None else [self.file]), *ids(f"{name}\n{text}\n")]
        return [*found, self.prefix, *ids(prefix), self.suffix, *ids(suffix), self.middle]


def infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """The format that a tokenizer has the tokens of; None where it has none."""
    for names in FORMATS:
        tokens = [_token(tokenizer, name) for name in names]
        prefix, suffix, middle = tokens
        if prefix is not None and suffix is not None and middle is not None:
            ends = {token for name in ENDS if (token := _token(tokenizer, name)) is not None}
            return InfillFormat(
                prefix, suffix, middle, tuple(sorted(ends | {prefix, suffix, middle})), _token(tokenizer, FILE)
            )
    return None


def _token(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a special token, None where the tokenizer reads its name as text."""
    ids = tokenizer.encode(name, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and tokenizer.convert_id_to_token(ids[0]) == name else None

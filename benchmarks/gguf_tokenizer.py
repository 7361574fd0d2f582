"""A model directory's tokenizer in a GGUF file: made of its tokenizer.model, or copied from its own GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf

_UNUSED = 5


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, vocab_size: int) -> None:
    """Write the tokenizer of `directory`. Raises `FileNotFoundError` where it has neither of both."""
    sources = sorted(directory.glob("*.gguf"))
    if sources:
        _copy(writer, sources[0])
    else:
        _add_pieces(writer, directory / "tokenizer.model", vocab_size)


def _copy(writer: gguf.GGUFWriter, source: Path) -> None:
    for name, found in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            kinds = found.types
            writer.add_key_value(name, found.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)


def _add_pieces(writer: gguf.GGUFWriter, file: Path, vocab_size: int) -> None:
    """ggml's kinds of tokens are sentencepiece's own numbers."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto.FromString(file.read_bytes())
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    pieces += [(f"[unused {number}]", -1000.0, _UNUSED) for number in range(len(pieces), vocab_size)]
    tokens, scores, kinds = zip(*pieces, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.trainer_spec.bos_id)
    writer.add_eos_token_id(model.trainer_spec.eos_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)

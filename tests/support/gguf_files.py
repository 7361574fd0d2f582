"""GGUF files of tiny models, made by ggml's own writer: every type of tensor, and both kinds of tokenizers."""

import io
import itertools
import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from d3engine.model.gguf_file import TENSOR_TYPES

SIZES: dict[str, int] = {
    "vocab_size": 420,
    "hidden": 256,
    "intermediate": 512,
    "layers": 2,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 32,
}
SMALL: dict[str, Any] = {
    "types": ("Q8_0",),
    "hidden": 32,
    "intermediate": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
}
"""Sizes of a model that is written and loaded in no time."""
ROOT = Path(__file__).parents[2]
_SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
_SCALES_AT |= {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_XS": (0,)}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"


def shapes(architecture: str = "llama", *, tied: bool = False, **changes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors in llama.cpp's words."""
    sizes = SIZES | changes
    hidden, inner = sizes["hidden"], sizes["intermediate"]
    q, kv = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes["vocab_size"], hidden)}
    for layer in range(sizes["layers"]):
        layer_shapes = {
            **{"attn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)},
            **{"attn_output": (hidden, q), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden)},
            **{"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)},
        }
        if architecture == "qwen3":
            layer_shapes |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (sizes["head_dim"],))
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()}
    found["output_norm.weight"] = (hidden,)
    return found if tied else found | {"output.weight": (sizes["vocab_size"], hidden)}


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], type_name: str) -> np.ndarray[Any, Any]:
    """Random values of a type, as they lie in a file; for ggml's own types the bytes are random, but for the scales."""
    values = (rng.standard_normal(shape) * 0.1).astype(np.float32)
    if type_name == "F32":
        return values
    if type_name == "F16":
        return values.astype(np.float16)
    if type_name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(*shape[:-1], -1)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    raw = rng.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
    for place in _SCALES_AT[type_name]:
        scales = rng.uniform(0.0005, 0.002, len(raw)).astype(np.float16)
        raw[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    *,
    tokenizer: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    leave: tuple[str, ...] = (),
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    tied: bool = False,
    types: tuple[str, ...] = TENSOR_TYPES,
    architecture: str = "llama",
    part_tensors: int = 0,
    **sizes: int,
) -> Path:
    """A random model whose matrices take the types in turn; `changes` are keys beyond the usual, or in their place.

    `tokenizer`: its keys; None: those of `bpe_keys`.
    """
    # With `part_tensors` it is in parts of that many tensors, and the path returned is the first's.
    own = SIZES | sizes
    keys: dict[str, Any] = {
        "llama.block_count": own["layers"],
        "llama.context_length": 512,
        "llama.embedding_length": own["hidden"],
        "llama.feed_forward_length": own["intermediate"],
        "llama.attention.head_count": own["heads"],
        "llama.attention.head_count_kv": own["kv_heads"],
        "llama.rope.dimension_count": own["head_dim"],
        "llama.rope.freq_base": 50_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": own["vocab_size"],
        **(bpe_keys() if tokenizer is None else tokenizer),
        **(changes or {}),
    }
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in keys.items()}
    writer = GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    for key, value in keys.items():
        if key not in leave:
            add_key(writer, key, value)
    rng, in_turn = np.random.default_rng(0), itertools.cycle(types)
    for name, shape in shapes(architecture, tied=tied, **sizes).items():
        type_name = next(in_turn) if len(shape) == 2 else "F32"
        tensor = random_tensor(rng, shape, type_name)
        writer.add_tensor(name, tensor, raw_dtype=GGMLQuantizationType[type_name])
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    write_and_close(writer)
    return path if not part_tensors else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}.get(type(value), "array")
    getattr(writer, f"add_{kind}")(key, value)


def write_and_close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def corpus() -> list[str]:
    """Lines to train a tokenizer on."""
    return (ROOT / "LICENSE").read_text("utf-8").splitlines()  # which does not change, and so no tokenizer does


def many_texts() -> list[str]:
    """2,000: prose and code, numbers of several scripts, spaces of all kinds, signs, special tokens, any characters."""
    rng = random.Random(0)
    signs = "aZ 09.,\n\t'éß漢字🙂अ́\u00a0<>|½²٣Ⅷ①-_$"
    parts = ["  ", "\n", "hello", "<|im_start|>", "<|im_end|>", "12", "x3", "don't", "IT'S", " whole word"]
    any_character = [chr(i) for i in range(0x20, 0x1FBFF) if unicodedata.category(chr(i)) not in ("Cn", "Cs", "Co")]
    some = {200: parts, 800: signs, 300: any_character}
    found = ["".join(rng.choices(of, k=rng.randint(1, 40))) for count, of in some.items() for _ in range(count)]
    return found + rng.choices([line for line in corpus() if line], k=2000 - len(found))


@cache
def bpe_keys(pre: str = "llama-bpe") -> dict[str, Any]:
    """The keys of a byte-level BPE tokenizer with three special tokens at its end; not to be changed."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=416, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    state = backend.get_vocab()
    tokens = sorted(state, key=state.__getitem__)
    merges = json.loads(backend.to_str())["model"]["merges"]
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    first = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *special, "<think>"],
        "tokenizer.ggml.token_type": [1] * first + [3] * len(special) + [4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.eot_token_id": first + 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }


USER_DEFINED = ["<think>", "\u2581\u2581", "\u2581\u2581\u2581\u2581"]
"""The last two as Gemma has them, for runs of spaces."""


def sentencepiece_model(*, add_dummy_prefix: bool = True) -> bytes:
    """A small sentencepiece model with byte pieces, one special and some user-defined tokens."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=SIZES["vocab_size"],
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.99,
        control_symbols=["<|im_end|>"],
        user_defined_symbols=USER_DEFINED,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        minloglevel=2,
    )
    return model.getvalue()


def sentencepiece_keys(model: bytes) -> dict[str, Any]:
    """The keys that llama.cpp writes for a sentencepiece model."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    every = range(pieces.get_piece_size())

    def kind(piece: int) -> int:
        asked = {2: pieces.is_unknown, 3: pieces.is_control, 5: pieces.is_unused, 6: pieces.is_byte}
        found = [number for number, is_it in asked.items() if is_it(piece)]
        return found[0] if found else 4 if pieces.id_to_piece(piece) in USER_DEFINED else 1

    def token(piece: int) -> str:
        name = str(pieces.id_to_piece(piece))
        return name.replace("\u2581", " ") if kind(piece) == 4 else name

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token(piece) for piece in every],
        "tokenizer.ggml.scores": [pieces.get_score(piece) for piece in every],
        "tokenizer.ggml.token_type": [kind(piece) for piece in every],
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.eos_token_id": pieces.eos_id(),
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
    }

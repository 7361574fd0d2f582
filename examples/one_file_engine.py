"""The engine in one file, from tokens to tokens: it imports PyTorch and readers of files, and nothing of d3engine.

python examples/one_file_engine.py [MODEL [PROMPT ...]] [--alpha 0.8 --start 0.6]

Llama, a paged KV cache whose blocks belong to one layer, cutoffs, copy-on-skip, continuous batching with chunked
prompts and preemption, sampling by seed. It is slow and plain: an oracle for the real engine, and the shortest way to
read it. docs/explanation/cutoffs.md explains the vector that it turns on. MODEL is a directory of a Llama or Qwen2 with
safetensors and a tokenizer.json, or a GGUF file of one (needs the package gguf).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import deque
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# -- Depth: which layers run for the i-th generated token ------------------------------------------------------

NEVER = 2**31 - 1


class Cutoffs:
    """Layer l runs at step i if and only if i < cutoffs[l]: a layer that is skipped once stays skipped.

    Step i yields the i-th generated token, from 0. Step 0 comes out of the prompt pass, so cutoffs are at least 1.
    """

    copies = False
    """No token reads an entry that a skipped layer lacks: where a layer still runs, it ran for all earlier tokens."""

    def __init__(self, cutoffs: List[int]) -> None:
        self.cutoffs = np.array(cutoffs)

    def runs(self, step: int) -> np.ndarray:
        """For each layer, whether it runs."""
        return step < self.cutoffs

    def is_over(self, layer: int, step: int) -> bool:
        """Whether the layer runs neither at this step nor later, so that its memory can go."""
        return bool(step >= self.cutoffs[layer])


class Table:
    """Any set of layers at any step; the last row holds for ever.

    A layer may run again after a skip, and would then read entries that were never computed. So a skipped layer's entry
    is a copy of the entry of the nearest layer below that ran (copy-on-skip).
    """

    copies = True

    def __init__(self, rows: List[List[bool]]) -> None:
        self.rows = np.array(rows, dtype=bool)
        if not self.rows[:, 0].all() or not self.rows[0].all():
            raise ValueError("layer 0 must run at every step, and every layer at step 0")

    def runs(self, step: int) -> np.ndarray:
        """For each layer, whether it runs."""
        return self.rows[min(step, len(self.rows) - 1)]

    def is_over(self, layer: int, step: int) -> bool:
        """Never: what is skipped may run again."""
        return False


Depth = Cutoffs | Table


def full_depth(num_layers: int) -> Cutoffs:
    """Every layer, every token."""
    return Cutoffs([NEVER] * num_layers)


def d3(num_layers: int, alpha: float, start: float) -> Cutoffs:
    """Position-aware depth decay: step i keeps max(floor(L * alpha**i), floor(L * start)) layers.

    What is left out is a window that begins at floor(L * start) and grows towards the last layer.
    """
    first = math.floor(Fraction(str(start)) * num_layers)
    cutoffs = [NEVER] * num_layers
    for step in range(1, 2**17):
        kept = max(math.floor(num_layers * alpha**step), first)
        for layer in range(first, first + num_layers - kept):
            cutoffs[layer] = min(cutoffs[layer], step)
        if kept == first or alpha == 1:
            break
    return Cutoffs(cutoffs)


# -- The model: a Llama, or a Qwen2, which has biases ----------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Sizes, as config.json has them."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    end_tokens: frozenset[int]


@dataclass
class Layer:
    """The weights of one layer; biases may be None."""

    attention_norm: Tensor
    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    o: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass
class Model:
    """All weights in float32, and the tokenizer."""

    config: Config
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor
    tokenizer: Any

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary embeddings, `[rows, 1, head_dim]`: angles in float32 whatever the weights are."""
        pairs = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        angles = positions.float()[:, None] * self.config.rope_theta**-pairs
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Divide each row by its root mean square."""
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + epsilon) * weight


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs of channels, the first half's with the second half's."""
    cosine, sine = rotation
    low, high = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-high, low), dim=-1) * sine


# -- Memory: one pool of blocks for all layers -----------------------------------------------------------------


class BlockPool:
    """KV entries in blocks. A block belongs to one layer of one sequence, so a layer can give its blocks back alone."""

    def __init__(self, num_blocks: int, block_size: int, config: Config) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.block_size = block_size
        self.free = list(range(num_blocks))

    def write(self, table: list[int], positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write entries `[rows, kv_heads, head_dim]` at their positions."""
        blocks = torch.tensor(table)[positions // self.block_size]
        self.keys[blocks, positions % self.block_size] = keys
        self.values[blocks, positions % self.block_size] = values

    def read(self, table: list[int], length: int) -> tuple[Tensor, Tensor]:
        """The first `length` entries, `[length, kv_heads, head_dim]` each."""
        blocks = torch.tensor(table[: -(-length // self.block_size)])
        return self.keys[blocks].flatten(0, 1)[:length], self.values[blocks].flatten(0, 1)[:length]


# -- Requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a temperature of 0 is greedy."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False


@dataclass(eq=False)
class Sequence:
    """One prompt and its answer."""

    tokens: list[int]
    prompt_length: int
    depth: Depth
    sampling: Sampling
    tables: list[list[int]]
    """For each layer, the blocks of its entries."""
    computed: int = 0
    """Positions whose entries are in the cache; a preempted sequence begins at 0 again."""
    depths: list[int] = field(default_factory=list)
    """Layers run for each generated token."""
    is_finished: bool = False

    @property
    def answer(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_length :]

    def step_of(self, position: int) -> int:
        """The step at which a position is computed; all but the last one of a prompt count to step 0."""
        return max(0, position - self.prompt_length + 1)


@dataclass(frozen=True)
class Chunk:
    """Consecutive positions of one sequence, and which layers run for each: `runs[position, layer]`.

    A piece of a prompt, one decoded token, or a piece of a replay after preemption: there is no other difference.
    """

    sequence: Sequence
    first: int
    runs: np.ndarray

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.first + len(self.runs)


def choose(logits: Tensor, sampling: Sampling, step: int) -> int:
    """The next token. Noise follows from (seed, step) alone, so neither batch nor preemption changes a draw."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    ordered, order = logits.sort(descending=True, stable=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    dropped = before >= sampling.top_p
    if sampling.top_k:
        dropped[sampling.top_k :] = True
    dropped[0] = False
    kept = logits.index_fill(0, order[dropped], -math.inf)
    generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + step)
    noise = -torch.log(-torch.log(torch.rand(len(logits), generator=generator).clamp(1e-20, 1 - 1e-7)))
    return int((kept + noise).argmax())


# -- The engine: schedule, run, choose -------------------------------------------------------------------------


class Engine:
    """Continuous batching: requests join and leave at any step.

    Args:
        model: weights and tokenizer.
        num_blocks: size of the KV cache; a sequence takes a block per layer for every `block_size` tokens.
        block_size: entries of a block.
        max_sequences: sequences that run at once.
        max_step_tokens: rows of a step; longer prompts are computed in chunks.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: int = 8192,
        block_size: int = 16,
        max_sequences: int = 16,
        max_step_tokens: int = 256,
    ) -> None:
        self.model, self.config = model, model.config
        self.pool = BlockPool(num_blocks, block_size, model.config)
        self.max_sequences, self.max_step_tokens = max_sequences, max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, prompt: List[int], depth: Depth | None = None, sampling: Sampling | None = None) -> Sequence:
        """Queue a request; requests of different depths share a batch."""
        layers = self.config.num_layers
        sequence = Sequence(
            list(prompt), len(prompt), depth or full_depth(layers), sampling or Sampling(), [[] for _ in range(layers)]
        )
        self.waiting.append(sequence)
        return sequence

    def generate(self, prompts: List[List[int]], **options: Any) -> list[Sequence]:
        """Answer all prompts in one batch."""
        sequences = [self.add(prompt, **options) for prompt in prompts]
        while self.waiting or self.running:
            self.step()
        return sequences

    def step(self) -> None:
        """One step of the engine."""
        chunks = self._schedule()
        logits = self._run(chunks)
        for chunk in chunks:
            self._advance(chunk, logits.get(id(chunk)))

    # What runs in this step.

    def _schedule(self) -> list[Chunk]:
        """Chunks for the sequences that run, then for those that wait while there is room."""
        budget, chunks, preemptions = self.max_step_tokens, [], self.num_preemptions
        for sequence in list(self.running):
            while sequence in self.running and budget and not (chunk := self._chunk(sequence, budget)):
                if len(self.running) == 1:
                    raise MemoryError("the cache is too small for one sequence")
                self._preempt(self.running[-1])
            if sequence in self.running and budget:
                chunks.append(chunk)
                budget -= len(chunk.runs)
        chunks = [chunk for chunk in chunks if chunk.sequence in self.running]
        has_room = preemptions == self.num_preemptions
        while self.waiting and budget and len(self.running) < self.max_sequences and has_room:
            chunk = self._chunk(self.waiting[0], budget)
            if chunk is None:
                if not self.running:
                    raise MemoryError("the cache is too small for one sequence")
                break
            self.running.append(self.waiting.popleft())
            chunks.append(chunk)
            budget -= len(chunk.runs)
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """The next positions of a sequence with blocks for them, or None where the pool has too few."""
        first, end = sequence.computed, min(len(sequence.tokens), sequence.computed + budget)
        runs = np.stack([sequence.depth.runs(sequence.step_of(position)) for position in range(first, end)])
        missing = []
        for layer, table in enumerate(sequence.tables):
            written = np.flatnonzero(runs[:, layer] | sequence.depth.copies)
            needed = -(-(first + int(written[-1]) + 1) // self.pool.block_size) if len(written) else 0
            missing += [layer] * (needed - len(table))
        if len(missing) > len(self.pool.free):
            return None
        for layer in missing:
            sequence.tables[layer].append(self.pool.free.pop())
        return Chunk(sequence, first, runs)

    def _preempt(self, sequence: Sequence) -> None:
        """Give all blocks back. Each token is computed again later, at the depth of its own step."""
        for layer in range(self.config.num_layers):
            self._release(sequence, layer)
        sequence.computed = 0
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence, layer: int) -> None:
        self.pool.free += sequence.tables[layer]
        sequence.tables[layer] = []

    # The layers.

    @torch.inference_mode()
    def _run(self, chunks: list[Chunk]) -> dict[int, Tensor]:
        """Run the rows of all chunks through their layers; logits of the chunks that reach their sequence's end."""
        tokens = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.first : chunk.end]]
        positions = torch.cat([torch.arange(chunk.first, chunk.end) for chunk in chunks])
        runs = torch.from_numpy(np.concatenate([chunk.runs for chunk in chunks]))
        starts = np.cumsum([0, *(len(chunk.runs) for chunk in chunks)])
        hidden = self.model.embedding[torch.tensor(tokens)]
        rotation = self.model.rotations(positions)
        # The entry of the nearest layer below that ran, for copies.
        shape = (len(tokens), self.config.num_kv_heads, self.config.head_dim)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        for number, layer in enumerate(self.model.layers):
            # The real engine sorts rows by step, youngest first: then these are the first rows, and this is a slice.
            rows = runs[:, number].nonzero()[:, 0]
            if len(rows):
                normed = rms_norm(hidden[rows], layer.attention_norm, self.config.norm_epsilon)
                turned = (rotation[0][rows], rotation[1][rows])
                queries = rotate(self._heads(normed, layer.q, self.config.num_heads), turned)
                keys[rows] = rotate(self._heads(normed, layer.k, self.config.num_kv_heads), turned)
                values[rows] = self._heads(normed, layer.v, self.config.num_kv_heads)
            place = {int(row): nth for nth, row in enumerate(rows)}
            attended = torch.zeros(len(rows), self.config.num_heads * self.config.head_dim)
            for chunk, start in zip(chunks, starts, strict=False):
                mine = torch.arange(start, start + len(chunk.runs))
                active = mine[runs[mine, number]]
                written = mine if chunk.sequence.depth.copies else active
                if len(written):
                    table = chunk.sequence.tables[number]
                    self.pool.write(table, positions[written], keys[written], values[written])
                if len(active):
                    here = torch.tensor([place[int(row)] for row in active])
                    attended[here] = self._attend(queries[here], positions[active], table)
            if len(rows):
                hidden[rows] += F.linear(attended, *layer.o)
                normed = rms_norm(hidden[rows], layer.mlp_norm, self.config.norm_epsilon)
                gated = F.silu(F.linear(normed, layer.gate)) * F.linear(normed, layer.up)
                hidden[rows] += F.linear(gated, layer.down)
        ends = zip(chunks, starts[1:], strict=True)
        last = {id(chunk): int(end) - 1 for chunk, end in ends if chunk.end == len(chunk.sequence.tokens)}
        final = rms_norm(hidden[list(last.values())], self.model.norm, self.config.norm_epsilon)
        return dict(zip(last, F.linear(final, self.model.head), strict=True))

    def _heads(self, normed: Tensor, weights: tuple[Tensor, Tensor | None], count: int) -> Tensor:
        return F.linear(normed, *weights).view(len(normed), count, self.config.head_dim)

    def _attend(self, queries: Tensor, positions: Tensor, table: list[int]) -> Tensor:
        """Attention of some rows of one sequence over the entries of one layer, each up to its own position."""
        length = int(positions[-1]) + 1
        keys, values = self.pool.read(table, length)
        mask = torch.arange(length) <= positions[:, None]
        shared = self.config.num_heads // self.config.num_kv_heads
        keys, values = (each.repeat_interleave(shared, dim=1).transpose(0, 1) for each in (keys, values))
        found = F.scaled_dot_product_attention(queries.transpose(0, 1), keys, values, attn_mask=mask)
        return found.transpose(0, 1).flatten(1)

    # What comes of it.

    def _advance(self, chunk: Chunk, logits: Tensor | None) -> None:
        """Append the next token where there is one, and free what will not be read again."""
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        sequence.computed = chunk.end
        if logits is not None:
            token = choose(logits, sampling, len(sequence.answer))
            sequence.tokens.append(token)
            sequence.depths.append(int(chunk.runs[-1].sum()))
            is_end = token in self.config.end_tokens and not sampling.ignore_eos
            sequence.is_finished = is_end or len(sequence.answer) == sampling.max_tokens
        step = sequence.step_of(sequence.computed)
        for layer in range(self.config.num_layers):
            if sequence.is_finished or sequence.depth.is_over(layer, step):
                self._release(sequence, layer)
        if sequence.is_finished:
            self.running.remove(sequence)


# -- Files -----------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Model:
    """Read a directory with safetensors, or a GGUF file, in float32."""
    path = Path(path)
    return _load_gguf(path) if path.suffix == ".gguf" else _load_directory(path)


def _load_directory(path: Path) -> Model:
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    given = json.loads((path / "config.json").read_text(encoding="utf-8"))
    rope = given.get("rope_parameters") or {"rope_theta": given.get("rope_theta", 10_000.0)}
    is_plain = not given.get("rope_scaling") and rope.get("rope_type", "default") == "default"
    if given["model_type"] not in ("llama", "qwen2") or not is_plain:
        raise ValueError("only Llama and Qwen2 with plain rope are read here")
    ends = given.get("eos_token_id")
    heads = given["num_attention_heads"]
    config = Config(
        num_layers=given["num_hidden_layers"],
        hidden_size=given["hidden_size"],
        num_heads=heads,
        num_kv_heads=given.get("num_key_value_heads", heads),
        head_dim=given.get("head_dim") or given["hidden_size"] // heads,
        norm_epsilon=given["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        end_tokens=frozenset(ends if isinstance(ends, list) else [ends]),
    )
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return _assembled(config, tensors, Tokenizer.from_file(str(path / "tokenizer.json")))


GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _load_gguf(path: Path) -> Model:
    import gguf

    reader = gguf.GGUFReader(path)

    def value(name: str, default: Any = None) -> Any:
        found = reader.fields.get(name)
        return default if found is None else found.contents()

    kind = value("general.architecture")
    if kind not in ("llama", "qwen2"):
        raise ValueError(f"only GGUF files of llama and qwen2 are read here, and this one is {kind}")
    heads = value(f"{kind}.attention.head_count")
    config = Config(
        num_layers=value(f"{kind}.block_count"),
        hidden_size=value(f"{kind}.embedding_length"),
        num_heads=heads,
        num_kv_heads=value(f"{kind}.attention.head_count_kv", heads),
        head_dim=value(f"{kind}.attention.key_length", value(f"{kind}.embedding_length") // heads),
        norm_epsilon=value(f"{kind}.attention.layer_norm_rms_epsilon"),
        rope_theta=value(f"{kind}.rope.freq_base", 10_000.0),
        end_tokens=frozenset([value("tokenizer.ggml.eos_token_id")]),
    )
    tensors = {}
    for tensor in reader.tensors:
        *block, name, suffix = tensor.name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = torch.from_numpy(np.require(values, requirements="W"))
        if kind == "llama" and name in ("attn_q", "attn_k"):  # llama.cpp puts the channels of a rotation side by side
            count = config.num_heads if name == "attn_q" else config.num_kv_heads
            found = found.view(count, config.head_dim // 2, 2, -1).transpose(1, 2).reshape(found.shape)
        tensors[f"{prefix}{GGUF_NAMES[name]}.{suffix}"] = found
    return _assembled(config, tensors, _gguf_tokenizer(value))


def _gguf_tokenizer(value: Any) -> Any:
    """Byte pairs as Qwen2 cuts texts; None for other tokenizers, of which this file reads token ids alone."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if value("tokenizer.ggml.pre") != "qwen2":
        return None
    texts = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, merges))
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = value("tokenizer.ggml.token_type")
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _assembled(config: Config, tensors: dict[str, Tensor], tokenizer: Any) -> Model:
    """A model of tensors under the names that transformers gives them."""

    def weights(layer: int, name: str) -> tuple[Tensor, Tensor | None]:
        prefix = f"model.layers.{layer}.self_attn.{name}_proj"
        return tensors[f"{prefix}.weight"], tensors.get(f"{prefix}.bias")

    layers = [
        Layer(
            attention_norm=tensors[f"model.layers.{number}.input_layernorm.weight"],
            q=weights(number, "q"),
            k=weights(number, "k"),
            v=weights(number, "v"),
            o=weights(number, "o"),
            mlp_norm=tensors[f"model.layers.{number}.post_attention_layernorm.weight"],
            gate=tensors[f"model.layers.{number}.mlp.gate_proj.weight"],
            up=tensors[f"model.layers.{number}.mlp.up_proj.weight"],
            down=tensors[f"model.layers.{number}.mlp.down_proj.weight"],
        )
        for number in range(config.num_layers)
    ]
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)  # tied where the file has none
    return Model(config, embedding, layers, tensors["model.norm.weight"], head, tokenizer)


# -- From a shell ----------------------------------------------------------------------------------------------

BUNDLED = Path(__file__).parents[1] / "d3engine" / "demo_model"
QUESTION = "Question: Tom has {} pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?\nAnswer:"


def main() -> None:
    """Answer prompts in one batch, and print how deep each token went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=BUNDLED, help="a directory or a GGUF file")
    parser.add_argument("prompts", nargs="*", default=[QUESTION.format(5), QUESTION.format(7)])
    parser.add_argument("--alpha", type=float, default=1.0, help="D3's decay; 1 is full depth")
    parser.add_argument("--start", type=float, default=0.6, help="the part of the layers below D3's window")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model = load(given.model)
    engine = Engine(model)
    depth = d3(model.config.num_layers, given.alpha, given.start)
    sampling = Sampling(given.max_tokens, given.temperature, seed=given.seed)
    prompts = [model.tokenizer.encode(prompt).ids for prompt in given.prompts]
    for sequence in engine.generate(prompts, depth=depth, sampling=sampling):
        print(model.tokenizer.decode(sequence.answer).strip())
        print("  layers:", sequence.depths)


if __name__ == "__main__":
    main()

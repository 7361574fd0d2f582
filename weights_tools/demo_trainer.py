"""The demo model for training on a CPU: data, losses with depth, Muon, export."""

import io
import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d3engine.depth import D3
from d3engine.research.evaluation import word_problems
from d3engine.research.evaluation.procedural import WORD_PROBLEMS, SolvedQuestion, all_problems
from d3engine.research.evaluation.word_problems import MAX_NUMBER, Split
from d3engine.weights_tools.demo_text import text_files
from d3engine.weights_tools.writing import hf_config

BOS, EOS = 1, 2


@dataclass(frozen=True)
class DemoConfig:
    """The shape of the demo model (a Llama)."""

    vocab_size: int = 768
    layers: int = 16
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 352
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 1024

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def cutoffs(layers: int, alpha: float, start: float) -> list[int]:
    """Returns for each layer the first generation step that skips it under D3."""
    found: list[int] = D3(alpha, start).schedule(layers).cutoffs.tolist()
    return found


def rope_tables(config: DemoConfig, length: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each (length, head_dim), in the half-split layout of HF checkpoints."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    inverse = config.rope_theta**-exponents
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rope to (batch, time, heads, head_dim) with tables (time, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]


class DemoModel(nn.Module):
    """A Llama with weights stacked over layers, as Muon needs them, q/k/v and gate/up fused."""

    # Rows of a batch are aligned at the end of their prompts, and D3's skips are nested. So layer l of a training pass
    # runs on the columns [0 : P + c_l), and the others pass through: exactly D3, at less cost.

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        layers, width = config.layers, config.width
        qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
        scale = 0.5 / math.sqrt(width)
        self.embedding = nn.Parameter(torch.randn(config.vocab_size, width) * 0.1)
        self.lm_head = nn.Parameter(torch.randn(config.vocab_size, width) * 0.01)
        self.qkv = nn.Parameter(torch.randn(layers, qkv, width) * scale)
        self.gate_up = nn.Parameter(torch.randn(layers, 2 * config.ffn, width) * scale)
        # Zero: every layer starts as the identity, which is also what a skipped layer is.
        self.out = nn.Parameter(torch.zeros(layers, width, width))
        self.down = nn.Parameter(torch.zeros(layers, width, config.ffn))
        self.norms = nn.Parameter(torch.ones(layers, 2, width))
        self.final_norm = nn.Parameter(torch.ones(width))
        cos, sin = rope_tables(config, config.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _project(self, x: Tensor, qkv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k, v, each (batch, heads or kv_heads, time, head_dim), rope applied."""
        c = self.config
        batch, time, _ = x.shape
        fused = F.linear(rms_norm(x, norm, c.norm_eps), qkv).view(batch, time, -1, c.head_dim)
        qk, v = torch.split(fused, [c.heads + c.kv_heads, c.kv_heads], dim=2)
        q, k = torch.split(rotate(qk, cos, sin), [c.heads, c.kv_heads], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _finish(self, x: Tensor, attended: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor) -> Tensor:
        """Returns x after the attention output projection and the feed-forward half of a layer."""
        x = x + F.linear(attended.transpose(1, 2).flatten(2), out)
        gate, up = F.linear(rms_norm(x, norm, self.config.norm_eps), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    def _block(self, x: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> Tensor:
        """Returns x after one whole layer over consecutive positions from 0."""
        qkv, out, gate_up, down, norms = weights
        q, k, v = self._project(x, qkv, norms[0], cos, sin)
        repeat = self.config.heads // self.config.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(x, attended, out, gate_up, down, norms[1])

    def _depths(self, tokens: Tensor, border: int, cutoff: list[int] | None) -> Iterator[Tensor]:
        """Yields the hidden states (batch, time, width) after each layer, the final norm not yet applied."""
        x = F.embedding(tokens, self.embedding)
        time = tokens.shape[1]
        stacks = (self.qkv, self.out, self.gate_up, self.down, self.norms)
        for layer, weights in enumerate(zip(*(stack.unbind(0) for stack in stacks), strict=True)):
            columns = time if cutoff is None else min(time, border + max(cutoff[layer] - 1, 0))
            ran = self._block(x[:, :columns], weights, self.cos[:columns], self.sin[:columns])
            x = ran if columns == time else torch.cat([ran, x[:, columns:]], dim=1)
            yield x

    def forward(self, tokens: Tensor, border: int, cutoff: list[int] | None = None) -> Tensor:
        """Returns the hidden states after the final norm, (batch, time, width), of ids (batch, time).

        Columns before ``border`` run every layer, as a prompt does; column border + j is D3's step j + 1.
        """
        *_, x = self._depths(tokens, border, cutoff)
        return rms_norm(x, self.final_norm, self.config.norm_eps)

    def leave_at(self, tokens: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Returns what ``forward`` would for each number of layers, the upper ones left out, from a single pass."""
        after = list(self._depths(tokens, tokens.shape[1], None))
        return [rms_norm(after[depth - 1], self.final_norm, self.config.norm_eps) for depth in depths]

    @torch.no_grad()
    def move_to_the_end(self, layers: Sequence[int]) -> None:
        """Puts some layers above all others, in their order.

        A layer that matters little below D3's window makes room there for one that matters.
        """
        order = [layer for layer in range(self.config.layers) if layer not in layers] + sorted(layers)
        for stack in (self.qkv, self.out, self.gate_up, self.down, self.norms):
            stack.copy_(stack[order].clone())

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], max_tokens: int, eos: int, cutoff: list[int] | None = None
    ) -> list[list[int]]:
        """Returns greedy completions without eos, step by step with KV caches, under D3's skips."""
        c = self.config
        longest = max(map(len, prompts))
        pad = torch.tensor([longest - len(p) for p in prompts])
        step_ids = torch.tensor([[eos] * (longest - len(p)) + p for p in prompts])
        # Left padding shifts a row's positions; rope is relative, so only the mask depends on it.
        visible = torch.arange(longest + max_tokens)[None] >= pad[:, None]
        caches: list[tuple[Tensor, Tensor] | None] = [None] * c.layers
        produced: list[Tensor] = []
        done = torch.zeros(len(prompts), dtype=torch.bool)
        position = 0
        for step in range(max_tokens):
            x = F.embedding(step_ids, self.embedding)
            time = x.shape[1]
            keys, queries = torch.arange(position + time), torch.arange(position, position + time)[:, None]
            mask = (keys <= queries)[None, None] & visible[:, None, None, : position + time]
            mask = mask | (keys == queries)  # itself, which keeps rows of padding finite
            cos, sin = self.cos[position : position + time], self.sin[position : position + time]
            for layer in range(c.layers):
                if cutoff is not None and step >= cutoff[layer]:
                    continue
                q, k, v = self._project(x, self.qkv[layer], self.norms[layer, 0], cos, sin)
                if (cache := caches[layer]) is not None:
                    k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
                caches[layer] = (k, v)
                attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
                x = self._finish(
                    x, attended, self.out[layer], self.gate_up[layer], self.down[layer], self.norms[layer, 1]
                )
            last = rms_norm(x[:, -1], self.final_norm, c.norm_eps)
            step_ids = F.linear(last, self.lm_head).argmax(-1, keepdim=True)
            position += time
            done |= step_ids[:, 0] == eos
            produced.append(step_ids[:, 0])
            if bool(done.all()):
                break
        rows = torch.stack(produced, 1).tolist()
        return [row[: row.index(eos)] if eos in row else row for row in rows]


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Returns the nearest semi-orthogonal matrices of a stack (n, rows >= columns, columns).

    By Newton-Schulz with Keller Jordan's quintic, https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x.mT @ x
        x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
    return x


class Muon:
    """Muon in float32 over the model's stacked matrices: two batched Newton-Schulz runs serve all layers."""

    def __init__(self, model: DemoModel, momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        self.parameters = [model.qkv, model.out, model.gate_up, model.down]
        self.buffers = [torch.zeros_like(p) for p in self.parameters]
        self.momentum, self.weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        updates = []
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            assert parameter.grad is not None
            buffer.lerp_(parameter.grad, 1 - self.momentum)
            updates.append(parameter.grad.lerp(buffer, self.momentum))
        qkv, out, gate_up, down = updates
        width = out.shape[-1]
        # Fused matrices are split into the blocks that act as one map: q, kv, out; gate, up, down.
        square = orthogonalise(torch.cat([qkv.view(-1, width, width), out]))
        tall = orthogonalise(torch.cat([gate_up.view(-1, down.shape[-1], width), down.mT]))
        layers = out.shape[0]
        steps = [
            square[:-layers].view_as(qkv),
            square[-layers:],
            tall[:-layers].reshape_as(gate_up) * math.sqrt(down.shape[-1] / width),
            tall[-layers:].mT,
        ]
        for parameter, update in zip(self.parameters, steps, strict=True):
            parameter.mul_(1 - learning_rate * self.weight_decay).add_(update, alpha=-learning_rate)


def export(model: DemoModel, tokenizer_model: bytes, training: dict[str, object], out: Path) -> None:
    """Writes the HF directory: config, bfloat16 weights, tokenizer, generation settings, training record."""
    c = model.config
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in hf_weights(model).items()}
    safetensors.torch.save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "tokenizer.model").write_bytes(tokenizer_model)
    files: dict[str, dict[str, object]] = {
        "config.json": config_json(c),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False, "temperature": 0.0},
        "training.json": training,
    }
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}
    for name, text in (texts | text_files(tokenizer_model, c.max_positions)).items():
        (out / name).write_text(text, encoding="utf-8")


def load(model: DemoModel, directory: Path) -> bytes:
    """Loads the weights of a directory that ``export`` has written; returns its tokenizer's model."""
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    with torch.no_grad():
        for name, tensor in hf_weights(model).items():
            tensor.copy_(stored[name])
    return (directory / "tokenizer.model").read_bytes()


def hf_weights(model: DemoModel) -> dict[str, Tensor]:
    """Returns the weights under their HF names, fused matrices taken apart: views of the model's own."""
    c = model.config
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    weights: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.final_norm,
        "lm_head.weight": model.lm_head,
    }
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        q, k, v = torch.split(model.qkv[layer], [query, key, key])
        gate, up = model.gate_up[layer].chunk(2)
        weights |= {
            at + "self_attn.q_proj.weight": q,
            at + "self_attn.k_proj.weight": k,
            at + "self_attn.v_proj.weight": v,
            at + "self_attn.o_proj.weight": model.out[layer],
            at + "mlp.gate_proj.weight": gate,
            at + "mlp.up_proj.weight": up,
            at + "mlp.down_proj.weight": model.down[layer],
            at + "input_layernorm.weight": model.norms[layer, 0],
            at + "post_attention_layernorm.weight": model.norms[layer, 1],
        }
    return weights


def config_json(c: DemoConfig) -> dict[str, object]:
    """Returns config.json."""
    config = hf_config(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        intermediate_size=c.ffn,
        num_layers=c.layers,
        num_heads=c.heads,
        num_kv_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_positions,
        tied=False,
        dtype="bfloat16",
        rope_theta=c.rope_theta,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return config | {"head_dim": c.head_dim}


Example = tuple[list[int], list[int]]  # prompt ids with bos, answer ids with eos
TOKENS_PER_BATCH = 3072
PROMPT_LOSS_WEIGHT = 0.1  # a prompt's content is random: only its form can be learnt


@dataclass(frozen=True)
class Batch:
    """Token ids and their loss weights, both (rows, time); the first ``prompt`` columns are the prompts."""

    tokens: Tensor
    weights: Tensor
    prompt: int


def mixed_problems(
    tasks: list[str], split: Split, seed: int, single_step_share: float = 0.0, giver_share: float = 0.0
) -> Iterator[SolvedQuestion]:
    """Yields problems of the tasks for ever, each task as often as the others.

    A `single_step_share` of them are word problems of one step, which no measured task has and users try first. With a
    `giver_share`, that share of gains and losses in word problems is stated only by who gives, which few layers learn
    last.
    """
    streams = [
        word_problems.problems(split, seed, giver_share=giver_share)
        if giver_share and task == WORD_PROBLEMS
        else all_problems(task, split, seed)
        for task in tasks
    ]
    rng = random.Random(f"mix-{split}-{seed}")
    single_steps = word_problems.problems(split, seed, fewest=1, most=1)
    while True:
        is_single = bool(single_step_share) and rng.random() < single_step_share
        yield next(single_steps if is_single else rng.choice(streams))


def train_tokenizer(tasks: list[str], vocab_size: int) -> bytes:
    """Returns a serialized sentencepiece BPE model in which every number with its space is one token."""
    sample = itertools.islice(mixed_problems(tasks, "train", seed=0), 20000)
    texts = (problem.solved for problem in sample)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        # A copied number must always look the same: split digits never learnt to copy in the same time.
        user_defined_symbols=[f"▁{number}" for number in range(MAX_NUMBER + 1)],
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def encode(tokenizer: sentencepiece.SentencePieceProcessor, problem: SolvedQuestion) -> Example:
    """Returns a problem as token ids."""
    prompt = [BOS, *tokenizer.encode(problem.prompt)]
    return prompt, [*tokenizer.encode(problem.solution), EOS]


def make_batch(rows: list[Example], prompt_weight: float = PROMPT_LOSS_WEIGHT) -> Batch:
    """Returns rows of one prompt length as a batch; answers are padded on the right with eos of weight 0."""
    prompt = len(rows[0][0])
    longest = max(len(answer) for _, answer in rows)
    tokens = torch.full((len(rows), prompt + longest), EOS)
    weights = torch.zeros(len(rows), prompt + longest)
    weights[:, 1:prompt] = prompt_weight
    for index, (prompt_ids, answer_ids) in enumerate(rows):
        end = prompt + len(answer_ids)
        tokens[index, :end] = torch.tensor(prompt_ids + answer_ids)
        weights[index, prompt:end] = 1.0
    return Batch(tokens, weights, prompt)


def batches(
    tokenizer: sentencepiece.SentencePieceProcessor,
    tasks: list[str],
    seed: int,
    prompt_weight: float,
    single_step_share: float = 0.0,
    giver_share: float = 0.0,
) -> Iterator[Batch]:
    """Yields batches of about TOKENS_PER_BATCH tokens for ever: equal prompt, similar answer lengths."""
    stream, rng = mixed_problems(tasks, "train", seed, single_step_share, giver_share), random.Random(seed)
    kept: dict[int, list[Example]] = defaultdict(list)
    while True:
        for problem in itertools.islice(stream, 6000):
            prompt, answer = encode(tokenizer, problem)
            kept[len(prompt)].append((prompt, answer))
        ready = []
        for length, rows in kept.items():
            if not rows:
                continue
            rows.sort(key=lambda row: len(row[1]))
            size = max(8, round(TOKENS_PER_BATCH / (length + sum(len(a) for _, a in rows) / len(rows))))
            while len(rows) >= size:
                # A remainder too small for a batch waits for the next pool, so no length starves.
                at = rng.randrange(len(rows) - size + 1) if len(rows) % size else 0
                ready.append(rows[at : at + size])
                del rows[at : at + size]
        rng.shuffle(ready)
        yield from (make_batch(rows, prompt_weight) for rows in ready)


STARTS, START_WEIGHTS = (0.5, 0.6, 0.7, 0.8), (1, 6, 1, 1)
ALPHAS = (0.8, 0.9, 0.95, 0.99, 0.995, 0.999)
ALPHA_WEIGHTS = (2, 4, 2, 2, 1, 1)
# Of the batches whose border is moved into the prompt, most stop just before the answer, as a question without
# "\nAnswer:" does; the others may stop anywhere.
SHORT_TAIL, LONG_TAIL_SHARE = 8, 0.3


def draw_cutoff(rng: random.Random, config: DemoConfig, full_depth_share: float) -> list[int] | None:
    """Returns the depth policy of one batch, as cutoffs; None is full depth."""
    if rng.random() < full_depth_share:
        return None
    (alpha,), (start,) = rng.choices(ALPHAS, ALPHA_WEIGHTS), rng.choices(STARTS, START_WEIGHTS)
    return cutoffs(config.layers, alpha, start)


def draw_tail(rng: random.Random, prompt: int, share: float) -> int:
    """Returns how many of a prompt's last tokens count as generated: in most batches none, seldom nearly all.

    So the model learns to generate the end of a prompt that stops early, at its steps' depths.
    """
    if rng.random() >= share:
        return 0
    return rng.randint(1, prompt - 1) if rng.random() < LONG_TAIL_SHARE else rng.randint(1, min(SHORT_TAIL, prompt - 1))


def batch_loss(model: DemoModel, batch: Batch, cutoff: list[int] | None, tail: int = 0) -> tuple[Tensor, Tensor]:
    """Returns (loss to minimise, mean loss over answer tokens alone) under a depth policy."""
    return token_loss(model, batch, model(batch.tokens[:, :-1], batch.prompt - tail, cutoff))


def exits_loss(model: DemoModel, batch: Batch, exits: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the sum of the losses at full depth and at each exit, and each over answer tokens alone, by name.

    Once D3's window has grown to its end, a token runs the layers below it alone: that is an exit, and one pass at
    full depth trains all of them.
    """
    depths = {"full": model.config.layers} | {f"exit {depth}": depth for depth in exits}
    passes = model.leave_at(batch.tokens[:, :-1], list(depths.values()))
    losses, answer_losses = zip(*(token_loss(model, batch, hidden) for hidden in passes), strict=True)
    return torch.stack(losses).sum(), dict(zip(depths, answer_losses, strict=True))


def token_loss(model: DemoModel, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (weighted mean loss, mean loss over answer tokens) of hidden states (rows, time - 1, width)."""
    keep = batch.weights[:, 1:].flatten() > 0
    weights = batch.weights[:, 1:].flatten()[keep]
    logits = F.linear(hidden.flatten(0, 1)[keep], model.lm_head)
    losses = F.cross_entropy(logits, batch.tokens[:, 1:].flatten()[keep], reduction="none")
    answers = weights == 1
    return (losses * weights).sum() / weights.sum(), losses.detach()[answers].mean()

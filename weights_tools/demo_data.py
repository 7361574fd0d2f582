"""What the demo model learns from: problems, their tokens, and batches of one prompt length.

The one idea: rows of a batch share the length of their prompts, so that the border between prompt and answer, where
depth begins to decay, is one column of the whole batch.
"""

import io
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import sentencepiece
import torch
from torch import Tensor

from d3engine.research.evaluation import word_problems
from d3engine.research.evaluation.procedural import WORD_PROBLEMS, SolvedQuestion, all_problems
from d3engine.research.evaluation.word_problems import MAX_NUMBER, Split
from d3engine.weights_tools.demo_trainer import BOS, EOS

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
    """Yields problems of the tasks for ever, each as often as the others.

    Instead of a share of them come word problems of a single step, which no measured task has: a user asks them first.
    With a `giver_share` the word problems tell so much more of their gains and losses by who gives alone, which is what
    few layers learn last.
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
    """Returns a serialized sentencepiece BPE model in which every number with its space is one piece."""
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
                # A remainder too small for a batch waits for the next pool, so no length is ever starved.
                at = rng.randrange(len(rows) - size + 1) if len(rows) % size else 0
                ready.append(rows[at : at + size])
                del rows[at : at + size]
        rng.shuffle(ready)
        yield from (make_batch(rows, prompt_weight) for rows in ready)

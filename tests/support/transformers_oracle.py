"""transformers as the oracle: greedy tokens with the gap that each was chosen by, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Answer:
    """Greedy tokens; `gaps[i]` is by how much the logit of token i was ahead of the second, `logprobs[i]` its own."""

    token_ids: list[int]
    gaps: list[float]
    logprobs: list[float]

    @classmethod
    def of_logits(cls, logits: Tensor) -> Answer:
        """From float32 logits [tokens, V], each row's argmax being the token taken."""
        best = logits.topk(2, dim=-1)
        chosen = logits.log_softmax(dim=-1).max(dim=-1).values
        return cls(best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist(), chosen.tolist())


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> Answer:
    """`num_tokens` tokens of transformers' own greedy `generate`, whatever end-of-sequence tokens say."""
    _forget_lengths(model)
    model.generation_config = GenerationConfig()  # the model's own may sample, or stop early
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answer = Answer.of_logits(torch.cat(output.logits).float())
    assert output.sequences[0, len(prompt) :].tolist() == answer.token_ids
    return answer


@torch.inference_mode()
def greedy_after(model: LlamaForCausalLM, prompt: list[int], token_ids: list[int]) -> Answer:
    """What transformers would take in place of each token, after the prompt and the tokens before it."""
    # All in one pass. If each is the token that stands there, the tokens are transformers' own greedy answer.
    _forget_lengths(model)
    logits = model(torch.tensor([prompt + token_ids[:-1]]), logits_to_keep=len(token_ids)).logits[0]
    return Answer.of_logits(logits.float())


@torch.inference_mode()
def prompt_logprobs(model: LlamaForCausalLM, prompt: list[int]) -> Tensor:
    """Float32 [tokens, V]: transformers' log-probabilities of what follows each token of the prompt."""
    _forget_lengths(model)
    return model(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)


def assert_same_tokens(token_ids: list[int], answer: Answer, tie: float = 0.0) -> None:
    """Token for token the oracle's; after a first difference at a gap below `tie`, nothing more is compared."""
    assert len(token_ids) == len(answer.token_ids)
    for place, (token, expected) in enumerate(zip(token_ids, answer.token_ids, strict=True)):
        if token != expected:
            gap = answer.gaps[place]
            assert gap < tie, f"token {place} is {token}, not {expected}, which was ahead by {gap:.3g}"
            return


def assert_answers(outputs: Iterable[Any], answers: Iterable[Any], tie: float = 0.0) -> None:
    """Outputs of one sequence each have the tokens, as `assert_same_tokens` says, and the depths of the oracle."""
    for output, answer in zip(outputs, answers, strict=True):
        (completion,) = output.outputs
        assert completion.depths == answer.depths
        assert_same_tokens(completion.token_ids, answer, tie)


def _forget_lengths(model: LlamaForCausalLM) -> None:
    """Dynamic rope keeps the frequencies of the longest sequence it has seen; every answer here is its own."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)

"""What transformers' `generate` may be asked for, as the engine's own parameters.

The one idea: a field of a GenerationConfig is read here, or it must have a value that asks for what happens anyway;
anything else is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d3engine.depth import DepthPolicy
from d3engine.errors import NOTHING, InvalidValueError, require, require_integer
from d3engine.request.params import SamplingParams

DEFAULTS: Mapping[str, Any] = {
    "min_length": 0,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
}
"""Fields that are read, with transformers' values where nobody says anything; those without one are None."""

READ = frozenset(
    {
        *DEFAULTS,
        "max_length",
        "max_new_tokens",
        "min_new_tokens",
        "stop_strings",
        "min_p",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    }
)
"""Fields that are honoured."""

DEFAULT_NEW_TOKENS = 20
"""Where nobody gives a length, as in transformers."""

_ONE = "1, since one token follows another here: there are no beams"
_NO_PENALTY = "left out, since there is no such penalty"
_NO_CACHE = "left out, since the engine keeps what prompts have in common by itself"
_NO_CUT = "left out, since there is no such way to cut a distribution"
_NO_FORCING = "left out, since no token is forced"
_NO_DRAFT = "left out: name a policy that drafts instead, such as depth=SelfSpeculative(D3(0.9, 0.6))"
_TOKENS_ALONE = "left out or False, since the engine returns tokens alone"

SAME: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), _ONE),
    "num_beam_groups": ((1,), _ONE),
    "diversity_penalty": ((0.0,), _ONE),
    "early_stopping": ((False,), _ONE),
    "length_penalty": ((1.0,), _ONE),
    "low_memory": ((False,), _ONE),
    "constraints": ((), _ONE),
    "force_words_ids": ((), _ONE),
    "typical_p": ((1.0,), _NO_CUT),
    "top_h": ((), _NO_CUT),
    "epsilon_cutoff": ((0.0,), _NO_CUT),
    "eta_cutoff": ((0.0,), _NO_CUT),
    "penalty_alpha": ((), _NO_CUT),
    "dola_layers": ((), _NO_CUT),
    "guidance_scale": ((1.0,), _NO_CUT),
    "encoder_repetition_penalty": ((1.0,), _NO_PENALTY),
    "no_repeat_ngram_size": ((0,), _NO_PENALTY),
    "encoder_no_repeat_ngram_size": ((0,), _NO_PENALTY),
    "exponential_decay_length_penalty": ((), _NO_PENALTY),
    "bad_words_ids": ((), "left out: SamplingParams.bad_words keeps words out, by the engine's own generate"),
    "sequence_bias": ((), _NO_PENALTY),
    "suppress_tokens": ((), "left out, since no token is forbidden here"),
    "begin_suppress_tokens": ((), "left out, since no token is forbidden here"),
    "forced_bos_token_id": ((), _NO_FORCING),
    "forced_eos_token_id": ((), _NO_FORCING),
    "decoder_start_token_id": ((), _NO_FORCING),
    "watermarking_config": ((), "left out, since there are no watermarks"),
    "token_healing": ((False,), "False, since a prompt's tokens stay as they are"),
    "max_time": ((), "left out, since an answer is bounded by its length"),
    "output_attentions": ((False,), _TOKENS_ALONE),
    "output_hidden_states": ((False,), _TOKENS_ALONE),
    "output_scores": ((False,), _TOKENS_ALONE),
    "output_logits": ((False,), _TOKENS_ALONE),
    "use_mtp": ((False,), _NO_DRAFT),
    "prompt_lookup_num_tokens": ((), _NO_DRAFT),
    "assistant_early_exit": ((), _NO_DRAFT),
    "speculation_type": ((), _NO_DRAFT),
    "is_assistant": ((False,), _NO_DRAFT),
}
"""Fields that ask for something which is not done here: the values, beside None, that do not, and what is allowed."""

ASK_NOTHING = frozenset(
    {
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "renormalize_logits",
        "remove_invalid_values",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "max_matching_ngram_size",
        "transformers_version",
    }
)
"""Fields by which the same tokens are computed in another way, or that say how to draft if drafts were asked for."""

NEVER: Mapping[str, str] = {
    "logits_processor": "left out, since logits stay inside the engine",
    "stopping_criteria": "left out: stop_strings, eos_token_id and lengths end an answer",
    "prefix_allowed_tokens_fn": "left out: SamplingParams.structured_outputs gives answers a form",
    "assistant_model": _NO_DRAFT,
    "negative_prompt_ids": _NO_CUT,
    "negative_prompt_attention_mask": _NO_CUT,
    "custom_generate": "left out, since no code of a model's directory is ever run",
    "inputs_embeds": "left out, since prompts are token ids",
    "position_ids": "left out, since positions follow from the attention mask",
    "past_key_values": _NO_CACHE,
    "cache": _NO_CACHE,  # as transformers 5.24 calls them
}
"""Arguments of `generate` beside those of a GenerationConfig that must be absent, and what is allowed instead."""


@dataclass(frozen=True)
class Asked:
    """What a call of `generate` asks for, of each row of its batch.

    Attributes:
        params: how to sample; `n` answers to each row.
        eos_token_ids: what ends an answer.
        pad_token_id: what fills up shorter rows; None where nobody says.
        as_dict: whether the answer is a `GenerateDecoderOnlyOutput`.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    as_dict: bool


def read_generation(fields: Mapping[str, Any], width: int, depth: DepthPolicy | None, max_model_len: int) -> Asked:
    """What the fields of a GenerationConfig ask for, None standing for nothing.

    Args:
        fields: those of all who have a say, merged.
        width: tokens of a row of the prompts, padding included, which transformers' lengths count.
        depth: the policy of the call; None: the engine's.
        max_model_len: the engine's.

    Raises:
        InvalidValueError: for what cannot be honoured, by its name.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    _check_known(given)
    found = {**DEFAULTS, **given}
    ends = _ids("eos_token_id", found.get("eos_token_id"))
    samples = bool(found["do_sample"])
    sampling = ("temperature", "top_k", "top_p", "min_p") if samples else ()
    longest = _longest(found, width, max_model_len)
    params = SamplingParams(
        **{name: found[name] for name in sampling if name in found} | ({} if samples else {"temperature": 0.0}),
        n=found["num_return_sequences"],
        max_tokens=longest,
        min_tokens=min(_shortest(found, width), longest),
        repetition_penalty=found["repetition_penalty"],
        stop=found.get("stop_strings"),
        stop_token_ids=ends,
        ignore_eos=True,  # what ends an answer is in stop_token_ids
        detokenize=found.get("stop_strings") is not None,
        depth=depth,
    )
    pads = _ids("pad_token_id", found.get("pad_token_id"))
    pad = next(iter((*pads, *ends)), None)
    return Asked(params, ends, pad, bool(found["return_dict_in_generate"]))


def _check_known(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in SAME:
            values, allowed = SAME[name]
            if not any(value == same for same in values) and value != [] and value != {}:
                raise InvalidValueError(name, value, allowed)
        elif name not in READ and name not in ASK_NOTHING:
            raise InvalidValueError(name, value, "left out, since generate has no such argument here")


def _longest(found: Mapping[str, Any], width: int, max_model_len: int) -> int:
    """New tokens at most."""
    if "max_new_tokens" in found:
        name, longest = "max_new_tokens", require_integer("max_new_tokens", found["max_new_tokens"], 1)
    elif "max_length" in found:
        require_integer("max_length", found["max_length"], width + 1)
        name, longest = "max_length", found["max_length"] - width
    else:
        return max(1, min(DEFAULT_NEW_TOKENS, max_model_len - width))
    most = max_model_len if name == "max_length" else max_model_len - width
    allowed = f"at most {most}, since prompt and answer have room for {max_model_len} tokens (max_model_len)"
    require(width + longest <= max_model_len, name, found[name], allowed)
    return longest


def _shortest(found: Mapping[str, Any], width: int) -> int:
    if "min_new_tokens" in found:
        return require_integer("min_new_tokens", found["min_new_tokens"], 0)
    return max(0, require_integer("min_length", found["min_length"], 0) - width)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """One id, several or none."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if value is None:
        return ()
    return tuple(require_integer(name, one, 0) for one in (value if isinstance(value, list | tuple) else [value]))


def prompts_of(input_ids: Any, attention_mask: Any, pad_token_id: int | None, ends: tuple[int, ...]) -> list[list[int]]:
    """The rows of a batch without the padding on their left.

    Where there is no mask, tokens with the id of padding are padding, unless it also ends answers.
    Raises `InvalidValueError` for a mask that leaves out anything but the beginning of a row.
    """
    is_batch = isinstance(input_ids, Tensor) and input_ids.dim() == 2 and not input_ids.is_floating_point()
    shown = f"a tensor of shape {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else input_ids
    require(is_batch, "input_ids", shown, "a tensor of token ids, of shape [rows, tokens]")
    if attention_mask is None:
        is_pad = pad_token_id is not None and pad_token_id not in ends
        attention_mask = input_ids != pad_token_id if is_pad else torch.ones_like(input_ids)
    mask = torch.as_tensor(attention_mask).to(input_ids.device, torch.bool)
    require(mask.shape == input_ids.shape, "attention_mask", tuple(mask.shape), f"of shape {tuple(input_ids.shape)}")
    lengths = mask.sum(dim=1)
    on_left = mask[:, :1].size(0) == 0 or bool((mask.int().diff(dim=1) >= 0).all())
    require(on_left, "attention_mask", NOTHING, "1 from some token of a row to its end: padding on the left alone")
    return [row[len(row) - length :] for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)]

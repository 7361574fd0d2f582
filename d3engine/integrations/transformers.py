"""An engine in place of a causal language model of transformers, with its `generate`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from d3engine.depth import DepthPolicy
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.errors import NOTHING, InvalidValueError, MissingExtraError, require, require_integer
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import RequestOutputKind, SamplingParams

try:
    from transformers import AutoConfig, GenerationConfig
    from transformers.generation.utils import GenerateDecoderOnlyOutput
    from transformers.utils import GENERATION_CONFIG_NAME
except ImportError as error:
    raise MissingExtraError("transformers", "transformers", "d3engine.integrations.transformers") from error

LARGEST_SEED = 2**62


class D3ForCausalLM:
    """A model of transformers whose tokens come from an engine.

    An object's class has the name of config.json's architecture ("LlamaForCausalLM"), which transformers' pipelines
    read.

    Args:
        model: as for `Engine`, or an open `Engine` (then nothing else is allowed); no GGUF file, whose config
            transformers cannot read.
        engine_arguments: `Engine`'s, such as `depth=D3(alpha, start)`.

    Attributes:
        engine: the engine, which `close()` ends.
        config: transformers' own, of the model's directory.
        generation_config: defaults of a call; may be changed, as in transformers.

    Raises:
        InvalidValueError, ModelFormatError: as `Engine` does.
        MissingExtraError: without transformers.
    """

    main_input_name = "input_ids"
    input_modalities = ("text",)
    output_modalities = ("text",)

    def __init__(self, model: str | os.PathLike[str] | Engine, **engine_arguments: Any) -> None:
        directory = model.directory if isinstance(model, Engine) else model_directory(model)
        require(directory.is_dir(), "model", str(directory), "a directory, since transformers reads its config.json")
        if isinstance(model, Engine):
            require(not engine_arguments, "model", "an Engine", f"a model's name beside {', '.join(engine_arguments)}")
            self.engine = model
        else:
            self.engine = Engine(model, **engine_arguments)
        self.name_or_path = str(directory)
        self.config: Any = AutoConfig.from_pretrained(directory)
        self.generation_config: Any = _generation_config(directory, self.config)
        name = next(iter(self.config.architectures or ()), type(self).__name__)
        self.__class__ = type(name, (type(self),), {"__doc__": type(self).__doc__})

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **engine_arguments: Any) -> Self:
        """The same, under transformers' name for it."""
        return cls(model, **engine_arguments)

    # -- generating ------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        streamer: Any = None,
        depth: DepthPolicy | None = None,
        **arguments: Any,
    ) -> Any:
        """Continue prompts, as transformers' `generate` does.

        Args:
            inputs: token ids [rows, tokens], also as `input_ids`; an `attention_mask` marks padding on a row's left.
                Without any, one output for the beginning-of-text token.
            generation_config: a GenerationConfig; arguments of the same names override it.
            streamer: gets the prompt, then each token; for one row and one output.
            depth: the policy of this call; None: the engine's.
            arguments: as in transformers. `tokenizer` is accepted and ignored: the engine has the model's own.

        Returns:
            int64 [rows * num_return_sequences, tokens], each row its prompt and its output, the token that ended it
            included, then padding; with `return_dict_in_generate` a `GenerateDecoderOnlyOutput` with these as
            `sequences`. Random numbers follow from torch's generator, but differ from transformers'.

        Raises:
            InvalidValueError: for what cannot be honoured, by its name.
        """
        own = _without_config(arguments)
        fields = self._fields(generation_config, {name: arguments[name] for name in arguments if name not in own})
        input_ids = self._input_ids(inputs, own.get("input_ids"), fields)
        request = read_generation(fields, input_ids.shape[1], depth, self.engine.max_model_len)
        prompts = prompts_of(input_ids, own.get("attention_mask"), fields.get("pad_token_id"), request.eos_token_ids)
        if streamer is None:
            params = [replace(request.params, seed=_seed()) for _ in prompts]
            outputs = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        else:
            outputs = [self._stream(prompts, request, input_ids, streamer)]
        sequences = _padded(input_ids, outputs, request)
        return GenerateDecoderOnlyOutput(sequences=sequences) if request.as_dict else sequences

    def _fields(self, given: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a GenerationConfig: the call's arguments over its config over the model's."""
        fields: dict[str, Any] = {}
        for config in (self.generation_config, given):
            if config is not None:
                is_config = isinstance(config, GenerationConfig)
                require(is_config, "generation_config", config, "a GenerationConfig of transformers'")
                named = config.to_dict().items()
                fields |= {name: value for name, value in named if value is not None and name[0] != "_"}
        if "max_length" in arguments and "max_new_tokens" not in arguments:
            fields.pop("max_new_tokens", None)  # the config's, which the call overrides
        return {**fields, **arguments}

    def _input_ids(self, inputs: Tensor | None, named: Tensor | None, fields: Mapping[str, Any]) -> Tensor:
        require(inputs is None or named is None, "input_ids", NOTHING, "left out where inputs are given")
        given = named if inputs is None else inputs
        if given is not None:
            return given
        first = fields.get("bos_token_id")
        require(first is not None, "inputs", None, "given, since the model has no beginning-of-text token")
        return torch.tensor([[first]], device=self.device)

    def _stream(
        self, prompts: Sequence[list[int]], request: GenerationRequest, input_ids: Tensor, streamer: Any
    ) -> RequestOutput:
        is_one = len(prompts) == 1 and request.params.n == 1
        require(
            is_one, "streamer", f"{len(prompts)} rows, {request.params.n} answers each", "for one row and one answer"
        )
        streamer.put(input_ids.cpu())
        params = replace(request.params, seed=_seed(), output_kind=RequestOutputKind.CUMULATIVE)
        shown, output = 0, None
        for output in self.engine.stream({"prompt_token_ids": prompts[0]}, params):
            for token in output.outputs[0].token_ids[shown:]:
                streamer.put(torch.tensor([token]))
            shown = len(output.outputs[0].token_ids)
        streamer.end()
        assert output is not None  # every request has a last output
        return output

    # -- the interface of a model ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The engine's device, on which returned tensors are."""
        return self.engine.device

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """As transformers expects of a model that must not be moved."""
        return {"": self.device}

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.dtype

    @property
    def training(self) -> bool:
        return False

    def can_generate(self) -> bool:
        return True

    def eval(self) -> Self:
        return self

    def train(self, mode: bool = True) -> Self:
        """Itself, for `train(False)`; raises `InvalidValueError` otherwise."""
        require(not mode, "mode", mode, "False, since an engine does not train")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Itself, for `requires_grad_(False)`; raises `InvalidValueError` otherwise."""
        require(not requires_grad, "requires_grad", requires_grad, "False, since an engine does not train")
        return self

    def to(self, *targets: Any, **named: Any) -> Self:
        """Itself, if already on that device and of that dtype; raises `InvalidValueError` otherwise."""
        for target in (*targets, *named.values()):
            if isinstance(target, torch.dtype):
                require(target == self.dtype, "dtype", target, f"{self.dtype}, which Engine(dtype=...) chose")
            elif target is not None:
                wanted, allowed = torch.device(target), f"{self.device}, which Engine(device=...) chose"
                is_here = wanted.type == self.device.type and wanted.index in (None, self.device.index or 0)
                require(is_here, "device", str(target), allowed)
        return self

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Raises `InvalidValueError`: an engine returns tokens, not logits."""
        raise InvalidValueError("forward", NOTHING, "left to transformers' own model, since an engine gives no logits")

    __call__ = forward

    def close(self) -> None:
        """End the engine; calling it again does nothing."""
        self.engine.close()


def _generation_config(directory: Path, config: Any) -> Any:
    if (directory / GENERATION_CONFIG_NAME).is_file():
        return GenerationConfig.from_pretrained(directory)
    return GenerationConfig.from_model_config(config)


def _without_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are no field of a GenerationConfig; raises `InvalidValueError` for those that must be absent.

    Empty lists, and a switch that is off, count as absent.
    """
    names = {"input_ids", "attention_mask", "tokenizer", "token_type_ids", "synced_gpus", "trust_remote_code", *REFUSED}
    own = {name: value for name, value in arguments.items() if name in names}
    for name, allowed in REFUSED.items():
        value = own.get(name)
        if value is not None and not (isinstance(value, list) and not value):
            raise InvalidValueError(name, NOTHING, allowed)
    for name in ("synced_gpus", "trust_remote_code"):
        require(not own.get(name), name, own.get(name), "False, since the engine runs on one device its own code alone")
    kinds = own.get("token_type_ids")
    is_one_kind = kinds is None or not torch.as_tensor(kinds).any()
    require(is_one_kind, "token_type_ids", NOTHING, "0, since the model knows one kind of tokens")
    return own


def _seed() -> int:
    """From torch's generator, so that `torch.manual_seed` makes a call repeatable."""
    return int(torch.randint(LARGEST_SEED, ()))


def _padded(input_ids: Tensor, outputs: Sequence[RequestOutput], request: GenerationRequest) -> Tensor:
    """Each prompt, followed by its output, padded to one length."""
    answers = [answer.token_ids for output in outputs for answer in output.outputs]
    longest = max(map(len, answers), default=0)
    allowed = "a token's id, since the answers are of different lengths"
    is_padded = request.pad_token_id is not None or all(len(answer) == longest for answer in answers)
    require(is_padded, "pad_token_id", None, allowed)
    rows = [answer + [request.pad_token_id or 0] * (longest - len(answer)) for answer in answers]
    prompts = input_ids.repeat_interleave(request.params.n, dim=0)
    return torch.cat([prompts, torch.tensor(rows, dtype=prompts.dtype, device=prompts.device)], dim=1)


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
"""Fields that are read, with transformers' defaults other than None."""

READ_FIELDS = frozenset(
    {
        *DEFAULTS,
        *("max_length", "max_new_tokens", "min_new_tokens", "stop_strings", "min_p"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    }
)
"""Fields that are read."""

DEFAULT_NEW_TOKENS = 20
"""Default length, as in transformers."""

_ONE = "1, since one token follows another here: there are no beams"
_NO_PENALTY = "left out, since there is no such penalty"
_NO_CACHE = "left out, since the engine keeps what prompts have in common by itself"
_NO_CUT = "left out, since there is no such way to cut a distribution"
_NO_FORCING = "left out, since no token is forced"
_NO_DRAFT = "left out: name a policy that drafts instead, such as depth=SelfSpeculative(D3(0.9, 0.6))"
_TOKENS_ALONE = "left out or False, since the engine returns tokens alone"

UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), ((1,), _ONE)),
    **dict.fromkeys(("early_stopping", "low_memory"), ((False,), _ONE)),
    **dict.fromkeys(("constraints", "force_words_ids"), ((), _ONE)),
    "diversity_penalty": ((0.0,), _ONE),
    "length_penalty": ((1.0,), _ONE),
    **dict.fromkeys(("typical_p", "guidance_scale"), ((1.0,), _NO_CUT)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), ((0.0,), _NO_CUT)),
    **dict.fromkeys(("top_h", "penalty_alpha", "dola_layers"), ((), _NO_CUT)),
    "encoder_repetition_penalty": ((1.0,), _NO_PENALTY),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), ((0,), _NO_PENALTY)),
    **dict.fromkeys(("exponential_decay_length_penalty", "sequence_bias"), ((), _NO_PENALTY)),
    "bad_words_ids": ((), "left out: SamplingParams.bad_words keeps words out, by the engine's own generate"),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ((), "left out, since no token is forbidden here")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id"), ((), _NO_FORCING)),
    "watermarking_config": ((), "left out, since there are no watermarks"),
    "token_healing": ((False,), "False, since a prompt's tokens stay as they are"),
    "max_time": ((), "left out, since an answer is bounded by its length"),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits"), ((False,), _TOKENS_ALONE)
    ),
    **dict.fromkeys(("use_mtp", "is_assistant"), ((False,), _NO_DRAFT)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type"), ((), _NO_DRAFT)),
}
"""Fields that are not supported: the values without effect, besides None, and what is allowed."""

IGNORED = frozenset(
    {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "transformers_version"),
        *("renormalize_logits", "remove_invalid_values", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_ensemble_weight", "max_matching_ngram_size"),
    }
)
"""Fields without effect on tokens: other ways to compute the same, and options of drafts."""

REFUSED: Mapping[str, str] = {
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
"""Arguments of `generate`, besides those of a GenerationConfig, that must be absent, and what is allowed instead."""


@dataclass(frozen=True)
class GenerationRequest:
    """The parameters of a call of `generate`, for each row of its batch.

    Attributes:
        params: sampling parameters; `n` outputs of each row.
        eos_token_ids: ids that end an output.
        pad_token_id: padding of shorter rows; None if not given.
        as_dict: whether the result is a `GenerateDecoderOnlyOutput`.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    as_dict: bool


def read_generation(
    fields: Mapping[str, Any], width: int, depth: DepthPolicy | None, max_model_len: int
) -> GenerationRequest:
    """The request of a GenerationConfig's fields, where None counts as absent.

    Args:
        fields: those of the call and of all configs, merged.
        width: tokens of a row of the prompts, padding included, which transformers' lengths count.
        depth: the policy of the call; None: the engine's.
        max_model_len: the engine's.

    Raises:
        InvalidValueError: for a field that is not supported, by its name.
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
    return GenerationRequest(params, ends, pad, bool(found["return_dict_in_generate"]))


def _check_known(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in UNSUPPORTED:
            values, allowed = UNSUPPORTED[name]
            if not any(value == same for same in values) and value != [] and value != {}:
                raise InvalidValueError(name, value, allowed)
        elif name not in READ_FIELDS and name not in IGNORED:
            raise InvalidValueError(name, value, "left out, since generate has no such argument here")


def _longest(found: Mapping[str, Any], width: int, max_model_len: int) -> int:
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

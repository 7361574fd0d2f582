"""`LLM`: the engine with vLLM's arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from d3engine.engine.engine import Engine
from d3engine.engine.engine_config import RENAMED, EngineConfig
from d3engine.engine.hub import at_revision
from d3engine.engine.new_requests import Same, refuse, refuse_others
from d3engine.errors import InvalidValueError, require
from d3engine.request.params import pooling_params as params_of_pooling
from d3engine.request.pooling import embedding_of
from d3engine.request.scoring import ANSWERS, TEMPLATE_VARIABLES, answer_params, judgement, score_of
from d3engine.text.prompts import Prompt, as_list
from d3engine.utils.arguments import with_new_names

ONE_DEVICE = "1, since tensor_parallel_size alone spreads a model over devices"
ONE_REVISION = "None, since the tokenizer is of the model's own revision"
BY_ENVIRONMENT = "None, since HF_HOME and HF_TOKEN say that to huggingface_hub, which fetches what is not there yet"
BY_DIRECTORY = "None, since the model's directory says how its weights are stored"

SAME: Same = {
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "trust_remote_code": ((False,), "False, since no code of a model's directory is ever run"),
    "tokenizer_mode": (("auto",), "'auto', since the tokenizer's own files decide"),
    "load_format": (("auto", "safetensors"), "'auto' or 'safetensors', since nothing else is read"),
    "quantization": ((None,), BY_DIRECTORY),
    "tokenizer_revision": ((None,), ONE_REVISION),
    "download_dir": ((None,), BY_ENVIRONMENT),
    "hf_token": ((None,), BY_ENVIRONMENT),
    "hf_overrides": ((None, {}), "None, since config.json is taken as it is"),
    "generation_config": (("auto",), "'auto', since the model's directory has it"),
    "cpu_offload_gb": ((0,), "0, since weights stay where they are computed with"),
    "swap_space": ((0,), "0, since preempted requests are computed again"),
    "enable_chunked_prefill": ((None, True), "True, since long prompts are always computed in pieces"),
    "enable_lora": ((False, True), "True or False: adapters are loaded when they are named"),
    "scheduling_policy": (("fcfs", "priority"), "'fcfs' or 'priority', which are one here"),
    "logprobs_mode": (("raw_logprobs",), "'raw_logprobs', since log-probabilities are of the raw distribution"),
    "disable_log_stats": ((True,), "True, since stats() tells instead"),
    "runner": (("auto", "generate", "pooling"), "'auto', 'generate' or 'pooling'"),
    "convert": (("auto", "none", "embed"), "'auto', 'none' or 'embed'"),
    "task": (("auto", "generate", "embed"), "'auto', 'generate' or 'embed'"),
}
"""Arguments of vLLM's without a counterpart: the values without effect, and what is allowed."""

VLLMS_POOLING = "last"
"""Of models whose files do not say how they are pooled."""

DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""


class LLM(Engine):
    """`Engine` for code written for vLLM: the same methods, and vLLM's names of arguments.

    Args:
        model: as for `Engine`.
        revision: a branch, a tag or a commit of a model of the Hugging Face hub, as in "owner/name@revision".
        arguments: `Engine`'s, and of vLLM's others those in `SAME`, with the values listed there.

    Raises:
        InvalidValueError: for an argument that is not allowed, and for one of vLLM's that has no counterpart, by name.
    """

    def __init__(self, model: str | os.PathLike[str], *, revision: str | None = None, **arguments: Any) -> None:
        name = model if revision is None else at_revision(model, revision)
        super().__init__(name, **_engine_arguments(arguments))

    def embed(  # type: ignore[override]  # vLLM's outputs, not an array
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: None = None,
        use_tqdm: bool = True,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        **of_vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return one embedding for each prompt, as vLLM does: of length 1, by the last token unless the model's files
        or `pooling` say otherwise.

        `pooling`, `normalize` and `dimensions` are `Engine.embed`'s, in place of `pooling_params`.
        """
        refuse_others(of_vllm, "embed")
        allowed = "None: dimensions= and normalize= are arguments of embed"
        require(pooling_params is None, "pooling_params", pooling_params, allowed)
        params = params_of_pooling(pooling or self.own_pooling or VLLMS_POOLING)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(embedding_of(output, normalize=normalize, dimensions=dimensions).tolist()),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in self.generate(as_list(prompts), params, use_tqdm=use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        **of_vllm: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_2` answers that of `data_1`, which is one for all or one for each.

        The score is the probability of "yes" against "no" as the next token of Qwen3-Reranker's question, which the
        model's chat template writes.
        """
        refuse_others(of_vllm, "score")
        queries, documents = as_texts("data_1", data_1), as_texts("data_2", data_2)
        queries = queries * len(documents) if len(queries) == 1 else queries
        require(len(queries) == len(documents), "data_1", f"{len(queries)} texts", "one text, or as many as data_2 has")
        tokens = [self.get_tokenizer().encode(answer, add_special_tokens=False) for answer in ANSWERS]
        params = [answer_params(ids, answer) for ids, answer in zip(tokens, ANSWERS, strict=True)]
        prompts = [
            self.chat_prompt(judgement(*pair, instruction), chat_template_kwargs=TEMPLATE_VARIABLES)
            for pair in zip(queries, documents, strict=True)
        ]
        yes, no = [self.generate(prompts, one, use_tqdm=use_tqdm) for one in params]
        return [
            ScoringRequestOutput(one.request_id, ScoringOutput(score_of(one, other)), one.prompt_token_ids)
            for one, other in zip(yes, no, strict=True)
        ]


def as_texts(field: str, given: str | Sequence[str]) -> list[str]:
    """A text or several as a list; raises `InvalidValueError` for anything else."""
    found = [given] if isinstance(given, str) else list(given)
    require(bool(found) and all(isinstance(one, str) for one in found), field, given, "a text, or a list of texts")
    return found


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """vLLM's: one score."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """vLLM's: the score of one pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """vLLM's: one embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """vLLM's: the embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def _engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    own = {one.name for one in fields(EngineConfig)}
    taken = {}
    for name, value in with_new_names(arguments, RENAMED).items():
        if name in own:
            taken[name] = value
        elif name in SAME:
            refuse(name, value, SAME)
        else:
            raise InvalidValueError(name, value, "left out, since LLM has no such argument")
    if taken.get("seed", 0) is None:  # vLLM's default, by which it takes 0
        taken["seed"] = 0
    for name in ("dtype", "weight_dtype"):
        if isinstance(taken.get(name), str):
            taken[name] = DTYPES.get(taken[name], taken[name])
    return taken

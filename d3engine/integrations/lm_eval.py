"""The engine as the model `d3engine` of lm-evaluation-harness; importing it registers it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from d3engine.depth import DepthPolicy, FullDepth, policy_from_name
from d3engine.engine.engine import Engine
from d3engine.engine.engine_config import EngineConfig
from d3engine.errors import D3EngineError, InvalidValueError, MissingExtraError, integer_in, require, require_integer
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import FROM_FILE, SamplingParams
from d3engine.research.evaluation.work import Work, is_known_beforehand, work_of
from d3engine.text.chat_template import load_chat_template
from d3engine.text.tokenizer import Tokenizer
from d3engine.utils.arguments import panels_of

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise MissingExtraError("lm-eval", "eval") from error

DEFAULT_MAX_GEN_TOKS = 256
"""Limit of an answer whose task has none, as in the harness's own backends."""

_log = logging.getLogger(__name__)


NO_WORK = Work()


@dataclass
class Usage:
    """The cost of a task's answers so far, and the nominal one of the schedule; zeros where tokens decide the depth."""

    answers: int = 0
    work: Work = NO_WORK
    unfinished: int = 0
    nominal_tokens: int = 0
    nominal_layers: float = 0

    def add(self, work: Work, finish_reason: str | None, nominal_tokens: int, nominal_layers: float) -> None:
        """Count one answer; the nominal figures are those of the longest allowed answer, 0 if not known beforehand."""
        self.answers += 1
        self.work += work
        self.unfinished += finish_reason == "length"
        self.nominal_tokens += nominal_tokens
        self.nominal_layers += nominal_layers

    @property
    def nominal_mean_layers(self) -> float | None:
        """Over the longest allowed answers; None where the schedule is not known beforehand."""
        return self.nominal_layers / self.nominal_tokens if self.nominal_tokens else None


@register_model("d3engine")  # type: ignore[untyped-decorator, unused-ignore]
class D3EngineLM(TemplateLM):  # type: ignore[misc, unused-ignore]
    """A Llama in d3engine as a model of lm-evaluation-harness.

    Args:
        pretrained: a model as for `Engine`, or an open `Engine` (then no engine option is allowed).
        depth: a `DepthPolicy`, "auto" (the model's d3.json), or a policy's name, with its options as further arguments:
            `depth=d3,alpha=A,start=S`.
        max_length: limit of context and answer in tokens; longer contexts lose their beginning, as in the harness's HF
            backend. None: one less than the engine's max_model_len.
        max_gen_toks: limit of an answer whose task has none, or a function of the task's name.
        add_bos_token: False encodes without the tokenizer's special tokens; None and True with them.
        prefix_token_id: token of an empty context. None: BOS, else EOS.
        batch_size: limit of running sequences; "auto" is the engine's default. Requests join and leave the batch
            individually.
        device, dtype, max_model_len, ...: arguments of `Engine`.

    Log-likelihoods are at full depth with any policy, as they generate no tokens: they are a prompt's
    log-probabilities, whose last token is the only one allowed to follow. Raises `InvalidValueError` for arguments
    that neither the engine nor the policy takes.
    """

    def __init__(
        self,
        pretrained: str | Engine,
        *,
        depth: DepthPolicy | str = "auto",
        max_length: int | None = None,
        max_gen_toks: int | Callable[[str], int] = DEFAULT_MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require(max_batch_size is None, "max_batch_size", max_batch_size, "None, as the engine fills its batch itself")
        engine_options = {name: options.pop(name) for name in ENGINE_OPTIONS if options.get(name) is not None}
        if batch_size not in (None, "auto"):
            require("max_num_seqs" not in engine_options, "batch_size", batch_size, "None beside max_num_seqs")
            engine_options["max_num_seqs"] = _batch_limit(batch_size)
        policy = _policy(depth, {name: value for name, value in options.items() if value is not None})
        if isinstance(pretrained, Engine):
            given = ", ".join(engine_options)
            require(not given, "pretrained", "an Engine", f"a model directory where {given} is given")
            self.engine = pretrained
        else:
            self.engine = Engine(pretrained, depth=policy, **engine_options)
        self.policy = policy if isinstance(policy, DepthPolicy) else self.engine.depth
        self.schedule = self.policy.schedule(self.engine.config.num_layers)
        require(self.engine.tokenizer is not None, "pretrained", pretrained, "an engine with a tokenizer")
        assert self.engine.tokenizer is not None
        self._tokenizer: Tokenizer = self.engine.tokenizer
        longest = self.engine.max_model_len - 1
        self.max_length = longest if max_length is None else require_integer("max_length", max_length, 2, longest)
        self.max_gen_toks = max_gen_toks if callable(max_gen_toks) else require_integer("max_gen_toks", max_gen_toks, 1)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self.usage: dict[str, Usage] = {}
        """Task -> cost of its generated answers."""

    def total_usage(self) -> Usage:
        total = Usage()
        for usage in self.usage.values():
            for name, value in vars(usage).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    # -- the harness's interface of a tokenizer -----------------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's EOS; None where it has none."""
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text without context."""
        for token in (self._prefix_token_id, self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return token
        raise InvalidValueError("prefix_token_id", None, "a token id, since the tokenizer has neither BOS nor EOS")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; BOS is not added to a text that begins with it, unless the caller decides."""
        if add_special_tokens is None:
            bos = self._tokenizer.special_tokens.get("bos_token")
            begins_with_bos = bos is not None and string.startswith(bos)
            add_special_tokens = not begins_with_bos and self._add_bos_token is not False
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; without a generation prompt it ends within the last message."""
        template = load_chat_template(self.engine.directory)
        require(template is not None, "apply_chat_template", True, "False for a model without a chat template")
        assert template is not None
        return template.render(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, a key of the harness's caches; None when none is applied."""
        template = load_chat_template(self.engine.directory) if chat_template else None
        return None if template is None else template.source

    @property
    def tokenizer_name(self) -> str:
        """A key of the harness's caches."""
        return str(self.engine.directory).replace("/", "__")

    # -- requests ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to its first stop; too long contexts lose their beginning."""
        prompts, params = [], []
        for request in requests:
            context, gen_kwargs = request.args
            options = self._sampling_params(gen_kwargs, str(getattr(request, "task_name", None) or ""))
            assert options.max_tokens is not None  # the harness has a default
            room = self.max_length - options.max_tokens
            require(room > 0, "max_gen_toks", options.max_tokens, f"less than max_length={self.max_length}")
            prompts.append(self.tok_encode(context)[-room:])
            params.append(options)
        texts = [""] * len(requests)
        is_known = is_known_beforehand(self.policy, self.engine.config.num_layers)
        saved = self.engine.bridges.students_save  # a narrower layer counts as the part of a layer that it is
        for place, output in self._run(prompts, params, "generate_until", disable_tqdm):
            answer, request = output.outputs[0], requests[place]
            texts[place] = answer.text
            usage = self.usage.setdefault(str(getattr(request, "task_name", None) or ""), Usage())
            work = work_of(output, self.policy, self.engine.config.num_layers)
            work = replace(work, narrower=saved(self.policy, work.tokens))
            most = (params[place].max_tokens or 0) if is_known else 0
            nominal = int(self.schedule.depths(most).sum()) - saved(self.policy, most)
            usage.add(work, answer.finish_reason, most, nominal)
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
        return texts

    def _sampling_params(self, gen_kwargs: Mapping[str, Any], task: str) -> SamplingParams:
        most = self.max_gen_toks(task) if callable(self.max_gen_toks) else self.max_gen_toks
        given = dict(normalize_gen_kwargs(dict(gen_kwargs), most))
        until, max_tokens, samples = given.pop("until"), given.pop("max_gen_toks"), given.pop("do_sample")
        for name, value in given.items():
            require(name in FROM_FILE, name, value, f"an option of {', '.join(FROM_FILE)}")
        sampling = given if samples else {"temperature": 0.0}
        stop = [text for text in until if text]
        return SamplingParams(stop=stop or None, max_tokens=max_tokens, depth=self.policy, **sampling)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sum of the log-probabilities of each continuation, and whether it is the greedy one.

        Only the last `max_length + 1` tokens count, so that the model gets `max_length`, as in the HF backend.
        """
        if requests and not isinstance(self.policy, FullDepth):
            _log.warning("log-likelihoods are at full depth: a depth policy is about generated tokens")
        prompts, params = [], []
        for _, context, continuation in requests:
            allowed = f"of 1 to max_length={self.max_length} tokens"
            require(0 < len(continuation) <= self.max_length, "continuation", f"{len(continuation)} tokens", allowed)
            *prompt, last = (context + continuation)[-(self.max_length + 1) :]
            prompts.append(prompt)
            params.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=1,
                    logprobs=0,
                    prompt_logprobs=0,
                    allowed_token_ids=[last],
                    ignore_eos=True,
                    depth=FullDepth(),
                )
            )
        found = [(0.0, False)] * len(requests)
        for place, output in self._run(prompts, params, "loglikelihood", disable_tqdm):
            key, _, continuation = requests[place]
            found[place] = _continuation_logprob(output, continuation)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, found[place])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in windows of `max_length` that overlap by one token."""
        windows, owners = [], []
        for place, request in enumerate(requests):
            (text,) = request.args
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(place)
        totals = [0.0] * len(requests)
        for place, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[place] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], what: str, disable_tqdm: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Each request's place and last output as it finishes; few wait in the engine at a time."""
        engine = self.engine
        require(not engine.has_unfinished_requests(), "pretrained", "a busy one", "an engine that answers nobody else")
        waiting = deque(sorted(range(len(prompts)), key=lambda place: -len(prompts[place])))
        places: dict[str, int] = {}
        most = 4 * engine.scheduler.config.max_num_seqs
        try:
            with tqdm(total=len(prompts), desc=f"Running {what} requests", disable=disable_tqdm) as bar:
                while waiting or places:
                    while waiting and len(places) < most:
                        place = waiting.popleft()
                        request_id = f"lm-eval-{what}-{place}"
                        engine.add_request(request_id, prompts[place], params[place])
                        places[request_id] = place
                    for output in engine.step():
                        if output.finished and output.request_id in places:
                            _raise_fault(output)
                            bar.update()
                            yield places.pop(output.request_id), output
        finally:
            if places:
                engine.abort_request(list(places))
                engine.step()  # consumes their last outputs


ENGINE_OPTIONS = (*panels_of(EngineConfig), "tokenizer", "num_threads", "enforce_eager", "num_scheduler_steps")
"""Arguments that are passed to `Engine`."""


def _policy(depth: DepthPolicy | str, options: dict[str, Any]) -> DepthPolicy | str:
    """The policy of `depth` and its options; "auto" stays for the engine to resolve."""
    if isinstance(depth, DepthPolicy) or depth == "auto":
        allowed = f"an option of Engine ({', '.join(ENGINE_OPTIONS)}), or of a depth given by name"
        for name, value in options.items():
            raise InvalidValueError(name, value, allowed)
        return depth
    return policy_from_name(depth, **options)


def _batch_limit(batch_size: int | str | None) -> int:
    number = integer_in(batch_size) if isinstance(batch_size, str) else batch_size
    return require_integer("batch_size", batch_size if number is None else number, 1)


def _raise_fault(output: RequestOutput) -> None:
    answer = output.outputs[0]
    if answer.finish_reason == "abort":
        raise D3EngineError(f"{output.request_id} ended with a fault: {answer.stop_reason}")


def _continuation_logprob(output: RequestOutput, continuation: list[int]) -> tuple[float, bool]:
    """Sum over the continuation: its last token is the generated one, the others are the prompt's last."""
    answer = output.outputs[0]
    assert output.prompt_logprobs is not None
    assert answer.logprobs is not None
    rows = [*output.prompt_logprobs[len(output.prompt_token_ids) - len(continuation) + 1 :], answer.logprobs[0]]
    chosen = [row[token] for row, token in zip(rows, continuation, strict=True) if row is not None]
    return sum(entry.logprob for entry in chosen), all(entry.rank == 1 for entry in chosen)

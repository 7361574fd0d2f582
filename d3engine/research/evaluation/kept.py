"""A file of JSON lines that keeps greedy answers, which follow from weights, prompt,
policy and sampling alone: a run that was ended goes on."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from d3engine.depth.labels import policy_in_words
from d3engine.depth.policy import BRIDGES, named_bridges, named_students
from d3engine.errors import D3EngineError
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.work import Work
from d3engine.utils.files import DATA_BYTES, append_lines, as_json, as_text, is_there, read_bytes

Prompt: TypeAlias = str | dict[str, list[int]]
"""A text, or `{"prompt_token_ids": [...]}`, as `Engine.chat_prompt` gives it."""


BEGINS = b'{"key": "'
"""The beginning of every line."""


@dataclass(frozen=True)
class Answer:
    """What one prompt was answered with, and at what cost; `seconds` is its part of the wall clock of its batch.

    Of the `prompt_tokens` `cached_tokens` came from the prefix cache.
    """

    text: str
    work: Work
    cut_off: bool
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class KeptAnswers:
    """The answers in a file, which grows by those that are kept; `about` names the weights and dtypes they come from.

    `bridges` has the hash of each file of bridges that policies name: another file of that name has other answers.
    `made_of` says what those were made of that each run makes anew, under another name. An answer that `max_model_len`
    would end elsewhere is not found.

    Raises `UnreadableFileError` for a file that cannot be read and `D3EngineError` for one that holds anything else. A
    last line that was not written to its end is dropped.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, str],
        bridges: Mapping[str, str] | None = None,
        made_of: Mapping[str, str] | None = None,
        max_model_len: int = sys.maxsize,
    ) -> None:
        self._path = path
        self._about = dict(about)
        self._bridges = dict(bridges or {})
        self._made_of = dict(made_of or {})
        self._max_model_len = max_model_len
        self._answers: dict[str, Answer] = {}
        content = read_bytes(path, DATA_BYTES) if is_there(path) else b""
        whole = content[: content.rfind(b"\n") + 1]
        torn = content[len(whole) :]
        if not (torn.startswith(BEGINS) or BEGINS.startswith(torn)):  # no other file's last line is written over
            raise D3EngineError(f"{path} is no file of d3engine eval: its last line is none of an answer's")
        for number, line in enumerate(as_text(whole, path).splitlines(), start=1):
            try:
                fields = as_json(line, path)
                key = str(fields.pop("key"))
                del fields["policy"]
                self._answers[key] = Answer(**fields | {"work": Work(**fields["work"])})
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise D3EngineError(f"{path}, line {number}, is no answer of d3engine eval: {error!r}") from error

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, prompt: Prompt, params: SamplingParams) -> Answer | None:
        """The answer to a prompt under the policy and the sampling of `params`, if it is there."""
        answer = self._answers.get(self._key(prompt, params))
        if answer is None:
            return None
        assert params.max_tokens is not None
        room = min(params.max_tokens, self._max_model_len - answer.prompt_tokens)
        ends_alike = answer.work.tokens == room if answer.cut_off else answer.work.tokens <= room
        return answer if ends_alike else None

    def keep(self, prompts: Sequence[Prompt], params: SamplingParams, answers: Sequence[Answer]) -> None:
        """Write answers to the end of the file at once; raises `D3EngineError` where that cannot be done."""
        assert params.depth is not None
        policy, lines = policy_in_words(params.depth), []
        for prompt, answer in zip(prompts, answers, strict=True):
            key = self._key(prompt, params)
            self._answers[key] = answer
            lines.append(json.dumps({"key": key, "policy": policy, **asdict(answer)}))
        append_lines(self._path, lines)

    def _key(self, prompt: Prompt, params: SamplingParams) -> str:
        policy = params.depth
        assert policy is not None
        names = [*sorted(named_bridges(policy)), *(f"student {name}" for name in sorted(named_students(policy)))]
        hashes = [self._bridges[name] for name in names if name not in self._made_of]
        described = policy.describe()
        if (name := described.get(BRIDGES)) in self._made_of:
            described[BRIDGES] = self._made_of[name]
        said = [self._about, described, repr(replace(params, depth=None)), prompt, *hashes]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

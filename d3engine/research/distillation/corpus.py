"""A model's own greedy answers at full depth, in a file that grows: what students are trained and judged on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from d3engine.depth import DepthPolicy, FullDepth
from d3engine.errors import D3EngineError, FailedError, InvalidValueError, require
from d3engine.research.distillation.prompts import HELD_OUT_EVERY, KINDS, is_held_out, written_prompts
from d3engine.research.evaluation.kept import Prompt
from d3engine.utils.files import append_lines, as_json, is_there, read_text

if TYPE_CHECKING:
    from d3engine.engine.engine import Engine
    from d3engine.request.outputs import RequestOutput

CHAT, GSM8K, OWN = "chat", "gsm8k", "own"
ALL_KINDS = (*KINDS, CHAT, GSM8K)

CORPUS_BYTES = 4 * 2**30


@dataclass(frozen=True)
class OwnAnswer:
    """One prompt as token ids, the model's greedy answer to it, and whether it is held out from training."""

    kind: str
    held_out: bool
    key: str
    prompt_ids: list[int]
    token_ids: list[int]

    @property
    def positions(self) -> int:
        """Generated tokens that are fed: those that a student's weights run for."""
        return len(self.token_ids) - 1


def read_corpus(path: Path, fingerprint: str) -> list[OwnAnswer]:
    """The answers of a file; those of other weights are refused. A last line that was cut off is dropped.

    Raises `D3EngineError` for a file that holds anything else.
    """
    lines = _whole_lines(path)
    try:
        head = as_json(lines[0], path) if lines else {}
        is_ours = head["fingerprint"] == fingerprint
        found = [OwnAnswer(**as_json(line, path)) for line in lines[1:]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise D3EngineError(f"{path} is no file of d3engine depth answers: {error!r}") from error
    require(is_ours, "--answers", str(path), "written for these weights, not for others (d3engine depth answers)")
    return [one for one in found if one.positions >= 1]


def _whole_lines(path: Path) -> list[str]:
    """Those of a file, without a last one that was cut off."""
    content = read_text(path, CORPUS_BYTES)
    return content[: content.rfind("\n") + 1].splitlines()


def read_parts(path: Path, fingerprint: str) -> tuple[list[OwnAnswer], list[OwnAnswer]]:
    """What `read_corpus` finds to train on, and what is held out; refuses a file without either."""
    found = read_corpus(path, fingerprint)
    own, held_out = ([one for one in found if one.held_out is part] for part in (False, True))
    for part, kept in (("to train on", own), ("held out", held_out)):
        require(len(kept) > 0, "--answers", str(path), f"a file with answers {part}")
    return own, held_out


def in_turns(answers: Sequence[OwnAnswer]) -> list[OwnAnswer]:
    """One of each kind after the other, so that the first ones have as many of each."""
    by_kind: dict[str, list[OwnAnswer]] = {}
    for one in answers:
        by_kind.setdefault(one.kind, []).append(one)
    return [one for turn in zip_longest(*(by_kind[kind] for kind in sorted(by_kind))) for one in turn if one]


def prompts_of_kinds(
    engine: Engine, kinds: Sequence[str], count: int, seed: int, data: Path | None, *, held_out: bool
) -> list[tuple[str, str]]:
    """(kind, prompt): `count` prompts in all, as many of each kind, of one part."""
    each = -(-count // len(kinds))
    found: list[tuple[str, str]] = []
    for kind in kinds:
        if kind in (CHAT, GSM8K):
            from d3engine.research.bridges.own_answers import made_up_prompts

            most = (16 if held_out else 2) * each
            every = made_up_prompts(engine, most, seed) if kind == CHAT else _gsm8k(data)
            own = [prompt for prompt in every if is_held_out(prompt) is held_out]
        else:
            own = written_prompts(kind, each, seed, held_out=held_out)
        found += [(kind, prompt) for prompt in own[:each]]
    return found


def prompts_of_file(path: Path, held_out: int, others: int) -> list[list[tuple[str, str]]]:
    """(kind, prompt): that many prompts at most that are held out, and that many that are not, of a user's file.

    Raises `InvalidValueError` for a file without one of a part.
    """
    from d3engine.research.analysis.answers import read_prompts

    parts: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for prompt in dict.fromkeys(read_prompts(path)):
        parts[is_held_out(prompt)].append((OWN, prompt))
    enough = f"a file of more prompts: one in {HELD_OUT_EVERY} is held out, by its hash, the others are trained on"
    require(all(parts.values()), "--prompts", str(path), enough)
    return [parts[True][:held_out], parts[False][:others]]


def _gsm8k(data: Path | None) -> list[str]:
    """GSM8K's training questions but for its validation split; its test questions stay untouched."""
    from d3engine.research.evaluation.gsm8k import load_gsm8k

    if data is None:
        raise InvalidValueError("--data", None, "a folder with gsm8k/, given for --kinds gsm8k")
    questions = load_gsm8k(data, split="train", shots=0, seed=0).questions
    return [f"{one.question.question}\n{ASK}" for one in questions]  # type: ignore[attr-defined]


ASK = "Please reason step by step, and put the final answer behind ####."


@dataclass(frozen=True)
class Asked:
    """A prompt, as the engine takes it, whose answer is wanted; fields as of `OwnAnswer`."""

    kind: str
    held_out: bool
    key: str
    prompt: Prompt


def asked_of(engine: Engine, kind: str, prompt: str) -> Asked:
    asked: Prompt = f"Question: {prompt}\nAnswer:"
    if engine.chat_template() is not None:
        asked = engine.chat_prompt([{"role": "user", "content": prompt}])
    return Asked(kind, is_held_out(prompt), _key(kind, prompt), asked)


def asked_again(answer: OwnAnswer, depth: str) -> Asked:
    """The prompt of an answer, to be answered at another depth, in words that differ where its answers may."""
    return Asked(answer.kind, answer.held_out, _key(answer.key, depth), {"prompt_token_ids": answer.prompt_ids})


def add_answers(
    engine: Engine,
    path: Path,
    fingerprint: str,
    asked: Sequence[Asked],
    max_tokens: int,
    depth: DepthPolicy | None = None,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Answer the prompts that the file does not have, and write the answers to its end; returns its generated tokens.

    Answers are at full depth, or at `depth`, and are written in the order of the prompts, each as soon as those before
    it are there. `progress` is called for each text, those that were there already among them. Raises
    `InvalidValueError` beside answers of another `max_tokens`, `FailedError` for an answer that a fault has ended.
    """
    from d3engine.request.params import RequestOutputKind, SamplingParams

    known: dict[str, OwnAnswer] = {}
    if is_there(path) and (lines := _whole_lines(path)):
        known = {one.key: one for one in read_corpus(path, fingerprint)}
        most = as_json(lines[0], path).get("max_tokens", max_tokens)
        require(most == max_tokens, "--max-tokens", max_tokens, f"{most}, as of the answers in {path}")
    else:
        append_lines(path, [json.dumps({"fingerprint": fingerprint, "max_tokens": max_tokens})])
    total, left = 0, []
    for question in asked:
        if (one := known.get(question.key)) is not None:
            total += one.positions
            progress()
        else:
            left.append(question)
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, depth=depth or FullDepth(), output_kind=kind)
    ids = [f"answer-{nth}" for nth in range(len(left))]
    ended: dict[str, RequestOutput] = {}
    try:
        for request_id, question in zip(ids, left, strict=True):
            engine.add_request(request_id, question.prompt, params)
        for request_id, question in zip(ids, left, strict=True):
            while request_id not in ended:
                ended |= {output.request_id: output for output in engine.step()}
            output = ended.pop(request_id)
            (answer,) = output.outputs
            if answer.finish_reason == "abort":
                raise FailedError(f"{request_id} ended with a fault: {answer.stop_reason}")
            prompt_ids, token_ids = list(output.prompt_token_ids), list(answer.token_ids)
            one = OwnAnswer(question.kind, question.held_out, question.key, prompt_ids, token_ids)
            append_lines(path, [json.dumps(asdict(one))])
            total += one.positions
            progress()
    finally:
        engine.abort_request(ids)
        if engine.has_unfinished_requests():
            engine.step()  # takes the last outputs of the aborted ones
    return total


def _key(kind: str, prompt: str) -> str:
    return sha256(f"{kind}\n{prompt}".encode()).hexdigest()[:16]

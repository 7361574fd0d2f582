"""`d3engine verify`: the bundled model keeps its bits, and a bit that changes in one situation is found there."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from invoking import invoke, refused, report_of

from d3engine import Engine
from d3engine.request.outputs import RequestOutput
from d3engine.research import equality
from d3engine.research.equality import CHECKS, CHUNK, CHUNKED, DRAFT_MODEL, TIGHT, Answer

ROWS = [check.name for check in CHECKS if check.engine != DRAFT_MODEL]
FEW = ["--max-tokens", "17", "--threads", "1"]
Outputs = list[RequestOutput]


def verified(*words: str) -> tuple[int, dict[str, Any]]:
    result = invoke(["verify", "demo", "--json", *FEW, *words])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(scope="module")
def report(native_library: None) -> dict[str, Any]:
    code, found = verified()
    assert code == 0
    return found


def test_the_bundled_model_keeps_its_bits_in_every_situation(report: dict[str, Any]) -> None:
    assert report["equal"] is True
    assert [row["name"] for row in report["checks"]] == ROWS
    assert all(row["equal"] and row["tokens"] == 6 * 17 for row in report["checks"])
    assert [answer["name"] for answer in report["answers"]] == [
        f"{prompt}, {kind}" for prompt in ("chat", "code", "long") for kind in ("greedy", "sampled")
    ]
    assert all(len(answer["logprobs"]) == 17 for answer in report["answers"])
    assert report["computed_by"]["executor"].startswith("native")
    assert {"activations", "dtype", "weight_dtype", "kv_dtype", "torch", "d3engine"} < set(report["computed_by"])


def test_the_sum_is_of_the_answers_on_any_number_of_threads(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "CHECKS", CHECKS[:1])
    found = report_of(["verify", "demo", "--max-tokens", "17", "--threads", "2"])
    assert (found["sha256"], found["answers"]) == (report["sha256"], report["answers"])
    more = report_of(["verify", "demo", "--max-tokens", "18", "--threads", "1"])
    assert more["sha256"] != report["sha256"]


def breaks(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Engine, Outputs], None]) -> None:
    """Let `spoil` change what every `generate` returns."""
    generate = Engine.generate

    def broken(self: Engine, *arguments: Any, **options: Any) -> Outputs:
        outputs = generate(self, *arguments, **options)
        spoil(self, outputs)
        return outputs

    monkeypatch.setattr(Engine, "generate", broken)


def nudge(output: RequestOutput) -> None:
    """Change the last bit of the log-probability of its third token."""
    (one,) = output.outputs
    if one.logprobs is not None:
        (entry,) = one.logprobs[2].values()
        entry.logprob = math.nextafter(entry.logprob, -math.inf)


def test_one_bit_a_situation_changes_is_found_in_its_row(monkeypatch: pytest.MonkeyPatch, native_library: None) -> None:
    def spoil(engine: Engine, outputs: Outputs) -> None:
        is_chunked = engine.settings.max_num_batched_tokens == CHUNK
        drafts = outputs[0].metrics.num_drafted_tokens > 0
        if len(outputs) > 1 or is_chunked or drafts or outputs[0].num_cached_tokens:
            nudge(outputs[-1])

    breaks(monkeypatch, spoil)
    code, found = verified()
    assert code == 1
    assert found["equal"] is False
    first = {row["name"]: row["difference"] for row in found["checks"]}
    assert list(first) == ROWS
    for name, said in first.items():
        assert (said is None) if "tokens only" in name else (": log-probability 2 is " in said), name


def test_verify_finds_a_token_that_a_batch_changes(monkeypatch: pytest.MonkeyPatch, native_library: None) -> None:
    """A token that a batch changes is found without log-probabilities too."""

    def spoil(engine: Engine, outputs: Outputs) -> None:
        if len(outputs) > 1:
            outputs[-1].outputs[0].token_ids[4] += 1

    breaks(monkeypatch, spoil)
    monkeypatch.setattr(equality, "CHECKS", [replace(CHECKS[1], name="tokens")])
    result = invoke(["verify", "demo", *FEW])
    assert result.exit_code == 1
    assert "long, sampled: token 4 is" in result.stdout


def test_a_situation_that_does_not_occur_is_no_equality(monkeypatch: pytest.MonkeyPatch, native_library: None) -> None:
    monkeypatch.setattr(equality, "engine_arguments", lambda *needs: {"max_num_seqs": 16})
    monkeypatch.setattr(equality, "CHECKS", [CHECKS[0], *(one for one in CHECKS if one.engine in (CHUNKED, TIGHT))])
    code, found = verified()
    assert code == 1
    assert [row["equal"] for row in found["checks"]] == [True, False, False]
    assert all("did not occur" in row["difference"] for row in found["checks"][1:])
    assert found["checks"][2]["evidence"] == "0 of 6 requests preempted"


def test_answers_another_model_drafts_keep_their_bits(monkeypatch: pytest.MonkeyPatch, native_library: None) -> None:
    monkeypatch.setattr(equality, "CHECKS", [CHECKS[0], *(one for one in CHECKS if one.engine == DRAFT_MODEL)])
    code, found = verified("--draft-model", "demo")
    assert code == 0
    assert [row["name"] for row in found["checks"] if "drafted" in row["evidence"]] == [
        one.name for one in CHECKS if one.engine == DRAFT_MODEL
    ]


def test_answer_difference_is_exact_and_names_the_first_one() -> None:
    """Answers are compared to the last bit, and the first difference is named."""
    wanted = Answer("chat", 3, [5, 6], [-0.5, -0.25])
    assert Answer("chat", 3, [5, 6], [-0.5, -0.25]).difference(wanted) is None
    assert Answer("chat", 3, [5, 6], []).difference(wanted) is None
    assert Answer("chat", 3, [5, 7], [-0.5, -1.0]).difference(wanted) == "chat: token 1 is 7, not 6"
    assert Answer("chat", 3, [5, 7], []).difference(wanted) == "chat: token 1 is 7, not 6"
    last_bit = Answer("chat", 3, [5, 6], [math.nextafter(-0.5, 0), -0.25]).difference(wanted)
    assert last_bit == "chat: log-probability 0 is -0.49999999999999994, not -0.5"
    assert Answer("chat", 3, [5, 6], [-0.5, math.nan]).difference(wanted) is not None
    assert Answer("chat", 3, [5], [-0.5]).difference(wanted) == "chat: 1 tokens, not 2"


def test_a_length_of_answers_that_proves_nothing_is_refused() -> None:
    assert "--max-tokens" in refused(["verify", "demo", "--max-tokens", "16"])

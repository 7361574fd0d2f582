"""`benchmarks.speculation`: its figures follow from its runs, and llama.cpp's loop drafts right; no time is judged."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from benchmark_reports import report_of

from benchmarks import speculation
from benchmarks.llama_cpp_drafts import answer
from benchmarks.speculation import Group, Run, answered_by_all, cells_of, groups_of, is_equal, middle_runs, read_prompts
from d3engine.engine.engine import Engine


def test_there_are_fifteen_prompts_of_each_kind_and_no_two_alike() -> None:
    prompts = read_prompts(15)
    assert [len(of_kind) for of_kind in prompts.values()] == [15] * 4
    assert len({text for of_kind in prompts.values() for text in of_kind}) == 60


def test_groups_never_mix_kinds_and_lose_no_prompt() -> None:
    prompts = {"code": [[1], [2], [3]], "chats": [[4]]}
    assert groups_of(prompts, 2) == [
        Group("code", 0, [[1], [2]]),
        Group("code", 2, [[3]]),
        Group("chats", 0, [[4]]),
    ]


def run(seconds: float, tokens: list[list[int]], *counts: int) -> Run:
    return Run(seconds, seconds / 4, tokens, *(counts or (0, 0, 0)))


def test_cell_has_ratios_of_its_prompts_and_counts_differences() -> None:
    """A cell has the ratios over its prompts and counts what differs."""
    groups = [Group("code", 0, [[1]]), Group("code", 1, [[1]]), Group("chats", 0, [[1]])]
    base = [run(2.0, [[5, 6]]), run(4.0, [[5, 6]]), run(2.0, [[5, 6, 7, 8]])]
    own = [run(1.0, [[5, 6]], 4, 1, 1), run(5.0, [[5, 6]], 4, 1, 2), run(1.0, [[5, 9]], 2, 1, 1)]
    pairs = [list(zip(groups, runs, strict=True)) for runs in (own, base)]
    cells = {cell["kind"]: cell for cell in cells_of(*pairs)}
    assert cells["code"]["ratios"] == pytest.approx([2.0, 0.8])
    assert cells["code"]["ratio"] == {
        "median": pytest.approx(1.4),
        "low": pytest.approx(1.1),
        "high": pytest.approx(1.7),
    }
    assert cells["code"]["worst"] == {"ratio": pytest.approx(0.8), "prompt": "code 2"}
    assert cells["code"]["slower"] == 0.5
    assert cells["code"]["tokens_per_verification"] == pytest.approx(1 + 2 / 3)
    assert (cells["code"]["equal"], cells["code"]["answers"]) == (2, 2)
    assert cells["chats"]["ratios"] == pytest.approx([1.0])  # half of the tokens in half of the time
    assert (cells["chats"]["equal"], cells["chats"]["answers"]) == (0, 1)
    assert cells["all"]["tokens_per_second"] == pytest.approx(6 / 7)
    assert cells["all"]["prompt_share"] == pytest.approx(1 / 4)


def test_kinds_without_a_prompt_have_no_cell() -> None:
    one = [(Group("edits", 0, [[1]]), run(1.0, [[5]]))]
    assert [cell["kind"] for cell in cells_of(one, one)] == ["edits", "all"]


def test_of_repeated_runs_the_middle_one_counts() -> None:
    """A burst of the machine in one of three runs of a group is not in its figure."""
    first, second = Group("code", 0, [[1]]), Group("code", 1, [[2]])
    found = [(first, run(seconds, [[5]])) for seconds in (9.0, 1.0, 2.0)] + [(second, run(4.0, [[5]]))]
    assert [(group, one.seconds) for group, one in middle_runs(found)] == [(first, 2.0), (second, 4.0)]


def test_ctrl_c_leaves_groups_that_each_system_has_answered() -> None:
    """After Ctrl-C the groups that every system has answered are left."""
    groups = [(Group("code", first, [[1]]), run(1.0, [[5]])) for first in range(3)]
    runs = {
        (0.0, 1, "none"): groups,
        (0.0, 1, "draft"): groups[:2],
        (0.7, 1, "none"): groups[:1],
        (0.7, 1, "draft"): [],
    }
    assert answered_by_all(runs) == {(0.0, 1, "none"): groups[:2], (0.0, 1, "draft"): groups[:2]}


def test_ctrl_c_leaves_a_report_of_the_prompts_that_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, calls = Engine.generate, itertools.count(1)

    def pressed_in_the_third_group(*arguments: Any, **options: Any) -> Any:
        if next(calls) > 2 + 2 * 2 + 1:  # a warm-up of both, two groups of both, and one more
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(Engine, "generate", pressed_in_the_third_group)
    settings = speculation.Settings(
        "demo", "demo", systems=("none", "lookup"), limit=1, tokens=4, temperatures=(0.0,), peer_lengths=()
    )
    report = speculation.measure(settings)
    assert [cell["kind"] for cell in report["cells"]] == ["code", "problems", "all"] * 2
    assert all(cell["answers"] == (2 if cell["kind"] == "all" else 1) for cell in report["cells"])
    assert "Ended early" in capsys.readouterr().err


def test_one_bit_of_a_log_probability_makes_two_runs_differ() -> None:
    one = Run(1.0, 0.5, [[5]], 0, 0, 0, [[-0.5]])
    assert is_equal(one, Run(2.0, 0.1, [[5]], 4, 2, 1, [[-0.5]]))
    assert not is_equal(one, Run(1.0, 0.5, [[5]], 0, 0, 0, [[-0.5000000000000001]]))


class Counting:
    """A model whose next token is the last one and one more, but 0 behind each multiple of `wrong`; 30 is the end.

    Its cache must be without a gap, and hold the tokens of the text that is given in the end.
    """

    def __init__(self, wrong: int = 0) -> None:
        self.cache: list[int] = []
        self.batches: list[int] = []
        self._wrong = wrong
        self._likeliest: list[int] = []

    def decode(self, rows: list[tuple[int, int, int]], first: int) -> None:
        self._likeliest = []
        for sequence, place, token in rows:
            assert (sequence, place) == (0, len(self.cache))
            self.cache.append(token)
            if place >= first:
                self._likeliest.append(0 if self._wrong and token % self._wrong == 0 else token + 1)
        self.batches.append(len(rows))

    def likeliest(self, count: int) -> list[int]:
        assert count == len(self._likeliest)
        return self._likeliest

    def keep(self, length: int) -> None:
        assert length <= len(self.cache)
        del self.cache[length:]

    def ends_with(self, token: int) -> bool:
        return token == 30


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("wrong", [0, 1, 3, 4])
def test_the_loop_answers_as_without_drafts_whatever_is_drafted(wrong: int, length: int) -> None:
    target = Counting()
    wanted = answer(target, Counting(), [7, 8, 9], 12, 0)
    assert wanted["token_ids"] == list(range(10, 22))
    assert target.batches == [3] + [1] * 11
    target, draft = Counting(), Counting(wrong)
    found = answer(target, draft, [7, 8, 9], 12, length)
    assert found["token_ids"] == wanted["token_ids"]
    assert target.cache == [7, 8, 9, *wanted["token_ids"][:-1]]
    assert sum(target.batches[1:]) == found["drafted"] + len(target.batches) - 1
    assert found["accepted"] + len(target.batches) - 1 == 11
    if wrong in (0, 1):
        assert found["accepted"] == (found["drafted"] if wrong == 0 else 0)


def test_the_loop_ends_with_an_end_of_text_inside_a_draft() -> None:
    found = answer(Counting(), Counting(), [26], 12, 5)
    assert found["token_ids"] == [27, 28, 29, 30]


def test_systems_take_turns_and_give_undrafted_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Systems take turns, and their tokens are those without drafts."""
    picture = tmp_path / "speculation.png"
    sizes = ["--limit", "1", "--tokens", "8", "--batches", "1", "2", "--peer-lengths"]
    sizes += ["--systems", "none", "draft", "lookup"]
    report = report_of(speculation.main, tmp_path, "--model", "demo", "--draft=demo", *sizes, f"--plot={picture}")
    assert {(cell["system"], cell["batch"]) for cell in report["cells"]} == {
        (name, batch) for name in ("none", "draft", "lookup") for batch in (1, 2)
    }
    for cell in report["cells"]:
        assert cell["equal"] == cell["answers"] == (4 if cell["kind"] == "all" else 1)
        assert cell["system"] != "draft" or cell["accepted"] == cell["drafted"] > 0  # each model drafts for itself
        assert cell["system"] != "none" or cell["drafted"] == 0
        assert len(cell["ratios"]) == len(cell["seconds"])
    assert report["log_probabilities"] == {name: {"answers": 8, "equal": 8} for name in ("none", "draft", "lookup")}
    assert report["environment"]["command"].startswith("python -m benchmarks.speculation --model demo")
    assert picture.stat().st_size > 10_000
    assert "8 of 8 answers equal with their log-probabilities" in capsys.readouterr().out


def test_run_without_the_baseline_of_its_ratios_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A run without the system that ratios are over is refused."""
    with pytest.raises(SystemExit):
        speculation.main(["--model", "demo", "--draft", "demo", "--systems", "draft"])
    assert "--systems must name none" in capsys.readouterr().err

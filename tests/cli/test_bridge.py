"""`d3engine bridge`: a fit, its file and its report, and what is refused before any work."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, refused, report_of, succeed

from d3engine.cli.bridge import _key
from d3engine.engine.model_directory import model_directory
from d3engine.model.bridges import read_bridges
from d3engine.research.analysis import answers
from d3engine.research.bridges import own_answers

SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", str(2**24), "--texts", "6", "--held-out-texts", "2")


def run(*arguments: str) -> Any:
    return succeed(["bridge", *arguments])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = [{"question": f"Tom has {n} pens and finds {n + 2}. How many?", "answer": f"{2 * n + 2}"} for n in range(9)]
    lines.append({"text": "Ann buys 3 cups. Ann sells 1. Then she counts them again, and finds 2 cups."})
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "texts.jsonl"


def test_a_fit_writes_its_file_and_says_what_it_is_worth(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "b.safetensors", tmp_path / "b.png"
    options = ("--text", str(texts), "--start", "0.9", "--window", "3:5", "--prompt-tokens", "4", "--rank", "8")
    report = report_of(["bridge", "fit", "demo", *SMALL, *options, "--out", str(out), "--png", str(png)])
    windows = [(3, 5), (14, 15), (14, 16)]
    assert [tuple(row["window"]) for row in report["held_out"]["windows"]] == windows
    assert png.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "b.safetensors.part").exists()
    bridges = read_bridges(out)
    assert {window: bridge.rank for window, bridge in bridges.by_window.items()} == dict.fromkeys(windows, 8)
    assert (bridges.about["source"], bridges.about["texts"]) == (["texts.jsonl"], 6)
    assert report_of(["bridge", "inspect", str(out)])["bridges"][0] == {
        "window": [3, 5],
        "rank": 8,
        "dtype": "float32",
        "parameters": 17 * bridges.hidden_size,
    }
    assert "[14, 16)" in run("inspect", str(out)).stdout


def test_the_models_own_answers_to_a_task_serve_as_text(tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    result = run("fit", "demo", *SMALL, "--task", "word-problems", "--window", "14:16", "--out", str(out))
    assert "[14, 16)" in result.stdout
    assert read_bridges(out).about["source"] == "word-problems"


def test_a_policy_names_the_windows_that_it_will_leave_out(texts: Path, tmp_path: Path) -> None:
    out, policy = tmp_path / "b.safetensors", "skipdecode mean-layers=14 decay-steps=4"
    given = ("--text", str(texts), "--prompt-tokens", "4", "--depth", policy)
    run("fit", "demo", *SMALL, *given, "--rank", "8", "--out", str(out))
    assert list(read_bridges(out).by_window) == [(1, 2), (1, 4), (1, 5)]
    run("measure", "demo", *SMALL[:4], *given, "--texts", "2", "--bridges", str(out))


def test_bridge_fit_of_own_chats_is_measured_on_own_answers(tmp_path: Path) -> None:
    """A fit takes the model's own chats as text, and `measure` lets each policy generate its answers."""
    out, prompts = tmp_path / "b.safetensors", tmp_path / "prompts.txt"
    prompts.write_text("Tom has 2 pens and finds 3. How many?\nAnn buys 3 cups. Ann sells 1. How many?\n")
    fit = ("fit", "demo", *SMALL, "--task", "chat", "--max-tokens", "12", "--window", "3:6", "--out", str(out))
    worse = invoke(["bridge", *fit, "--rank", "8"])
    assert worse.exit_code == 3, worse.output
    assert "leaving the layers out costs no more: [3, 6)" in worse.stderr.replace("\n", " ")
    assert not out.exists()
    run(*fit, "--rank", "8", "--even-if-worse")
    assert read_bridges(out).about["source"] == "chat"
    policy = "nested alpha=0.9 windows=3:6"
    asked = (*SMALL[:4], "--prompts", str(prompts), "--max-tokens", "12", "--depth", policy)
    report = report_of(["bridge", "measure", "demo", *asked, "--bridges", str(out)])
    assert (report["texts"], report["own_answers"]["prompts"]) == (2, 2)
    full, skipped, bridged = report["own_answers"]["policies"]
    assert [one["policy"] for one in (full, skipped, bridged)] == ["full", policy, f"{policy}, bridged"]
    assert full["kept_of_32"] == 1 > bridged["kept_of_32"]
    shown = run("measure", "demo", *asked, "--bridges", str(out))
    assert "Answers of their own: 2 prompts" in shown.stdout


def test_bridge_chats_writes_conversations_that_fit_reads(tmp_path: Path) -> None:
    """`bridge chats` writes conversations of the model, which `bridge fit` reads as text."""
    chats, few = tmp_path / "chats.jsonl", (*SMALL[:4], "--texts", "6", "--max-tokens", "12")
    run("chats", "demo", *few, "--out", str(chats))
    (asked, answered), *_ = (json.loads(line)["messages"] for line in chats.read_text().splitlines())
    assert (asked["role"], answered["role"]) == ("user", "assistant")
    assert asked["content"].endswith("?")
    assert re.search(r"\d", answered["content"])
    fit = ("--text", str(chats), "--prompt-tokens", "4", "--window", "3:6", "--out", str(tmp_path / "b"))
    run("fit", "demo", *SMALL, *fit, "--even-if-worse")
    said = refused(["bridge", "chats", "demo", *few, "--out", str(tmp_path / "chats.txt")])
    assert re.search(r"--out must be a file whose name ends in \.jsonl", said)


def test_sigterm_keeps_the_chats_that_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends `bridge chats` with a file of the conversations that are answered by then."""
    monkeypatch.setattr(own_answers, "BATCH", 2)
    whole, part = (tmp_path / f"{name}.jsonl" for name in ("whole", "part"))
    few = ("chats", "demo", *SMALL[:4], "--texts", "6", "--max-tokens", "12", "--out")
    run(*few, str(whole))
    answer, batches = answers.answer, list[int]()

    def interrupted(engine: Any, prompts: list[Any], max_tokens: int) -> Any:
        if batches:
            signal.raise_signal(signal.SIGTERM)
        batches.append(len(prompts))
        return answer(engine, prompts, max_tokens)

    monkeypatch.setattr(answers, "answer", interrupted)
    assert invoke(["bridge", *few, str(part)]).exit_code == 130
    kept = part.read_text().splitlines()
    assert kept == whole.read_text().splitlines()[: len(kept)]
    assert [len(kept)] == batches


def test_bridge_windows_are_nested_measured_and_tuned(texts: Path, tmp_path: Path) -> None:
    """Windows are nested, measured and tuned with one file of bridges."""
    out, better = str(tmp_path / "b.safetensors"), str(tmp_path / "better.safetensors")
    given = ("--text", str(texts), "--prompt-tokens", "4", "--text-tokens", "24")
    few = (*SMALL[:4], *given, "--texts", "6")
    run("fit", "demo", *SMALL, *given, "--grid", "5", "--rank", "8", "--out", out)
    nest = run("nest", "demo", *few, "--bridges", out, "--width", "5", "--count", "2")
    windows = read_bridges(out).about["nested"]["windows"]
    order = ",".join(f"{first}:{stop}" for first, stop in windows)
    assert len(windows) == 2
    assert nest.stdout.endswith(f'--depth "nested alpha=... windows={order}"\n')
    assert f"nested windows: {order}" in run("inspect", out).stdout
    policy = f"nested alpha=0.9 windows={order}"
    skipped, bridged = report_of(["bridge", "measure", "demo", *few, "--bridges", out, "--depth", policy])["policies"]
    assert skipped["mean_layers"] == bridged["mean_layers"] < bridged["mean_layers_with_bridges"]
    tune = ("tune", "demo", *few, "--held-out", str(texts), "--bridges", out, "--depth", policy, "--steps", "6")
    before, after = report_of(["bridge", *tune, "--rate", "0.001", "--out", better])["held_out"]["policies"]
    assert after["kl"] < before["kl"]
    assert read_bridges(better).about["tuned"][0]["policy"] == policy
    spoilt = run(*tune, "--rate", "1", "--out", str(tmp_path / "no"))
    assert "nothing was written" in spoilt.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.safetensors", "better.safetensors", "texts.jsonl"]
    student = refused(["bridge", "measure", "demo", *few, "--bridges", out, "--depth", "distilled student=s"])
    assert "--depth must be without a student" in student
    lacking = refused(["bridge", "measure", "demo", *few, "--bridges", out, "--depth", "d3 alpha=0.9 start=0.5"])
    assert re.search("--bridges must be a file with the windows 8:10, ", lacking), lacking


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--text", "no.jsonl"), "--out must be given"),
        (("--out", "b"), "--text must be given, or --task or --prompts in its place"),
        (("--out", "b", "--text", "no.jsonl", "--task", "word-problems"), "--text must be given, or --task"),
        (("--out", "b", "--text", "no.jsonl"), "--text must be a file of text.*missing"),
        (("--out", "b", "--text", "x", "--window", "3:17"), "--window must be A:B with 0 <= A < B <= 16"),
        (("--out", "b", "--text", "x", "--start", "1"), r"--start must be a number in \(0, 1\)"),
        (("--out", "b", "--text", "x", "--depth", "full"), "--depth must be one that is known beforehand"),
        (("--out", "b", "--text", "x", "--depth", "early-exit threshold=0.9"), "--depth must be one that is known"),
        (("--out", "b", "--text", "x", "--texts", "4"), "--texts must be an integer of at least 5; got 4"),
        (("--out", "none/b", "--text", "x"), "--out must be a file that can be written"),
    ],
    ids=str,
)
def test_what_cannot_be_fitted_is_refused_by_name(
    options: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stderr = refused(["bridge", "fit", "demo", *options])
    assert re.search(complaint, stderr), stderr


def test_bridge_saved_fit_is_keyed_by_its_fitted_positions() -> None:
    """A saved fit of all positions is not resumed for a fit of generated positions alone."""
    directory, texts = model_directory("demo"), [[1, 2, 3, 4]]
    keys = {_key(directory, [(3, 5)], texts, firsts) for firsts in (None, [2], [3])}
    assert len(keys) == 3

"""The benchmark of decoding on a CPU runs, its figures follow from each other, and its peer gets the same weights."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_reports import report_of

from benchmarks import cpu
from benchmarks.gguf_writing import write_gguf
from benchmarks.systems import model_at, need_llama, weights_of
from benchmarks.timed_engine import TimedEngine
from benchmarks.torch_peers import TorchPeer
from d3engine import Engine, SamplingParams
from d3engine.errors import InvalidValueError
from d3engine.model.config import ModelConfig
from d3engine.model.gguf_file import open_gguf

SHORT_PROMPTS = (20, 60)
"""Those of 512 and 2,048 tokens, which are measured, take seconds each."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = ["--model=tiny", "--kinds", "f32", "8-bit", "--batches", "1", "3", "--tokens=8", "--repeats=2"]
    sizes += ["--peers", "llama.cpp", "transformers", "eager"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "PROMPTS", SHORT_PROMPTS)
        patch.setattr(cpu, "READ_BYTES", 2**20)
        return report_of(cpu.main, tmp_path_factory.mktemp("cpu"), *sizes, "--threads=1")


def test_every_kind_and_batch_has_its_row(report: dict[str, Any]) -> None:
    wanted = [(kind, batch) for kind in ("f32", "8-bit") for batch in (1, 3)]
    for part in ("decode", "depth"):
        assert [(row["kind"], row["batch"]) for row in report[part]] == wanted
    assert [(row["kind"], row["tokens"]) for row in report["prompt"]] == [
        (kind, tokens) for kind in ("f32", "8-bit") for tokens in SHORT_PROMPTS
    ]
    for row in report["decode"]:
        assert 0 < row["systems"]["d3engine"]["host_share"]["median"] < 1
        wanted_peers = {"transformers", "eager"} if row["kind"] == "f32" else {"eager"}
        assert set(row["over"]) - {"llama.cpp"} == wanted_peers
        assert ("llama.cpp" in row["over"]) == (report["llama_cpp"] is not None)


def test_steps_come_after_as_many_tokens_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: set[int] = set()
    answer = TimedEngine.answer

    def seen(engine: TimedEngine, prompts: list[list[int]], *others: Any) -> Any:
        lengths.update(map(len, prompts))
        return answer(engine, prompts, *others)

    monkeypatch.setattr(TimedEngine, "answer", seen)
    monkeypatch.setattr(cpu, "READ_BYTES", 2**20)
    sizes = ["--model=tiny", "--kinds", "8-bit", "--batches", "2", "--tokens=4", "--repeats=1", "--threads=1"]
    assert cpu.main([*sizes, "--parts", "decode", "depth", "--peers", "--prompt-tokens=24"]) == 0
    assert lengths == {24}


def test_a_run_that_is_broken_off_leaves_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu.json"
    monkeypatch.setattr(cpu, "READ_BYTES", 2**20)
    decode = cpu.decode

    def broken_off(model: cpu.Model, kind: str, *others: Any) -> dict[str, Any]:
        if kind == "8-bit":
            raise KeyboardInterrupt
        return decode(model, kind, *others)

    monkeypatch.setattr(cpu, "decode", broken_off)
    sizes = ["--model=tiny", "--kinds", "f32", "8-bit", "--batches", "1", "--tokens=4", "--repeats=1", "--threads=1"]
    with pytest.raises(KeyboardInterrupt):
        cpu.main([*sizes, "--parts", "decode", "--peers", "--json", str(file)])
    left = json.loads(file.read_text())
    assert [row["kind"] for row in left["decode"]] == ["f32"]
    assert left["environment"]["command"].startswith("python -m benchmarks.cpu")


def test_ratios_follow_from_the_seconds(report: dict[str, Any]) -> None:
    for row in report["depth"]:
        full, d3 = (row["systems"][name]["seconds_per_step"]["rounds"] for name in ("6", "d3"))
        speedups = [a / b for a, b in zip(full, d3, strict=True)]
        assert row["d3_over_full_depth"]["rounds"] == pytest.approx(speedups)
        assert row["realisation_ratio"]["rounds"] == pytest.approx([one / row["layer_bound"] for one in speedups])
        assert row["layer_bound"] > 1.1


def test_a_steps_share_of_reading_is_that_of_its_own_round(report: dict[str, Any]) -> None:
    for row in report["decode"]:
        ours = row["systems"]["d3engine"]
        rates, reads = (ours[f"{of}gigabytes_per_second"]["rounds"] for of in ("", "read_"))
        shares = [rate / read for rate, read in zip(rates, reads, strict=True)]
        assert ours["share_of_reading"]["rounds"] == pytest.approx(shares)
        sizes = [rate * s for rate, s in zip(rates, ours["seconds_per_step"]["rounds"], strict=True)]
        assert sizes == pytest.approx([sizes[0]] * len(sizes))


def test_processor_time_is_of_one_thread_without_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "READ_BYTES", 2**20)
    for given in (["--peers"], ["--threads=1"]):
        with pytest.raises(SystemExit):
            cpu.main(["--processor-time", *given])
        assert "--processor-time must come with --threads 1" in capsys.readouterr().err
    sizes = ["--model=tiny", "--kinds=f32", "--batches=1", "--tokens=8", "--repeats=1", "--parts=decode"]
    report = report_of(cpu.main, tmp_path, *sizes, "--threads=1", "--processor-time", "--peers")
    assert "processor time" in capsys.readouterr().out
    assert report["settings"]["processor_time"] is True


def test_the_depths_that_are_compared_run_ahead_like_any_other() -> None:
    schedule = cpu.lowest(2, 6, 8).schedule(6)
    assert schedule.is_nested
    assert schedule.on_skip == "none"
    assert schedule.depths(8).tolist() == [6] + [2] * 7


def test_distance_from_a_line_is_relative_and_the_largest() -> None:
    assert cpu.distance_from_line([1, 2, 3, 4], [3.0, 5.0, 7.0, 9.0]) == pytest.approx(0, abs=1e-12)
    assert 0.05 < cpu.distance_from_line([1, 2, 3, 4], [3.0, 5.0, 8.0, 9.0]) < 0.15


@pytest.mark.parametrize("compiled", [False, True])
def test_the_peers_in_pytorch_compute_the_same_logits(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # without a minute of compiling
    with model_at("tiny", 64) as directory:
        weights = weights_of(directory, ModelConfig.from_directory(directory))
        peer = TorchPeer(directory, weights, "f32", compiled=compiled, rows=1, length=8)
        found: list[torch.Tensor] = []
        run = peer._run
        monkeypatch.setattr(peer, "_run", lambda *given: found.append(run(*given)))
        peer.answer([[5, 9, 200]], 3)
        peer.close()
        options: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
        with Engine(directory, weights=weights, max_model_len=64, kv_cache_memory_bytes=2**22, **options) as engine:
            for length, logits in zip((3, 4, 5), found, strict=True):
                answer = engine.generate([([5, 9, 200] + [200] * 2)[:length]], params, use_tqdm=False)[0].outputs[0]
                assert answer.logprobs is not None
                wanted = torch.log_softmax(logits[0, -1].float(), dim=-1)
                for token, ours in answer.logprobs[0].items():
                    assert float(wanted[token]) == pytest.approx(ours.logprob, abs=1e-4)


def test_the_peer_gets_the_same_weights(tmp_path: Path) -> None:
    with model_at("tiny", 64) as directory:
        config = ModelConfig.from_directory(directory)
        weights = weights_of(directory, config)
        write_gguf(tmp_path / "f32.gguf", config, weights, "f32")
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        options: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
        answers = []
        for model, given in ((directory, weights), (tmp_path / "f32.gguf", None)):
            with Engine(model, weights=given, max_model_len=64, kv_cache_memory_bytes=2**22, **options) as engine:
                answers.append(engine.generate([[5, 9, 200]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("kind", "stored"), [("16-bit", "BF16"), ("12-bit", "BF16"), ("8-bit", "Q8_0"), ("4-bit", "Q4_0")]
)
def test_peers_file_has_matrices_of_the_wanted_kind(tmp_path: Path, kind: str, stored: str) -> None:
    """The peer's file has its matrices in the kind that was asked for."""
    with model_at("tiny", 64) as directory:
        config = ModelConfig.from_directory(directory)
        write_gguf(tmp_path / "file.gguf", config, weights_of(directory, config), kind)
    kinds = {name: tensor.type_name for name, tensor in open_gguf(tmp_path / "file.gguf").tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == kinds["output.weight"] == stored
    assert kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llama", None),
        ("qwen2", "biases"),
        ("qwen3", "norms of queries and keys"),
        ("olmo2", "norms of queries and keys, other norms"),
        ("gemma", "other norms, factors, another activation"),
        ("granite", "factors"),
    ],
)
def test_model_that_peers_would_run_as_a_llama_is_refused(model_type: str, message: str | None) -> None:
    """A model that the peers would compute as a Llama is refused."""
    sizes = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    given = {"model_type": model_type, "num_attention_heads": 4, "num_key_value_heads": 2, "residual_multiplier": 0.5}
    config = ModelConfig.from_dict(given | sizes)
    if message is None:
        need_llama(config)
    else:
        with pytest.raises(InvalidValueError, match=f"model must be a plain Llama.*; got 'one with {message}'"):
            need_llama(config)

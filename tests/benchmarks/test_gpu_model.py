"""The model of a GPU's step adds up what its kernels read; here no kernel is compiled."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_model
from benchmarks.gpu.model_tables import published_shares
from benchmarks.gpu.step_work import Step, step_work
from benchmarks.gpu_model import DEVICES, TURN_US, Kernel, kernels_of_step, limit_us, report_of, step_us
from d3engine.kernels import ahead_of_time
from d3engine.kernels.triton.launches import SHAPES

pytest.importorskip("triton")
H200 = next(device for device in DEVICES if device.name == "H200")


@pytest.fixture(autouse=True)
def in_flight(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What every kernel has under way, and its instructions a byte: a test may change it."""
    found = {"in_flight": 64 * 1024, "instructions": 0.01, "registers": 128, "shared": 0}
    monkeypatch.setattr(ahead_of_time, "needs", lambda launch, arch: found)
    monkeypatch.setattr(ahead_of_time, "machine_code_of", lambda launch, arch: "")
    return found


def test_a_step_reads_each_weight_and_each_entry_once() -> None:
    kernels = kernels_of_step(Step(shape=SHAPES["llama2-7b"], batch=8), 90)
    layer = sum(kernel.num_bytes for kernel in kernels if kernel.is_in_layer)
    weights = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert layer == weights + 8 * 512 * 2 * 4096 * 2
    assert sum(kernel.num_bytes for kernel in kernels if not kernel.is_in_layer) == 2 * 32000 * 4096
    int8 = kernels_of_step(Step(shape=SHAPES["llama2-7b"], weights="int8", batch=1), 90)
    assert sum(k.num_bytes for k in int8 if k.operation == "gate_up") == 2 * 4096 * 11008


def test_fewer_bytes_in_flight_slow_a_step_below_the_limit(in_flight: dict[str, float]) -> None:
    """Fewer bytes in flight make a step slower, and the limit is never reached."""
    times = []
    for each in (8, 16, 64):
        in_flight["in_flight"] = each * 1024
        kernels = kernels_of_step(Step(shape=SHAPES["llama2-7b"], batch=1), 90)
        times.append(step_us(kernels, H200, 32))
        assert limit_us(kernels, H200, 32) < times[-1]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[1]  # waiting is nearly all of the time


def test_end_of_a_grid_has_less_under_way() -> None:
    """Programs behind the last full wave read at the rate of what they alone have under way."""
    kernel = Kernel("gate_up", True, 1e9, 64 * 1024, pieces=2 * 132 * 4, places=4)
    full = kernel.limits_us(H200)["memory"]
    assert full == pytest.approx(1e3 / H200.read_tbs(64 * 1024))
    half = replace(kernel, pieces=66, places=1).limits_us(H200)["memory"]
    assert half == pytest.approx(1e3 / H200.read_tbs(32 * 1024))
    one_more = replace(kernel, pieces=2 * 132 * 4 + 1).limits_us(H200)["memory"]
    latency = H200.latency / H200.clock_ghz / 1e3
    piece = 1e9 / (2 * 132 * 4 + 1)
    alone = piece / (64 * 1024 / 4) * latency
    assert one_more == pytest.approx(full * (1 - 1 / (2 * 132 * 4 + 1)) + alone, rel=0.01)


@pytest.mark.parametrize(("context", "turns"), [(64, 0), (512, 1), (2048, 1), (8192, 4), (32768, 4)])
def test_splits_of_a_long_row_meet_in_turns(context: int, turns: int) -> None:
    """What its last program puts together comes on top of reading."""
    kernels = kernels_of_step(Step(shape=SHAPES["llama3-8b"], batch=1, context=context), 90)
    (attention,) = (kernel for kernel in kernels if kernel.operation == "attention")
    assert attention.turns == turns
    met = attention.microseconds(H200) - replace(attention, turns=0).microseconds(H200)
    assert met == pytest.approx(turns * TURN_US)


def test_many_instructions_a_byte_are_a_limit_of_their_own(in_flight: dict[str, float]) -> None:
    in_flight["instructions"] = 0.5
    rows = report_of(Step(shape=SHAPES["llama2-7b"], weights="int8", batch=8), 32)["rows"]
    assert {row["bound_by"] for row in rows} == {"instructions"}
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 8 * 512 * 2 * 4096 * 2  # int8 and entries of two bytes
    cycles = 0.5 * layer / (132 * 4 * 0.65)
    found = next(row for row in rows if row["device"] == "H200" and row["layers"] == 32)
    assert found["step_us"] == pytest.approx(32 * cycles / 1755, rel=0.1)


def test_int8_prompt_is_read_as_stored_and_is_about_as_fast() -> None:
    """An int8 prompt reads weights as stored and takes about as long as in bfloat16."""
    times = {}
    for weights in ("bf16", "int8"):
        kernels = kernels_of_step(Step(shape=SHAPES["llama2-7b"], weights=weights, batch=128, is_prompt=True), 90)
        each = 2 if weights == "bf16" else 1
        read = sum(kernel.num_bytes for kernel in kernels if kernel.is_in_layer)
        assert read == each * (4 * 4096 * 4096 + 3 * 4096 * 11008)
        products = sum(kernel.products for kernel in kernels if kernel.is_in_layer)
        assert products == 128 * 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
        times[weights] = step_us(kernels, H200, 32)
    assert times["int8"] < 1.2 * times["bf16"]


def test_8_bit_kv_is_half_the_bytes_with_scales_and_a_launch() -> None:
    """KV of 8 bits is half of the bytes and its scales, and costs a launch more."""
    steps = (Step(shape=SHAPES["llama2-7b"], batch=64, cache=cache) for cache in ("auto", "fp8"))
    wide, narrow = (list(step_work(step)) for step in steps)
    read = [next(work.num_bytes for work in works if work.operation == "attention") for works in (wide, narrow)]
    assert read == [64 * 512 * 2 * 32 * 128 * 2, 64 * 512 * 2 * 32 * (128 + 4)]
    assert len(narrow) == len(wide) + 1


def test_a_step_of_half_the_layers_takes_half_and_the_head() -> None:
    kernels = kernels_of_step(Step(shape=SHAPES["llama2-7b"], batch=1), 90)
    head = step_us(kernels, H200, 0)
    assert step_us(kernels, H200, 16) - head == pytest.approx((step_us(kernels, H200, 32) - head) / 2)
    rows: list[dict[str, Any]] = report_of(Step(shape=SHAPES["llama2-7b"], batch=1), 32)["rows"]
    assert [row["layers"] for row in rows if row["device"] == "H200"] == [32, 24, 16, 8]
    assert all(0 < row["share_of_bandwidth"] < row["share_of_limit"] < 1 for row in rows)


def test_top_p_threshold_reads_logits_thrice_and_adds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling with a threshold reads logits three times and adds up each token once."""
    compiled: list[str] = []
    monkeypatch.setattr(
        ahead_of_time, "machine_code_of", lambda launch, arch: compiled.append(launch.kernel.__name__) or ""
    )
    kernels = kernels_of_step(Step(shape=SHAPES["llama3-8b"], batch=8, is_sampled=True), 90)
    choosing = [kernel for kernel in kernels if kernel.operation == "sample"]
    assert [kernel.num_bytes for kernel in choosing] == 3 * [8 * 128256 * 4] + [0]
    assert sum(kernel.additions for kernel in choosing) == 8 * 128256
    assert compiled == ["_settle_kernel"]
    assert not any(kernel.is_in_layer for kernel in choosing)
    likeliest = kernels_of_step(Step(shape=SHAPES["llama3-8b"], batch=8), 90)
    assert step_us(kernels, H200, 32) > step_us(likeliest, H200, 32)


def test_what_is_printed_and_written_says_it_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_model.main(["--shape", "tiny", "--layers", "4", "--sampled", "--json", str(tmp_path / "model.json")])
    printed = capsys.readouterr().out
    assert "not measured, an upper bound" in printed
    assert "sampled" in printed
    assert "0.57 to 0.82" in printed
    assert "SGLang" in printed
    assert json.loads((tmp_path / "model.json").read_text())["is_model"] is True


def test_a_figure_of_others_stands_where_there_is_one() -> None:
    assert published_shares("int4", 1) == (0.30, 0.30)
    assert published_shares("int4", 64) is None
    assert published_shares("fp8", 1) is None


def test_figure_of_saved_results_compiles_nothing_says_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of saved results compiles nothing and says that it is a model."""
    plots = pytest.importorskip("d3engine.research.plots")
    pytest.importorskip("matplotlib")
    written = tmp_path / "model.json"
    gpu_model.main(["--shape", "tiny", "--layers", "4", "--json", str(written)])
    drawn: list[Any] = []

    def keep(figure: Any, path: str, title: str) -> None:
        drawn.append(figure)
        assert "not measured" in title

    monkeypatch.setattr(plots, "save_figure", keep)
    monkeypatch.delattr(ahead_of_time, "needs")
    gpu_model.main(["--of", str(written), str(written), "--plot", str(tmp_path / "model.png")])
    rows = json.loads(written.read_text())["rows"]
    for axes in drawn[0].axes:
        assert [line.get_label() for line in axes.lines[::2]] == ["H100", "H200", "B200"]
        for nth, row in enumerate(row for row in rows if row["device"] == "H100"):
            assert axes.lines[0].get_ydata()[nth] == pytest.approx(row["step_us"] / 1e3)
            assert axes.lines[1].get_ydata()[nth] < axes.lines[0].get_ydata()[nth]


def test_batch_invariance_passes_one_row_of_64_and_spares_torch() -> None:
    """For batch invariance one row passes by 64 at a time, and PyTorch computes nothing."""
    steps = (Step(shape=SHAPES["llama2-7b"], batch_invariant=fixed) for fixed in (False, True))
    few, fixed = (kernels_of_step(step, 90) for step in steps)
    assert sum(kernel.num_bytes for kernel in few) == sum(kernel.num_bytes for kernel in fixed)
    assert sum(kernel.row_bytes for kernel in fixed) > 3 * sum(kernel.row_bytes for kernel in few)
    works = step_work(Step(shape=SHAPES["llama2-7b"], batch=512, is_prompt=True, batch_invariant=True))
    assert [work.operation for work in works if work.launch is None] == ["attention"]

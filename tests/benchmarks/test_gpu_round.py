"""The rehearsal of the GPU round runs to its end on a CPU, and its file has every figure; no time is judged here.

Nor is any taken: the clock of these tests moves with the work, so that they pass on a machine of any speed and load.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import gpu_round
from benchmarks.gpu import arrivals, common, end_to_end, kernels, models, peers
from benchmarks.gpu import tests as tests_of_the_round
from benchmarks.gpu.cases import EPS, TINY, Case, Draw, cases, quantized_cases
from benchmarks.gpu.common import Round, time_limit
from benchmarks.gpu.plain_llama import PlainLlama, compiled
from benchmarks.gpu.tests import counts
from d3engine.depth import D3, FullDepth
from d3engine.kernels import reference
from d3engine.model.config import QUANTIZATION_SCHEMES
from d3engine.scheduling.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
HERE = Round(torch.device("cpu"), True, 1e6)  # this clock starts now, so its end must be out of reach


@dataclass
class Clock:
    """Stands while nothing is done: moves with each look, with each step of an engine, and where somebody sleeps."""

    now: float = 0.0

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def set_clock(patch: pytest.MonkeyPatch) -> Clock:
    """Whoever asks for the time in a round, or in the engine, asks the clock that is returned."""
    clock = Clock()
    schedule = Scheduler.schedule

    def timed_schedule(scheduler: Scheduler) -> Any:
        clock.now += 1e-2
        return schedule(scheduler)

    for module in ("arrivals", "common", "peers"):
        patch.setattr(f"benchmarks.gpu.{module}.time", clock)
    patch.setattr("benchmarks.gpu_round.time", clock)
    patch.setattr("d3engine.text.output.time", clock)
    patch.setattr(Scheduler, "schedule", timed_schedule)
    return clock


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, interpreter: None) -> Path:
    """What one rehearsal has written: all parts in this process, whose interpreter of Triton is there already."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process: a rehearsal is for machines without a GPU, or without Triton")
    file = tmp_path_factory.mktemp("round") / "round.json"
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch)
        patch.setattr(gpu_round, "run_apart", gpu_round.run_here)
        patch.setattr(peers, "COMPILE_LIMIT_S", 1e6)
        patch.setattr(tests_of_the_round, "TIMEOUT_S", 1e6)
        assert gpu_round.main(["--smoke", "--budget=1e6", f"--out={file}"]) == 0
    return file


@pytest.fixture(scope="module")
def report(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_command_runs_a_part_in_a_process_of_its_own_and_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    command = [sys.executable, "-m", "benchmarks.gpu_round", "--smoke", "--parts=device", f"--out={file}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--budget=1e6"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads(file.read_text())["parts"].values()
    assert part["status"] == "done"
    assert list(part["ceilings"]) == ["copy", "read", "matmul"]


def test_every_part_ends(report: dict[str, Any]) -> None:
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    assert statuses == dict.fromkeys(gpu_round.PARTS, "done")
    assert not any("stopped" in part or "earlier_modes" in part for part in report["parts"].values())
    assert report["rehearsal"] is True
    assert str(ROOT) not in json.dumps(report)


def test_ceilings_are_measured_twice(report: dict[str, Any]) -> None:
    ceilings = report["parts"]["device"]["ceilings"]
    assert list(ceilings) == ["copy", "read", "matmul"]
    for row in ceilings.values():
        assert row["rates"] == [row["amount"] / seconds for seconds in row["seconds"]]
        assert len(row["rates"]) == 2


def test_every_operation_is_near_float64(report: dict[str, Any]) -> None:
    found = report["parts"]["kernels"]
    assert found["triton"] == "interpreted, not timed"
    operations = {row["operation"] for row in found["rows"]}
    assert {"paged_attention 9", "linear_residual down", "sample, cuts and penalties"} <= operations
    assert len(found["rows"]) == 2 * 17 + len(QUANTIZATION_SCHEMES) * 7
    for row in found["rows"]:
        for implementation in ("reference", "triton"):
            errors = row[implementation].get("relative_error", []) + row[implementation].get("tokens_that_differ", [])
            assert errors
            assert max(errors) < 2e-5, (row["operation"], implementation)
        assert row["bytes_moved"] > 0
        draws = row["operation"].startswith(("sample", "lm_head_sample"))
        assert ("by_torch" in row) is (draws and "int" not in row["operation"])


def test_every_operation_of_the_package_has_a_case() -> None:
    names = [name for name in triton_operations() if not name.endswith("attention_inputs")]  # made of others' inputs
    operations = {case.operation.split()[0].rstrip(",") for case in cases(TINY[0], 1, HERE)}
    assert operations == set(names)


def triton_operations() -> list[str]:
    """The public names of the package, which cannot be imported without Triton."""
    source = (ROOT / "kernels/triton/__init__.py").read_text(encoding="utf-8")
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(names)


@pytest.mark.parametrize("operation", ["sample", "sample, cuts", "sample, cuts and penalties", "lm_head_sample"])
def test_torchs_own_draw_takes_tokens_that_ours_may_take(operation: str) -> None:
    (case,) = (case for case in cases(TINY[0], 3, HERE) if case.operation == operation)
    if "logits" not in case.inputs:
        assert case.by_torch is not None
        drawn = case.by_torch(case.inputs | {"temperature": torch.full((3,), 1e-4)})
        x, norm, weight = (case.inputs[name] for name in ("x", "norm", "weight"))
        assert torch.equal(drawn, reference.lm_head(x, norm, EPS, weight).argmax(dim=-1))  # type: ignore[arg-type]
        return
    assert case.by_torch is not None
    ours = [case.call(reference, case.inputs | {"steps": torch.full((3,), i)}, None)[0] for i in range(200)]
    theirs = [case.by_torch(case.inputs) for _ in range(200)]
    for row in range(3):
        seen, drawn = (Counter(int(tokens[row]) for tokens in found) for found in (ours, theirs))
        frequent = {token for token, count in seen.items() if count > 20}
        assert frequent <= set(drawn)
        if "cuts" in operation:
            assert len(drawn) < 40


def every_case() -> list[Case]:
    return [
        *cases(TINY[0], 3, HERE),
        *(case for s in QUANTIZATION_SCHEMES for case in quantized_cases(TINY[0], 3, HERE, s)),
    ]


def test_measuring_leaves_the_inputs_as_they_were() -> None:
    for case in every_case():
        before = {name: value.clone() for name, value in case.inputs.items() if isinstance(value, torch.Tensor)}
        row: dict[str, Any] = {}
        kernels.measure(row, case, HERE)
        for name, tensor in before.items():
            assert torch.equal(case.inputs[name], tensor), (case.operation, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("columns", [128, 200])
def test_a_random_quantized_matrix_is_of_the_size_of_a_float_one(scheme: str, columns: int) -> None:
    matrix = Draw(HERE).matrix(300, columns, scheme)
    assert tuple(matrix.shape) == (300, columns)
    values = matrix.dequantize(torch.float64)  # type: ignore[union-attr]
    assert float(values.square().mean().sqrt()) == pytest.approx(columns**-0.5, rel=0.05)


def test_a_wrong_kernel_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in cases(TINY[0], 3, HERE) if case.operation == "gate_up")
    exact = case.results(reference, case.inputs)
    assert max(kernels._errors(case, reference, exact)["relative_error"]) == 0
    monkeypatch.setattr(reference, "gate_up", lambda *arguments: exact[0] * 1.01)
    assert kernels._errors(case, reference, exact)["relative_error"] == [pytest.approx(0.01, rel=0.01)]


@pytest.mark.parametrize("part", ["decode", "llama3", "quantized"])
def test_depths_lie_on_a_line_and_d3_is_held_to_its_bound(report: dict[str, Any], part: str) -> None:
    for model in report["parts"][part]["models"]:
        first = model["settings"][0]
        full, *less = first["depths"]
        assert [row["depth"] for row in first["depths"]] == [8, 6, 4]
        kv = sum(2 * 8 * 32 * 4 * (first["context"] + i) for i in range(1, first["tokens"])) / (first["tokens"] - 1)
        assert full["bytes_a_step"] == pytest.approx(8 * model["layer_bytes"] + model["head_bytes"] + kv)
        assert [row["mean_layers"] for row in less] == [6, 4]
        assert set(first["fit"]) == {"layer_s", "fixed_s", "over_the_line", "within_the_gate"}
        assert first["noise"] >= 0
        for row in first["schedules"]:
            assert row["layer_bound"] == pytest.approx(full["bytes_a_step"] / row["bytes_a_step"])
            assert row["layer_bound"] > 1
            assert row["realisation"] == pytest.approx(full["step_s"] / row["step_s"] / row["layer_bound"])
        if "check" in model:
            assert model["check"]["tokens"] == 2 * end_to_end.CHECKED_TOKENS
            assert model["check"]["largest_gap"] < 1e-4


def test_a_line_is_found_and_a_slow_depth_misses_the_gate() -> None:
    rows = [{"depth": depth, "step_s": 1e-3 + depth * 1e-4} for depth in (32, 28, 24, 20, 16)]
    found = end_to_end.fit(rows)
    assert (found["layer_s"], found["fixed_s"]) == (pytest.approx(1e-4), pytest.approx(1e-3))
    assert found["within_the_gate"] is True
    rows[2]["step_s"] *= 1.2
    assert end_to_end.fit(rows)["within_the_gate"] is False


def test_a_batch_of_two_depths_is_held_to_what_uniform_batches_promise(report: dict[str, Any]) -> None:
    first, setting = report["parts"]["decode"]["models"][0]["settings"]
    found = setting["mixed"]
    assert "mixed" not in first
    assert (found["rows"], found["depths"]) == ([2, 1], [8, 4])
    assert found["uniform_s"] == [row["step_s"] for row in setting["depths"]]
    assert found["promised_s"] == found["uniform_s"][1] + found["half_s"][0] - found["half_s"][1]
    median = sorted(found["calls_s"])[1]
    assert found["step_s"] == pytest.approx((median - setting["prompt_s"]) / (setting["tokens"] - 1))
    assert found["within_the_gate"] is (found["step_s"] <= end_to_end.GATE * found["promised_s"])


def test_a_slow_batch_of_two_depths_misses_the_gate() -> None:
    # 32 and 16 layers: 3 us a layer for all rows and 2 for half of them; head 10 and 8.
    uniform, half = [106.0, 58.0], [72.0, 40.0]
    found = end_to_end.mixture(90.0 * 1.04, uniform, half)
    assert (found["promised_s"], found["over_the_promise"]) == (90.0, pytest.approx(1.04))
    assert found["over_the_deepest"] == pytest.approx(90 * 1.04 / 106)
    assert found["within_the_gate"] is True
    assert end_to_end.mixture(90.0 * 1.06, uniform, half)["within_the_gate"] is False
    nonsense = end_to_end.mixture(1.0, [2.0, 1.0], [1.0, 3.0])
    assert (nonsense["over_the_promise"], nonsense["within_the_gate"]) == (None, False)


def test_rows_that_run_other_layers_than_they_were_to_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with models.random_model("llama2-7b", HERE) as model:
        prompts = models.prompts_for(model.config, 2, 5)
        engine = models.new_engine(model, HERE, max_num_seqs=2, max_model_len=32, kv_tokens=64)
        mixed = [end_to_end.fixed_depth(depth, 8) for depth in (8, 4)]
        assert len(end_to_end._calls(engine, model, prompts, mixed, 3, HERE)) == end_to_end.REPEATS
        monkeypatch.setattr(models.Engine, "generate", lambda *_, **__: engine_answer)
        engine_answer = [SimpleNamespace(outputs=[SimpleNamespace(depths=[8, 8, 8])])] * 2
        with pytest.raises(RuntimeError, match=r"were to run .*\[8, 4, 4\].* and ran .*\[8, 8, 8\]"):
            end_to_end._calls(engine, model, prompts, mixed, 3, HERE)
        engine.close()


@pytest.mark.parametrize("depth", [32, 28, 24, 20, 16])
def test_a_fixed_depth_runs_its_first_layers(depth: int) -> None:
    schedule = end_to_end.fixed_depth(depth, 32).schedule(32)
    assert schedule.depths(5).tolist() == [32] + [depth] * 4


def test_wrong_tokens_fail_the_part() -> None:
    card = {"name": "m", "scheme": "bf16", "check": {"largest_gap": 2 * end_to_end.TIE}}
    with pytest.raises(RuntimeError, match="m bf16 are not those of plain PyTorch"):
        end_to_end.judge({"models": [card]})


def test_peers_answer_with_the_tokens_of_the_engine(report: dict[str, Any]) -> None:
    found = report["parts"]["peers"]
    assert [(case["batch"], case["context"]) for case in found["cases"]] == [(2, 12)]
    for case in found["cases"]:
        assert len(case["systems"]) == 5
        for name, system in case["systems"].items():
            assert len(system["call_s"]) == 3
            if "D3" not in name:
                assert system["rows_with_equal_tokens"] == case["batch"], name


def test_every_strategy_meets_the_same_arrivals(report: dict[str, Any]) -> None:
    rows = report["parts"]["arrivals"]["rows"]
    assert [(row["admission"], row["policy"]["policy"]) for row in rows] == [
        ("Immediate()", "full"),
        ("Immediate()", "d3"),
        ("Waves(steps=4)", "full"),
        ("Waves(steps=4)", "d3"),
    ]
    assert len({(row["requests_per_s"], row["arrived"]) for row in rows}) == 1


def test_arrivals_are_timed_from_their_planned_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "UNCOUNTED", 0.0)
    set_clock(monkeypatch)
    traffic = arrivals.Traffic((4, 6), (3, 5), slots=2)
    with models.random_model("llama2-7b", HERE) as model:
        engine = models.new_engine(model, HERE, max_num_seqs=2, max_model_len=32, kv_tokens=64)
        engine.generate([[3, 4]], models.params_for(D3(0.5, 0.5), 3), use_tqdm=False)
        coming = [replace(a, time=0.2) for a in arrivals.poisson(traffic, 200.0, 0.05, 256)][:3]
        watched = arrivals.play(engine, coming, D3(0.5, 0.5), 60.0)
        found = arrivals.summarise(watched, coming, 60.0)
        assert not engine.has_unfinished_requests()
        engine.close()
    assert (found["arrived"], found["unfinished"]) == (3, 0)
    assert watched.tokens == sum(a.tokens for a in coming)
    assert all(len(output.outputs[0].token_ids) == arrival.tokens for arrival, output in watched.finished)
    assert found["first_token_s"]["median"] > 0
    assert found["mean_layers"] < 8


def test_poisson_arrivals_come_at_their_rate() -> None:
    found = arrivals.poisson(arrivals.Traffic(), 50.0, 40.0, 100)
    assert len(found) == pytest.approx(2000, rel=0.1)
    assert all(a.time < b.time for a, b in pairwise(found))
    assert all(32 <= len(a.prompt) <= 512 and 64 <= a.tokens <= 256 for a in found)


def test_plain_llama_compiles_whole_and_has_the_tokens_of_the_engine() -> None:
    with models.random_model("llama2-7b", HERE) as model:
        prompts = models.prompts_for(model.config, 2, 11)
        engine = models.new_engine(model, HERE, max_num_seqs=2, max_model_len=32, kv_tokens=64)
        outputs = engine.generate(prompts, models.params_for(FullDepth(), 9), use_tqdm=False)
        plain = PlainLlama(model.config, model.weights, batch=2, length=20)
        expected = [output.outputs[0].token_ids for output in outputs]
        assert plain.generate(torch.tensor(prompts), 9, compiled(plain, backend="eager")) == expected
        assert plain.generate(torch.tensor(prompts), 9, plain) == expected
        engine.close()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def fails(found: dict[str, Any], current: Round) -> None:
    found["so_far"] = 1
    raise ArithmeticError("on purpose")


def works(found: dict[str, Any], current: Round) -> None:
    found["left"] = current.left()


def run(names: list[str], current: Round, save: Any = lambda report: None) -> dict[str, Any]:
    report: dict[str, Any] = {"parts": {}}
    gpu_round.run_parts(report, names, current, gpu_round.run_here, lambda: save(report), Console(quiet=True))
    return report["parts"]  # type: ignore[no-any-return]


def test_a_part_that_fails_leaves_its_traceback_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"first": gpu_round.Part(fails, 1), "second": gpu_round.Part(works, 1)}
    monkeypatch.setattr(gpu_round, "PARTS", parts)
    saved: list[list[str]] = []
    first, second = run(["first", "second"], HERE, lambda report: saved.append(list(report["parts"]))).values()
    assert (first["status"], first["so_far"], second["status"]) == ("failed", 1, "done")
    assert "on purpose" in first["traceback"]
    assert saved == [["first"], ["first", "second"]]


def test_parts_share_the_time_and_leave_on_what_they_do_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now[0])
    now = [7.0]

    def takes_20_s(found: dict[str, Any], current: Round) -> None:
        works(found, current)
        now[0] += 20

    for module in (gpu_round, common):
        monkeypatch.setattr(module, "time", clock)
    parts = {name: gpu_round.Part(takes_20_s, share) for name, share in (("a", 1), ("b", 3), ("c", 1))}
    monkeypatch.setattr(gpu_round, "PARTS", parts)
    found = run(["a", "b", "c"], Round(torch.device("cpu"), True, 400.0, started=7.0))
    assert [part["left"] for part in found.values()] == [80, 380 * 3 / 4, 360]
    assert [part["part_seconds"] for part in found.values()] == [20] * 3


@pytest.mark.parametrize(("works_in", "tried"), [("eager", ["graphs"]), ("reference", ["graphs", "eager"])])
def test_an_engine_that_fails_is_run_in_the_next_mode(
    works_in: str, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_mode(found: dict[str, Any], current: Round) -> None:
        if current.mode != works_in:
            raise RuntimeError(f"not in {current.mode}")
        found["models"] = [{"calls_s": [1.0]}]

    monkeypatch.setattr(gpu_round, "PARTS", {"part": gpu_round.Part(run_mode, 1, "models")})
    found = run(["part"], HERE)["part"]
    assert found["status"] == "done"
    assert [earlier["mode"] for earlier in found["earlier_modes"]] == tried
    assert "not in graphs" in found["earlier_modes"][0]["traceback"]


def test_figures_are_kept_although_the_part_fails_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_mode(found: dict[str, Any], current: Round) -> None:
        found["models"] = [{"settings": [{"depths": [{"calls_s": [1.0]}]}], "mode": current.mode}]
        raise RuntimeError("later")

    monkeypatch.setattr(gpu_round, "PARTS", {"part": gpu_round.Part(run_mode, 1, "models")})
    found = run(["part"], HERE)["part"]
    assert (found["status"], found["models"][0]["mode"]) == ("failed", "graphs")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`apart(function)`: what `run_apart` hands back of a part whose process runs `function(name, round)`.

    The process is forked, so that it need not import everything anew, and knows `function`.
    """

    def call(function: Callable[[str, Round], object], limit: float = 1e6) -> dict[str, Any]:
        monkeypatch.setattr(gpu_round, "get_context", lambda _: multiprocessing.get_context("fork"))
        monkeypatch.setattr(gpu_round, "_run_and_leave", function)
        monkeypatch.setattr(gpu_round, "LEAST_S", limit)
        monkeypatch.setattr(gpu_round, "GRACE_S", 0.0)
        return gpu_round.run_apart("arrivals", Round(torch.device("cpu"), True, 0.0))

    return call


def test_a_part_whose_process_hangs_is_ended(apart: Callable[..., dict[str, Any]]) -> None:
    found = apart(lambda name, current: signal.pause(), limit=0.01)
    assert found["status"] == "failed"
    assert "was stopped after 0 s" in found["traceback"]


def test_what_a_part_had_found_is_kept_although_its_process_dies(apart: Callable[..., dict[str, Any]]) -> None:
    def dies(name: str, current: Round) -> None:
        current.keep({"so_far": 1})
        os._exit(3)

    found = apart(dies)
    assert (found["status"], found["so_far"]) == ("failed", 1)
    assert "died with exit code 3" in found["traceback"]


def test_a_part_can_be_sent_to_a_process_that_is_not_forked() -> None:
    function, current = pickle.loads(pickle.dumps((gpu_round._run_and_leave, HERE)))
    assert (function, current) == (gpu_round._run_and_leave, HERE)


def test_a_spent_budget_skips_parts() -> None:
    assert run(["device"], Round(torch.device("cpu"), True, 1.0))["device"]["status"] == "skipped"


def test_a_call_beyond_its_limit_raises() -> None:
    def call() -> None:
        seconds, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < seconds <= 1000
        os.kill(os.getpid(), signal.SIGALRM)  # as when they are over

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match="longer than 1000 s"), time_limit(1000):
        call()
    with time_limit(1000):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_files_of_several_calls_are_joined(file: Path, report: dict[str, Any], tmp_path: Path) -> None:
    parts = report["parts"]
    halves = [
        report | {"parts": {name: parts[name] for name in ("device", "tests", "decode")}},
        report | {"parts": {"device": parts["device"], "decode": {"status": "skipped"}, "peers": parts["peers"]}},
    ]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for half, path in zip(halves, files, strict=True):
        path.write_text(json.dumps(half))
    assert gpu_round.main(["--join", *map(str, files), f"--out={tmp_path / 'joined.json'}"]) == 0
    joined = json.loads((tmp_path / "joined.json").read_text())
    assert list(joined["parts"]) == ["device", "tests", "decode", "peers"]
    assert joined["parts"]["decode"]["models"] == parts["decode"]["models"]
    files[1].write_text(json.dumps(halves[1] | {"environment": report["environment"] | {"commit": "other"}}))
    with pytest.raises(ValueError, match="different commit"):
        gpu_round.join([str(path) for path in files])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("..F\n== 1 failed, 2 passed, 3 skipped in 4.05s ==\n", {"failed": 1, "passed": 2, "skipped": 3}),
        ("1 passed, 2 errors in 0.10s\n", {"passed": 1, "error": 2}),
        ("[gw0] [ 1%] PASSED tests/a\n[gw1] [ 2%] FAILED tests/b\n[gw1] PASSED tests/c", {"passed": 2, "failed": 1}),
        ("killed\n", {}),
    ],
)
def test_counts_are_read_from_the_end_of_the_output(output: str, expected: dict[str, int]) -> None:
    assert counts(output) == expected

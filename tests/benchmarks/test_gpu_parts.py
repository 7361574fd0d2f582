"""The parts of the GPU round one by one: what they measure is what is there, and what is wrong fails them."""

import ast
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from round_clock import HERE, ROOT, set_clock

from benchmarks.gpu import arrivals, end_to_end, kernels, models
from benchmarks.gpu.cases import EPS, TINY, Case, Draw, cases, quantized_cases
from benchmarks.gpu.common import Round
from benchmarks.systems import prompts_for
from d3engine.depth import D3
from d3engine.engine import resolve
from d3engine.kernels import reference
from d3engine.model.quantization_config import QUANTIZATION_SCHEMES

ON_GPU = replace(HERE, device=torch.device("cuda"))


class SizesOfGpu(Round):
    """A round on the CPU with what a GPU runs."""

    on_gpu = True
    dtype = torch.float32


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
        *(case for s in (*QUANTIZATION_SCHEMES, "Q4_0") for case in quantized_cases(TINY[0], 3, HERE, s)),
    ]


def test_measuring_leaves_the_inputs_as_they_were(interpreter: None) -> None:
    for case in every_case():
        before = {name: value.clone() for name, value in case.inputs.items() if isinstance(value, torch.Tensor)}
        row: dict[str, Any] = {}
        kernels.measure(row, case, HERE)
        for name, tensor in before.items():
            assert torch.equal(case.inputs[name], tensor), (case.operation, name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheme", "columns"),
    [*product(QUANTIZATION_SCHEMES, (128, 200)), *product((*HERE.blocks, *ON_GPU.blocks), (4096,))],
)
def test_a_random_quantized_matrix_is_of_the_size_of_a_float_one(scheme: str, columns: int) -> None:
    """In a scheme, or in blocks of a rehearsal and of a GPU."""
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


def test_a_line_is_found_and_a_slow_depth_misses_the_gate() -> None:
    rows = [{"depth": depth, "step_s": 1e-3 + depth * 1e-4} for depth in (32, 28, 24, 20, 16)]
    found = end_to_end.fit(rows)
    assert (found["layer_s"], found["fixed_s"]) == (pytest.approx(1e-4), pytest.approx(1e-3))
    assert found["within_the_gate"] is True
    rows[2]["step_s"] *= 1.2
    assert end_to_end.fit(rows)["within_the_gate"] is False


def test_a_slow_batch_of_two_depths_misses_the_gate() -> None:
    # 32 and 16 layers: 3 us per layer for all rows and 2 for half of them; head 10 and 8.
    uniform, half = [106.0, 58.0], [72.0, 40.0]
    found = end_to_end.mixture(90.0 * 1.04, uniform, half)
    assert (found["promised_s"], found["over_the_promise"]) == (90.0, pytest.approx(1.04))
    assert found["over_the_deepest"] == pytest.approx(90 * 1.04 / 106)
    assert found["within_the_gate"] is True
    assert end_to_end.mixture(90.0 * 1.06, uniform, half)["within_the_gate"] is False
    nonsense = end_to_end.mixture(1.0, [2.0, 1.0], [1.0, 3.0])
    assert (nonsense["over_the_promise"], nonsense["within_the_gate"]) == (None, False)


def test_rows_that_ran_other_layers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that run other layers than they were to are not timed."""
    with models.random_model("llama2-7b", HERE) as model:
        prompts = prompts_for(model.config, 2, 5)
        engine = models.new_engine(model, HERE, max_num_seqs=2, max_model_len=32, kv_tokens=64)
        mixed = [end_to_end.fixed_depth(depth, 8) for depth in (8, 4)]
        batch = end_to_end.Batch(engine, model, end_to_end.Setting(2, 5, tokens=3), prompts, HERE)
        assert len(batch.calls(mixed)) == end_to_end.REPEATS
        monkeypatch.setattr(models.Engine, "generate", lambda *_, **__: engine_answer)
        engine_answer = [SimpleNamespace(outputs=[SimpleNamespace(depths=[8, 8, 8])])] * 2
        with pytest.raises(RuntimeError, match=r"were to run .*\[8, 4, 4\].* and ran .*\[8, 8, 8\]"):
            batch.calls(mixed)
        engine.close()


@pytest.mark.parametrize("depth", [32, 28, 24, 20, 16])
def test_a_fixed_depth_runs_its_first_layers(depth: int) -> None:
    schedule = end_to_end.fixed_depth(depth, 32).schedule(32)
    assert schedule.depths(5).tolist() == [32] + [depth] * 4


def test_first_light_holds_the_prompts_of_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of tokens of a GPU, which are not those of a rehearsal, on a tiny model."""
    sizes = models.TINY | {"num_hidden_layers": 32, "max_position_embeddings": 4096}
    monkeypatch.setattr(models, "SHAPES", {"llama2-7b": sizes})
    set_clock(monkeypatch)
    report: dict[str, Any] = {}
    end_to_end.first_light(report, SizesOfGpu(HERE.device, False, HERE.budget))
    (card,) = report["models"]
    assert card["check"]["tokens"] == end_to_end.CHECKED_PROMPTS * end_to_end.CHECKED_TOKENS
    assert card["settings"][0]["depths"][0]["step_s"] > 0


def test_wrong_tokens_fail_the_part() -> None:
    card = {"name": "m", "scheme": "bf16", "check": {"largest_gap": 2 * end_to_end.TIE}}
    with pytest.raises(RuntimeError, match="m bf16 are not those of plain PyTorch"):
        end_to_end.judge({"models": [card]})


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


def test_arrivals_wait_for_no_capture_while_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs of both policies and every batch size are there before the first run."""
    monkeypatch.setattr(resolve, "executor_for", lambda *_: "graphs")
    set_clock(monkeypatch)
    report: dict[str, Any] = {}
    arrivals.run(report, HERE)
    captured = {row["graphs"][when]["graphs_captured"] for row in report["rows"] for when in ("before", "after")}
    assert len(captured) == 1
    assert captured != {0}
    depths = end_to_end.BBH.schedule(32).depths(2 * arrivals.CAPTURED_TOKENS).tolist()
    assert len(set(depths[arrivals.CAPTURED_TOKENS - 1 :])) == 1


def test_poisson_arrivals_come_at_their_rate() -> None:
    found = arrivals.poisson(arrivals.Traffic(), 50.0, 40.0, 100)
    assert len(found) == pytest.approx(2000, rel=0.1)
    assert all(a.time < b.time for a, b in pairwise(found))
    assert all(32 <= len(a.prompt) <= 512 and 64 <= a.tokens <= 256 for a in found)

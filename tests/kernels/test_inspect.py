"""Kernels compile for a GPU that is not there, and a spill is an error."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d3engine.kernels import inspect
from d3engine.kernels.ahead_of_time import load_widths
from d3engine.kernels.inspect import Usage
from d3engine.kernels.target import PROCESSORS, TARGETS

USAGE = Usage(
    arch=80,
    shape="tiny",
    weights="",
    operation="copy_entries",
    label="copy",
    grid=(1, 1),
    warps=4,
    registers=16,
    stack=0,
    local=0,
    shared=0,
    widest_load=16,
    wide_loads=0.5,
)
FAULTS = ("SPILLS", "DOES NOT FIT", "STARVES", "TOO EARLY")


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


COMPILING = """
import io, json
from contextlib import redirect_stdout
import torch
from d3engine.kernels.ahead_of_time import compile_launch, machine_code_of, needs
from d3engine.kernels.inspect import main
from d3engine.kernels.machine_code import before_the_wait, hottest_loop, instructions
from d3engine.kernels.triton import launches

def inspected(*options):
    with redirect_stdout(io.StringIO()) as out:
        assert main(["--shapes=tiny", "--arch=80", "--json", *options]) == 0
    return json.loads(out.getvalue())

def launch_of(shape, operation, label="", weights=""):
    found = launches.registered(launches.SHAPES[shape], torch.bfloat16, weights, [operation])
    return next(launch for _, own, launch in found if own == label or not label)

def needs_of(*launch, arch=90):
    return needs(launch_of(*launch), arch)

# Of numbers of rows one for each way to multiply, for Ampere: the gate compiles those of real models, for Hopper
# (.ci/check_kernels).
told = {"usages": inspected("--weights=bf16", "--operations=rms_norm,linear_residual", "--rows=1,16")}
told["spills only"] = inspected("--operations=linear_residual", "--rows=1", "--spills-only")
assert main(["--shapes=tiny", "--rows=3"]) == 2

told["waits"] = []
for launches.PROGRAMMATIC, arch in ((True, 90), (True, 80), (False, 90)):
    for name in ("rms_norm", "linear_residual"):
        ptx = compile_launch(launch_of("tiny", name, weights="int8"), arch).asm["ptx"]
        wait, first = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
        loads_before = ptx[:wait].count("ld.global") if wait >= 0 else 0
        early = before_the_wait(ptx) if wait >= 0 else []
        told["waits"].append([name, launches.PROGRAMMATIC, arch, wait >= 0, first >= 0, loads_before > 0, early])

decode, chunk = "decode, blocks of 16", "chunk of 512, blocks of 16"
told["row"] = needs_of("llama2-7b", "linear_residual", "down rows=1")
told["64 rows of int8"] = needs_of("llama2-7b", "linear_residual", "output rows=64", "int8")
told["heads of 16 channels"] = needs_of("small-heads", "paged_attention", decode)
told["8 bits"] = needs_of("llama3-8b", "paged_attention", f"{decode} in 8 bits")
told["group"] = needs_of("llama3-8b", "paged_attention", decode)
told["one head"] = needs_of("llama2-7b", "paged_attention", decode)
told["8 bits on Ada"] = needs_of("llama2-7b", "paged_attention", f"{chunk} in 8 bits", arch=89)
told["64 rows on Blackwell"] = needs_of("llama2-7b", "lm_head", "logits rows=64", arch=100)
chunk = launch_of("llama2-7b", "paged_attention", chunk)
loop = hottest_loop(instructions(machine_code_of(chunk, 90)))
told["chunk"] = [sum(one.operation.startswith(name) for one in loop) for name in ("FMUL", "FFMA", "MUFU.EX2")]
told["chunk"] += [chunk.arguments["PACKED_ROWS"] * chunk.arguments[name] // (32 * chunk.num_warps)
                  for name in ("TILE", "CHANNELS")]
launches.PROGRAMMATIC = True
told["8 rows early"] = needs_of("llama3-8b", "gate_up", "rows=8", "int8")
told["row early"] = needs_of("llama3-8b", "gate_up", "rows=1", "int8")
print(json.dumps(told))
"""


def run_compiling(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A process without the interpreter's flag: this one may have loaded Triton with it."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    result = subprocess.run([sys.executable, *command], env=given, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_compiling("-c", COMPILING).stdout)
    return found


@needs_triton
def test_kernels_compile_for_amd_without_ptx_and_fit() -> None:
    """PTX in a kernel is an error of LLVM's assembler that Triton passes by: it says so on the standard error."""
    if importlib.util.find_spec("triton.backends.amd") is None:
        pytest.skip("this Triton has no back end of AMD")
    asked = ["--shapes=tiny", "--arch=gfx942,gfx950", "--weights=int4,int8,Q6_K", "--operations=linear_residual"]
    result = run_compiling("-m", "d3engine.kernels.inspect", *asked, "--rows=1,16", "--json")
    assert "error" not in result.stderr
    found = json.loads(result.stdout)
    assert {usage["arch"] for usage in found} == {"gfx942", "gfx950"}
    assert all(usage["registers"] > 0 and usage["fits"] for usage in found)


AGAIN = """
from unittest.mock import patch
import torch
from d3engine.kernels import ahead_of_time
from d3engine.kernels.triton import launches

found = launches.registered(launches.SHAPES["tiny"], torch.bfloat16, "", ["linear_residual"])
launch = next(launch for _, label, launch in found if label == "down rows=1")
first = ahead_of_time.needs(launch, 80)
assert launch.streams and first["in_flight"] > 0
with patch.object(ahead_of_time.subprocess, "run", None):
    assert ahead_of_time.needs(launch, 80) == first
print("the same")
"""


@needs_triton
def test_inspection_started_again_disassembles_nothing_anew(tmp_path: Path) -> None:
    """What an inspection that was cut off has compiled and disassembled is in Triton's cache."""
    assert run_compiling("-c", AGAIN, TRITON_CACHE_DIR=str(tmp_path)).stdout == "the same\n"


def test_inspection_tells_each_tenth_of_its_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An inspection takes long: it says on the standard error how far it is."""
    monkeypatch.setattr(inspect, "_works", [None] * 25)
    assert len(list(inspect._told({} for _ in range(25)))) == 25
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 10
    assert (told[0], told[-1]) == ("3 of 25 kernels", "25 of 25 kernels")


def test_target_keeps_options_and_stages_of_its_back_end() -> None:
    """A target keeps the options and the stages that its back end has."""
    wanted = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}
    assert TARGETS[90].options(wanted) == wanted
    assert TARGETS["gfx942"].options(wanted) == {"num_warps": 4}
    assert [TARGETS[arch].stages(5) for arch in (80, 89, "gfx942", "gfx950")] == [5, 5, 2, 5]
    assert [TARGETS[arch].has_programmatic_launch for arch in (89, 90, 120, "gfx942")] == [False, True, True, False]


@needs_triton
def test_kernels_of_a_tiny_model_compile_without_spills(told: dict[str, Any]) -> None:
    usages = told["usages"]
    kinds = {(usage["operation"], usage["weights"]) for usage in usages}
    assert kinds == {("rms_norm", ""), ("linear_residual", "bf16")}
    assert all(usage["registers"] > 0 and not usage["spills"] and usage["fits"] for usage in usages)
    assert {usage["label"].split("rows=")[-1] for usage in usages if usage["weights"]} == {"1", "16", "512"}
    (down,) = [usage for usage in usages if usage["label"] == "down rows=16"]
    assert down["widest_load"] == 16
    assert all(usage["wide_loads"] > 0.8 for usage in usages if usage["label"] in ("down rows=1", "down rows=16"))


@needs_triton
def test_kernels_under_pdl_wait_after_their_first_weights(told: dict[str, Any]) -> None:
    """With the switch on kernels wait for the one before after their first weights."""
    assert told["waits"] == [
        ["rms_norm", True, 90, True, True, False, []],
        ["linear_residual", True, 90, True, True, True, []],
        ["rms_norm", True, 80, False, False, False, []],
        ["linear_residual", True, 80, False, False, False, []],
        ["rms_norm", False, 90, False, False, False, []],
        ["linear_residual", False, 90, False, False, False, []],
    ]


@needs_triton
def test_a_single_row_keeps_enough_of_its_weights_in_flight(told: dict[str, Any]) -> None:
    """Under PDL a step of small weights is taken before the loop; of one step there, nothing would be fetched ahead."""
    assert told["row"]["streams"]
    assert told["row"]["in_flight"] > 2 * inspect.LEAST_IN_FLIGHT
    assert told["row early"]["in_flight"] >= inspect.LEAST_IN_FLIGHT


@needs_triton
def test_group_of_heads_is_combined_at_once(told: dict[str, Any]) -> None:
    """The last program of a row puts the heads of a group together at once."""
    # Of 64 splits in four turns: head after head it waited at 136 barriers for a group of four.
    assert 0 < told["group"]["barriers"] <= 24 < inspect.MOST_BARRIERS


@needs_triton
def test_attention_finds_its_next_split_without_waiting(told: dict[str, Any]) -> None:
    """A split that is searched for is behind 2 loads and 8 barriers for a group, and behind 4 and 11 for one head."""
    assert (told["group"]["waits"], told["group"]["barriers_before"]) == (0, 0)
    assert told["one head"]["waits"] <= inspect.MOST_WAITS
    assert told["one head"]["barriers_before"] < inspect.MOST_BARRIERS_BEFORE


@needs_triton
@pytest.mark.parametrize("what", ["64 rows of int8", "8 bits"])
def test_small_values_become_floats_without_being_moved(told: dict[str, Any], what: str) -> None:
    """Weights of many rows at a byte in five threads' instructions would be put together byte by byte."""
    # So would entries of 8 bits that come from shared memory: 0.2 instructions a byte.
    assert 0.05 < told[what]["instructions"] < 0.15


@needs_triton
@pytest.mark.parametrize("what", ["8 rows early", "heads of 16 channels", "8 bits on Ada", "64 rows on Blackwell"])
def test_kernels_that_once_spilled_have_registers(told: dict[str, Any], what: str) -> None:
    """What is loaded before the wait, small heads in a group, chunks over 8 bits and logits of 64 rows."""
    assert told[what]["stack"] == 0


@needs_triton
def test_a_score_of_a_chunk_takes_a_multiply_add_and_a_power(told: dict[str, Any]) -> None:
    """What else is multiplied is what was attended so far, and a few numbers of each row."""
    multiplied, added, raised, scores, attended = told["chunk"]
    assert scores <= added < scores + 10
    assert scores <= raised < scores + 10
    assert attended <= multiplied < attended + 10


@needs_triton
def test_what_is_in_flight_can_be_left_out_and_the_rest_stays(told: dict[str, Any]) -> None:
    wanted = [usage for usage in told["usages"] if usage["weights"] == "bf16" and "rows=16" not in usage["label"]]
    assert any(usage["streams"] and usage["in_flight"] for usage in wanted)
    assert told["spills only"] == [usage | {"streams": False, "in_flight": 0, "instructions": 0.0} for usage in wanted]


STARVING: dict[str, Any] = {"streams": True, "grid": (1, 500), "weights": "int8", "label": "down rows=32"}


@pytest.mark.parametrize(
    ("changes", "options", "code", "said"),
    [
        ({"shared": 163 * 1024}, [], 0, ["163.0 of 163"]),
        ({"shared": 163 * 1024 + 1}, [], 1, ["DOES NOT FIT"]),
        ({"registers": 64}, ["--shapes", "tiny"], 0, []),
        ({"stack": 64}, ["--shapes", "tiny"], 1, ["SPILLS"]),
        ({"local": 64}, ["--shapes", "tiny"], 1, ["SPILLS"]),
        (STARVING | {"in_flight": inspect.LEAST_IN_FLIGHT}, [], 0, []),
        (STARVING | {"in_flight": inspect.LEAST_IN_FLIGHT - 1}, [], 1, ["STARVES"]),
        (STARVING | {"streams": False}, [], 0, []),
        (STARVING | {"grid": (1, PROCESSORS - 1)}, [], 0, []),
        (STARVING | {"in_flight": 2**17, "too_early": ("ld.global.b32 %r1, [ %rd3 + 0 ];",)}, [], 1, ["TOO EARLY"]),
        (STARVING, ["--may-starve", "int8:32"], 0, ["STARVES"]),
        (STARVING | {"weights": "int4"}, ["--may-starve", "int8:32"], 1, ["STARVES"]),
        (STARVING | {"label": "rows=3"}, ["--may-starve", "int8:32"], 1, ["STARVES"]),
        (STARVING | {"stack": 64}, ["--may-starve", "int8:32"], 1, ["SPILLS", "STARVES"]),
    ],
)
def test_faults_of_a_kernel_are_named_and_make_the_exit_code(
    changes: dict[str, Any],
    options: list[str],
    code: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Spills, too little shared memory, starving and loading too early; weights that may starve fail for the rest."""
    monkeypatch.setattr(inspect, "inspect", lambda *arguments: iter([replace(USAGE, **changes)]))
    assert inspect.main(options) == code
    printed = capsys.readouterr().out
    assert [name for name in FAULTS if name in printed] == [name for name in said if name in FAULTS]
    assert all(words in printed for words in said)


def test_widths_of_loads_are_read_from_ptx() -> None:
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_first.L2::cache_hint.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ], %rd2;
    ld.global.b16 { %rs1 }, [ %rd3 + 0 ];
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd4 + 0 ], 0x10, %r6;
    st.global.v4.b32 [ %rd5 + 0 ], { %r1, %r2, %r3, %r4 };
    """
    assert load_widths(ptx) == {16: 2, 8: 1, 2: 1}

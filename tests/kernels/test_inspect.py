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


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


COMPILING = """
import torch
from d3engine.kernels.ahead_of_time import compile_launch, machine_code_of, needs
from d3engine.kernels.inspect import main
from d3engine.kernels.machine_code import before_the_wait, hottest_loop, instructions
from d3engine.kernels.triton import launches

# Of numbers of rows one for each way to multiply, for Ampere: the gate compiles those of real models, for Hopper
# (.ci/check_kernels).
operations = ["--operations=rms_norm,linear_residual", "--rows=1,16"]
assert main(["--shapes=tiny", "--arch=80", "--weights=bf16", *operations, "--json"]) == 0
print("\\nALONE")
assert main(["--shapes=tiny", "--arch=80", "--operations=linear_residual", "--rows=1", "--spills-only", "--json"]) == 0
assert main(["--shapes=tiny", "--rows=3"]) == 2
print("\\nPDL")

for switch, arch in ((True, 90), (True, 80), (False, 90)):
    launches.PROGRAMMATIC = switch
    for name in ("rms_norm", "linear_residual"):
        found = list(launches.registered(launches.SHAPES["tiny"], torch.bfloat16, "int8", [name]))
        ptx = compile_launch(found[0][2], arch).asm["ptx"]
        wait, first = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
        loads_before = ptx[:wait].count("ld.global") if wait >= 0 else 0
        early = before_the_wait(ptx) if wait >= 0 else []
        print(name, switch, arch, wait >= 0, first >= 0, loads_before > 0, early)

print("\\nFLIGHT")
found = list(launches.registered(launches.SHAPES["llama2-7b"], torch.bfloat16, "", ["linear_residual"]))
down = next(launch for _, label, launch in found if label == "down rows=1")
print(down.streams, needs(down, 90)["in_flight"])
found = launches.registered(launches.SHAPES["llama2-7b"], torch.bfloat16, "int8", ["linear_residual"])
print(needs(next(launch for _, label, launch in found if label == "output rows=64"), 90)["instructions"])

print("\\nSMALL")
found = launches.registered(launches.SHAPES["small-heads"], torch.bfloat16, "", ["paged_attention"])
decode = next(launch for _, label, launch in found if label.startswith("decode"))
print(decode.arguments["HEADS"] // decode.arguments["KV_HEADS"], needs(decode, 90)["stack"])
found = launches.registered(launches.SHAPES["llama3-8b"], torch.bfloat16, "", ["paged_attention"])
print(needs(next(launch for _, label, launch in found if label.endswith("16 in 8 bits")), 90)["instructions"])
found = launches.registered(launches.SHAPES["llama3-8b"], torch.bfloat16, "", ["paged_attention"])
usage = needs(next(launch for _, label, launch in found if label == "decode, blocks of 16"), 90)
meeting, beginning = usage["barriers"], [usage["waits"], usage["barriers_before"]]
found = launches.registered(launches.SHAPES["llama2-7b"], torch.bfloat16, "", ["paged_attention"])
usage = needs(next(launch for _, label, launch in found if label == "decode, blocks of 16"), 90)
launches.PROGRAMMATIC = True
found = list(launches.registered(launches.SHAPES["llama3-8b"], torch.bfloat16, "int8", ["gate_up"]))
print(needs(next(launch for _, label, launch in found if label == "rows=8"), 90)["stack"])
print(needs(next(launch for _, label, launch in found if label == "rows=1"), 90)["in_flight"])
print(meeting)
print(*beginning, usage["waits"], usage["barriers_before"])

print("\\nCHUNKS")
launches.PROGRAMMATIC = False
found = list(launches.registered(launches.SHAPES["llama2-7b"], torch.bfloat16, "", ["paged_attention", "lm_head"]))
wanted = {label: launch for _, label, launch in found}
chunk = wanted["chunk of 512, blocks of 16"]
loop = hottest_loop(instructions(machine_code_of(chunk, 90)))
counts = [sum(one.operation.startswith(name) for one in loop) for name in ("FMUL", "FFMA", "MUFU.EX2")]
threads = 32 * chunk.num_warps
rows = chunk.arguments["PACKED_ROWS"]
print(*counts, rows * chunk.arguments["TILE"] // threads, rows * chunk.arguments["CHANNELS"] // threads)
print(needs(wanted["chunk of 512, blocks of 16 in 8 bits"], 89)["stack"], needs(wanted["logits rows=64"], 100)["stack"])
"""


Compiled = tuple[list[dict[str, Any]], list[str], str, str, list[dict[str, Any]], list[int]]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """What a process without the interpreter's flag prints of them: this one may have loaded Triton with it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    usages, others = result.stdout.split("\nALONE\n")
    alone, others = others.split("\nPDL\n")
    waits, others = others.split("\nFLIGHT\n")
    flight, others = others.split("\nSMALL\n")
    small, chunks = others.split("\nCHUNKS\n")
    return json.loads(usages), waits.split("\n")[:-1], flight, small, json.loads(alone), [*map(int, chunks.split())]


@needs_triton
def test_kernels_compile_for_amd_without_ptx_and_fit() -> None:
    """PTX in a kernel is an error of LLVM's assembler that Triton passes by: it says so on the standard error."""
    if importlib.util.find_spec("triton.backends.amd") is None:
        pytest.skip("this Triton has no back end of AMD")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = ["--shapes=tiny", "--arch=gfx942,gfx950", "--weights=int4,int8,Q6_K", "--operations=linear_residual"]
    command = [sys.executable, "-m", "d3engine.kernels.inspect", *asked, "--rows=1,16", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
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
"""


@needs_triton
def test_inspection_started_again_disassembles_nothing_anew(tmp_path: Path) -> None:
    """What an inspection that was cut off has compiled and disassembled is in Triton's cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, "-c", AGAIN], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


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
def test_kernels_of_a_tiny_model_compile_without_spills(compiled: Compiled) -> None:
    usages = compiled[0]
    kinds = {(usage["operation"], usage["weights"]) for usage in usages}
    assert kinds == {("rms_norm", ""), ("linear_residual", "bf16")}
    assert all(usage["registers"] > 0 and not usage["spills"] and usage["fits"] for usage in usages)
    assert {usage["label"].split("rows=")[-1] for usage in usages if usage["weights"]} == {"1", "16", "512"}
    down = {usage["weights"]: usage for usage in usages if usage["label"] == "down rows=16"}
    assert down["bf16"]["widest_load"] == 16
    assert down["bf16"]["wide_loads"] > 0.8
    assert all(u["wide_loads"] > 0.8 for u in usages if u["label"] == "down rows=1" and u["weights"] == "bf16")


@needs_triton
def test_kernels_under_pdl_wait_after_their_first_weights(compiled: Compiled) -> None:
    """With the switch on kernels wait for the one before after their first weights."""
    assert compiled[1] == [
        "rms_norm True 90 True True False []",
        "linear_residual True 90 True True True []",
        "rms_norm True 80 False False False []",
        "linear_residual True 80 False False False []",
        "rms_norm False 90 False False False []",
        "linear_residual False 90 False False False []",
    ]


@needs_triton
def test_a_single_row_keeps_enough_of_its_weights_in_flight(compiled: Compiled) -> None:
    streams, in_flight, _ = compiled[2].split()
    assert streams == "True"
    assert int(in_flight) > 2 * inspect.LEAST_IN_FLIGHT


@needs_triton
def test_group_of_heads_is_combined_at_once(compiled: Compiled) -> None:
    """The last program of a row puts the heads of a group together at once."""
    # Of 64 splits in four turns: head after head it waited at 136 barriers for a group of four.
    assert 0 < int(compiled[3].split()[5]) <= 24 < inspect.MOST_BARRIERS


@needs_triton
def test_attention_finds_its_next_split_without_waiting(compiled: Compiled) -> None:
    """A split that is searched for is behind 2 loads and 8 barriers for a group, and behind 4 and 11 for one head."""
    waits, barriers, waits_alone, barriers_alone = map(int, compiled[3].split()[6:10])
    assert (waits, barriers) == (0, 0)
    assert waits_alone <= inspect.MOST_WAITS
    assert barriers_alone < inspect.MOST_BARRIERS_BEFORE


@needs_triton
def test_small_weights_for_many_rows_are_not_moved(compiled: Compiled) -> None:
    """Small weights become floats for many rows without being moved."""
    # At a byte in five threads' instructions as many would put bytes together as make floats of them.
    assert 0.05 < float(compiled[2].split()[2]) < 0.15


@needs_triton
def test_what_is_loaded_before_the_wait_has_registers(compiled: Compiled) -> None:
    assert compiled[3].split()[3] == "0"


@needs_triton
def test_row_of_small_weights_under_pdl_has_enough_in_flight(compiled: Compiled) -> None:
    """Under programmatic launch a row of small weights has enough under way."""
    # A step is taken before the loop; of one step there, nothing would be fetched ahead.
    assert int(compiled[3].split()[4]) >= inspect.LEAST_IN_FLIGHT


@needs_triton
def test_grouped_heads_of_16_channels_are_read_without_spills(compiled: Compiled) -> None:
    assert compiled[3].split()[:2] == ["2", "0"]


@needs_triton
def test_entries_of_8_bits_reach_the_tensor_cores_by_whole_tiles(compiled: Compiled) -> None:
    """Values that come from shared memory byte by byte take 0.2 instructions a byte."""
    assert 0.05 < float(compiled[3].split()[2]) < 0.15


@needs_triton
def test_a_score_of_a_chunk_takes_a_multiply_add_and_a_power(compiled: Compiled) -> None:
    """What else is multiplied is what was attended so far, and a few numbers of each row."""
    multiplied, added, raised, scores, attended = compiled[5][:5]
    assert scores <= added < scores + 10
    assert scores <= raised < scores + 10
    assert attended <= multiplied < attended + 10


@needs_triton
def test_fp8_chunks_on_ada_and_64_rows_on_blackwell_fit(compiled: Compiled) -> None:
    """Chunks over 8 bits on Ada and logits of 64 rows on Blackwell have registers."""
    assert compiled[5][5:] == [0, 0]


@needs_triton
def test_what_is_in_flight_can_be_left_out_and_the_rest_stays(compiled: Compiled) -> None:
    wanted = [usage for usage in compiled[0] if usage["weights"] == "bf16" and "rows=16" not in usage["label"]]
    assert any(usage["streams"] and usage["in_flight"] for usage in wanted)
    assert compiled[4] == [usage | {"streams": False, "in_flight": 0, "instructions": 0.0} for usage in wanted]


def test_kernel_wanting_too_much_shared_memory_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that wants more shared memory than there is does not fit."""
    usage = replace(USAGE, shared=163 * 1024)
    monkeypatch.setattr(inspect, "inspect", lambda *arguments: iter([usage]))
    assert inspect.main([]) == 0
    assert "163.0 of 163" in capsys.readouterr().out
    monkeypatch.setattr(inspect, "inspect", lambda *arguments: iter([replace(usage, shared=usage.shared + 1)]))
    assert inspect.main([]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(("field", "code"), [("registers", 0), ("stack", 1), ("local", 1)])
def test_the_exit_code_tells_of_a_stack_or_local_memory(
    field: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = replace(USAGE, **{field: 64})  # type: ignore[arg-type]
    monkeypatch.setattr(inspect, "inspect", lambda *arguments: iter([usage]))
    assert inspect.main(["--shapes", "tiny"]) == code
    assert ("SPILLS" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"in_flight": inspect.LEAST_IN_FLIGHT}, []),
        ({"in_flight": inspect.LEAST_IN_FLIGHT - 1}, ["STARVES"]),
        ({"in_flight": 0, "streams": False}, []),
        ({"in_flight": 0, "grid": (1, PROCESSORS - 1)}, []),
        ({"in_flight": 2**17, "too_early": ("ld.global.b32 %r1, [ %rd3 + 0 ];",)}, ["TOO EARLY"]),
    ],
)
def test_kernel_waiting_for_memory_alone_is_a_fault(
    changes: dict[str, Any], faults: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that waits for memory alone, or not for the one before it, is a fault."""
    usage = replace(USAGE, **({"streams": True, "grid": (1, 500)} | changes))
    monkeypatch.setattr(inspect, "inspect", lambda *arguments: iter([usage]))
    assert inspect.main([]) == bool(faults)
    said = capsys.readouterr().out
    assert [name for name in ("STARVES", "TOO EARLY") if name in said] == faults


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), ({"weights": "int4"}, 1), ({"label": "rows=3"}, 1), ({"stack": 64}, 1)],
    ids=["known", "other weights", "other rows", "spills too"],
)
def test_weights_known_to_starve_fail_for_anything_else(
    changes: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that are known to starve fail for anything else alone."""
    known: dict[str, Any] = {"weights": "int8", "label": "down rows=32"}
    usage = replace(USAGE, **({"streams": True, "grid": (1, 500), "in_flight": 0} | known | changes))
    monkeypatch.setattr(inspect, "inspect", lambda *arguments: iter([usage]))
    assert inspect.main(["--may-starve", "int8:32"]) == code
    assert "STARVES" in capsys.readouterr().out


def test_widths_of_loads_are_read_from_ptx() -> None:
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_first.L2::cache_hint.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ], %rd2;
    ld.global.b16 { %rs1 }, [ %rd3 + 0 ];
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd4 + 0 ], 0x10, %r6;
    st.global.v4.b32 [ %rd5 + 0 ], { %r1, %r2, %r3, %r4 };
    """
    assert load_widths(ptx) == {16: 2, 8: 1, 2: 1}

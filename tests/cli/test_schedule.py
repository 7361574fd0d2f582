"""`d3engine schedule` says what the schedule is, in three forms, and words every refusal in one line."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from configs import llama_config
from invoking import invoke, refused, report_of, succeed

from d3engine import __version__
from d3engine.cli.commands import COMMANDS
from d3engine.cli.depth_options import AUTO, OPTIONS, parse_depth
from d3engine.depth import (
    D3,
    DraftAndVerify,
    EarlyExit,
    FullDepth,
    Lossless,
    SelfSpeculative,
    SkipDecode,
    TailSkip,
    UnifiedSkip,
)
from d3engine.errors import InvalidValueError, install_command

BBH = ["schedule", "--layers", "32", "--depth", "d3 alpha=0.9 start=0.6", "--steps", "200"]


def write_model(directory: Path, **changes: Any) -> Path:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 128}
    further = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "torch_dtype": "float32"}
    config = llama_config(10, **(sizes | further | changes))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_plain_output_holds_the_runs_the_cutoffs_and_the_worth() -> None:
    result = succeed(BBH)
    lines = result.stdout.splitlines()
    cells = [line.split() for line in lines]
    assert ["0", "32", "none"] in cells
    assert ["4", "20", "19-30"] in cells
    assert ["5-199", "19", "19-31"] in cells
    assert ["0-18", "never"] in cells
    assert ["19-22", "1"] in cells
    assert ["31", "5"] in cells
    assert any(line.startswith("mean layers over 200 steps") and "19.165 of 32" in line for line in lines)
    assert any(line.startswith("FLOPs ratio") and "1.648x" in line for line in lines)
    assert result.stdout.isascii()  # no boxes or colours outside a terminal


def test_layers_skipped_in_pieces_are_shown_in_pieces() -> None:
    result = invoke(["schedule", "--layers", "9", "--depth", "unified speedup=2", "--steps", "3"])
    assert "1-2    4           1-2, 4-5, 7" in result.stdout.splitlines()


def test_students_of_a_width_policy_are_shown_by_step() -> None:
    """Each run of steps has a row with its student, and JSON names it too."""
    words = ("schedule", "--layers", "4", "--depth", "width students=a.st,b.st from-steps=2,5", "--steps", "8")
    cells = [line.split() for line in invoke(words).stdout.splitlines()]
    for row in (["0-1", "4", "none", "none"], ["2-4", "4", "none", "a.st"], ["5-7", "4", "none", "b.st"]):
        assert row in cells
    assert [one["student"] for one in report_of(words)["runs"]] == [None, "a.st", "b.st"]


def test_json_holds_everything_for_machines() -> None:
    report = report_of([*BBH, "--prompt-tokens", "100"])
    assert report["policy"] == {"policy": "d3", "alpha": 0.9, "start": 0.6, "tail": 0, "on_skip": "none"}
    assert [step["depth"] for step in report["runs"]] == [32, 28, 25, 23, 20, 19]
    assert report["runs"][-1] == {"first_step": 5, "last_step": 199, "depth": 19, "skipped_layers": list(range(19, 32))}
    assert report["cutoffs"] == [None] * 19 + [1] * 4 + [2] * 3 + [3] * 2 + [4] * 3 + [5]
    assert report["mean_layers"] == pytest.approx(19.165)
    assert report["flops_ratio"] == pytest.approx(1.648, abs=5e-4)
    kv = report["kv_saved"]
    assert kv["fraction"] == pytest.approx(13 / 32)
    assert kv["bytes_per_entry"] == 2 * 4096 * 2
    assert kv["bytes_saved"] == 13 * 299 * kv["bytes_per_entry"]


def test_sizes_replace_those_of_llama_2() -> None:
    llama_3_8b = ["--intermediate-size", "14336", "--vocab-size", "128256", "--heads", "32", "--kv-heads", "8"]
    report = report_of([*BBH, *llama_3_8b, "--dtype", "float32"])
    sizes = {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    assert report["shape"] == sizes | {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    assert report["kv_saved"]["bytes_per_entry"] == 2 * 8 * 128 * 4
    layer, head = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 128256 * 4096
    assert report["flops_ratio"] == pytest.approx((32 * layer + head) / (19.165 * layer + head))


def test_a_shape_that_no_llama_2_has_is_built_from_the_sizes() -> None:
    sizes = ["--hidden-size", "64", "--intermediate-size", "160", "--vocab-size", "256", "--heads", "4"]
    report = report_of(["schedule", "--layers", "10", "--depth", "full", *sizes])
    assert (report["shape"]["num_kv_heads"], report["shape"]["head_dim"]) == (4, 16)
    assert report["flops_ratio"] == 1


def test_schedule_without_a_shape_has_an_unknown_flops_ratio() -> None:
    """Without a shape the schedule is shown, and the FLOPs ratio is unknown."""
    arguments = ["schedule", "--layers", "10", "--depth", "d3 alpha=0.9 start=0.7"]
    report = report_of(arguments)
    assert report["shape"] is None
    assert report["flops_ratio"] is None
    assert report["kv_saved"]["bytes_saved"] is None
    assert report["kv_saved"]["fraction"] == pytest.approx(0.3)
    assert report["cutoffs"][:7] == [None] * 7
    assert None not in report["cutoffs"][7:]
    assert "unknown: give the model's sizes" in invoke(arguments).stdout


def test_a_model_directory_gives_layers_sizes_and_dtype(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    report = report_of(["schedule", "--model", str(model), "--depth", "unified speedup=2"])
    assert report["num_layers"] == 10
    assert report["shape"]["num_kv_heads"] == 2
    assert report["dtype"] == "float32"
    assert report["kv_saved"]["bytes_per_entry"] == 2 * 2 * 16 * 4
    assert report_of(["schedule", "--model", str(model), "--depth", "full", "--dtype", "float16"])["dtype"] == "float16"


def test_auto_reads_d3_json_beside_the_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert report_of(["schedule", "--model", str(model)])["policy"] == {"policy": "full"}
    (model / "d3.json").write_text(json.dumps({"depth": D3(alpha=0.99, start=0.5).describe()}))
    assert report_of(["schedule", "--model", str(model)])["policy"] == D3(alpha=0.99, start=0.5).describe()
    table = {"policy": "table", "active": [list(range(10)), [0, 2], list(range(10)), [0]]}
    (model / "d3.json").write_text(json.dumps({"depth": table}))
    report = report_of(["schedule", "--model", str(model), "--steps", "6"])
    assert [step["depth"] for step in report["runs"]] == [10, 2, 10, 1]
    assert report["is_nested"] is False
    assert "Cutoff" not in invoke(["schedule", "--model", str(model)]).stdout


@pytest.mark.parametrize("content", ["{", "[]", '{"policy": "d3"}', '{"policy": "d9"}'])
def test_schedule_d3_json_without_a_policy_is_refused_by_name(tmp_path: Path, content: str) -> None:
    """A d3.json that describes no policy is refused by its name."""
    model = write_model(tmp_path)
    (model / "d3.json").write_text(content)
    said = "d3.json is not valid JSON" if content == "{" else "d3.json describes no depth policy"
    assert said in refused(["schedule", "--model", str(model)])


LAYERS = ["schedule", "--layers", "32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*LAYERS, "--depth", "full alpha=0.9"], "option must be absent, since full takes no .*; got 'alpha=0.9'"),
        (
            [*LAYERS, "--depth", "unified speedup=2 tail=1"],
            r"option must be option=value, with speedup, on-skip, bridges \(tail goes with d3\); got 'tail=1'",
        ),
        ([*LAYERS, "--depth", "d3"], "--depth 'd3' must be given with alpha and start"),
        (LAYERS, r"--depth must be .*--model.*; got 'auto'"),
        (["schedule", "--depth", "full"], "--layers must be given, or --model"),
        (["schedule", "--layers", "0", "--depth", "full"], r"--layers must be .*; got 0"),
        ([*LAYERS, "--depth", "d3 alpha=0.9 start=1.5"], "start must be .*; got 1.5"),
        ([*LAYERS, "--depth", "d3 alpha=nan start=0.6"], "alpha must be .*; got nan"),
        ([*LAYERS, "--depth", "d3 alpha=0.9 start=0.6 tail=14"], "tail of --depth must be .*; got 14"),
        ([*BBH, "--steps", "0"], r"--steps must be .*; got 0"),
        ([*BBH, "--steps", "999999999999"], r"--steps must be .*; got 999999999999"),
        ([*BBH, "--prompt-tokens", "0"], r"--prompt-tokens must be .*; got 0"),
        ([*BBH, "--kv-heads", "0"], r"--kv-heads must be .*; got 0"),
        ([*BBH, "--heads", "33"], r"--hidden-size must be .*--heads 33.*; got 4096"),
        (["schedule", "--layers", "7", "--depth", "full", "--heads", "4"], "--hidden-size, --intermediate-size"),
        ([*BBH, "--model", "anywhere"], r"--layers must be absent, since --model gives it.*; got 32"),
        (["schedule", "--model", "no-such-directory", "--depth", "full"], "model must be .*; got 'no-such-directory'"),
        ([*BBH, "--plot", "no-such-directory/a.png"], "--plot must be a file in a directory that exists; got"),
        ([*BBH, "--plot", "a.docx"], "--plot must be a file name that ends in one of .*; got 'a.docx'"),
        (
            ["schedule", "--layers", "8", "--depth", "early-exit threshold=0.9"],
            "--depth must be .* each token decides as it runs.*; got 'early-exit'",
        ),
    ],
)
def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(arguments: list[str], message: str) -> None:
    stderr = refused(arguments)
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert re.search(message, stderr), stderr


def test_options_become_the_policy_they_name() -> None:
    policy = parse_depth
    assert policy("auto") == AUTO
    assert policy("full") == FullDepth()
    assert policy("d3 alpha=0.9 start=3/5 tail=2") == D3(0.9, 0.6, tail=2)
    assert policy("d3 --alpha=0.9 start=3/5") == D3(0.9, 0.6)
    assert policy('d3 alpha=0.9 start=3/5 bridges="my maps.safetensors"') == D3(0.9, 0.6, bridges="my maps.safetensors")
    assert policy(r"d3 alpha=0.9 start=3/5 bridges=C:\maps").bridges == r"C:\maps"  # type: ignore[union-attr]
    assert policy("unified speedup=1.5 on-skip=copy") == UnifiedSkip(1.5, on_skip="copy")
    expected = SkipDecode(max_tokens=200, min_layers=4, max_layers=30, warmup=2)
    assert policy("skipdecode decay-steps=200 min_layers=4 max-layers=30 warmup=2") == expected
    assert policy("tail-skip mean-layers=32/3 decay-steps=9") == TailSkip("32/3", 9)  # type: ignore[arg-type]
    assert policy("tail-skip mean_layers=12 max_tokens=24") == policy("tail-skip mean-layers=12 decay-steps=24")
    assert policy("early-exit threshold=0.5 min_layer=3 every=2") == EarlyExit(0.5, min_layer=3, every=2)
    expected_exit = EarlyExit(0.9, "cosine", decay=0, min_layer=2, every=3, batch="batch_min", on_skip="copy")
    line = "early-exit threshold=0.9 confidence=cosine threshold-decay=0 exit-min-layer=2 exit-every=3 "
    assert policy(line + "exit-batch=batch_min on-skip=copy") == expected_exit
    lossless = policy("lossless alpha=0.9 start=0.6 tail=1 draft-length=3 stop-probability=0.2")
    assert lossless == Lossless(D3(0.9, 0.6, tail=1), 3, stop_probability=0.2)
    drafting = policy("self-speculative draft=unified speedup=2 adaptive=true")
    assert drafting == SelfSpeculative(UnifiedSkip(2), adaptive=True)
    split = policy("draft-and-verify skip-attention=3,5-7 skip-mlp=2 draft-length=12")
    assert split == DraftAndVerify([3, 5, 6, 7], [2], 12)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"--depth must be one of auto, full, d3.*; got ''"),
        ("table", r"--depth must be one of auto, full, d3.*; got 'table'"),
        ("deep", r"--depth must be one of auto, full, d3.*; got 'deep'"),
        ("d3 alpha", "option must be option=value, with alpha, .*; got 'alpha'"),
        ("d3 bridges='x", "--depth must be text whose quotation marks are closed"),
        ("early-exit confidence=cosine", "must be given with threshold"),
        ("early-exit threshold=0.5 confidence=sure", "confidence must be .*; got 'sure'"),
        ("draft-and-verify skip-attention=3,x", "skip_attention must be different layer ids, from 0; got '3,x'"),
        ("draft-and-verify skip-mlp=0-99999999", r"skip_mlp must be .*; got '0-99999999'"),
        ("lossless draft=d3 alpha=0.9 start=0.6", r"draft must be absent, since lossless drafts by d3; got 'd3'"),
        ("lossless alpha=0.9 start=0.6 speedup=2", r"option must be .*\(speedup goes with unified, even\)"),
        ("lossless alpha=0.9 start=0.6 adaptive=1", "adaptive must be true or false; got '1'"),
        ("self-speculative alpha=0.9 start=0.6", "draft must be one of d3, nested, skipdecode"),
        ("d3 alpha=0.9 start=0.6 draft-length=3", "option must be .*; got 'draft-length=3'"),
        ("d3 alpha=0.9 start=0.6 alpha=0.8", "alpha must be given once; got '0.8'"),
        ("d3 alpha=x start=0.6", "alpha must be a number; got 'x'"),
        ("auto alpha=0.9", "option must be absent, since auto takes no options"),
    ],
)
def test_a_line_that_is_no_policy_is_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        parse_depth(line)


def test_plot_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, arguments in {
        "nested.png": BBH,
        "one-step.png": [*BBH, "--steps", "1"],
        "many-steps.png": [*LAYERS, "--depth", "d3 alpha=0.99999 start=0.6", "--steps", "1000000"],
    }.items():
        path = tmp_path / name
        succeed([*arguments, "--plot", str(path)])
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert width >= 640
        assert height >= 480


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert install_command("plots") in refused([*BBH, "--plot", str(tmp_path / "a.png")])
    assert not list(tmp_path.iterdir())


def test_version_and_help() -> None:
    assert invoke(["--version"]).stdout == f"d3engine {__version__}\n"
    assert "schedule" in invoke(["--help"]).stdout
    text = invoke(["schedule", "--help"]).stdout
    assert all(f"\n  {spelling} " in text for spelling, _, _ in OPTIONS.values())


def test_schedule_and_all_helps_import_no_torch(tmp_path: Path) -> None:
    """Neither a schedule of a model nor the help of any command imports torch; a schedule no other heavy library."""
    model = write_model(tmp_path)
    script = (
        "import sys\n"
        "from d3engine.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        f"for words in [[], *([name] for name in {list(COMMANDS)}), ['weights', 'quantize'], ['analyze', 'flow']]:\n"
        "    try: app([*words, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, words\n"
        "heavy |= {'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    arguments = ["schedule", "--model", str(model), "--depth", "d3 alpha=0.9 start=0.7"]
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "mean layers" in result.stdout


def test_script_error_is_one_line_without_a_traceback() -> None:
    """The script prints one line and no traceback for an error."""
    script = "from d3engine.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script, *LAYERS, "--depth", "d3 alpha=2 start=0.6"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: --depth 'd3 alpha=2 start=0.6': alpha must be a finite number in (0, 1]; got 2.0\n"

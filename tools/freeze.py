"""Record what a user can observe of the engine, and compare it after a change that must alter none of it.

    python tools/freeze.py record before.json      # answers, log-probabilities, help, openapi.json, error texts
    python tools/freeze.py compare before.json     # exit status 1 and one line for each difference
    python tools/freeze.py speed OLD_CHECKOUT      # median times of this checkout over those of another, in turns

Only public names are used, so the script itself survives renames. Answers are recorded in a process for each backend:
the native library on every instruction set that runs here, plain PyTorch, and Triton (interpreted without a GPU).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ISAS = ("amx", "avx512-vnni", "avx512", "avx2", "neon", "portable")
BACKENDS = {
    **{f"native {isa}": {"D3ENGINE_KERNELS": "native", "D3ENGINE_NATIVE_ISA": isa} for isa in ISAS},
    "reference": {"D3ENGINE_KERNELS": "reference"},
    "triton": {"D3ENGINE_KERNELS": "triton", "TRITON_INTERPRET": "1"},
}
SCHEMES = ("int8", "int4", "fp8")
PROMPTS = [
    "Question: Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?\nAnswer:",
    "Question: Ana has 9 cups. Ana wins 4. Ben brings 6 more. How many cups does Ana have now?\nAnswer:",
    "Once upon a time",
    [1, *range(40, 340)],
]
SPEED = """
import sys, time
from d3engine import Engine, SamplingParams
name, rows, prompt, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with Engine(name, depth="auto", num_threads=2) as engine:
    ids = [{"prompt_token_ids": [1, *range(5, 4 + prompt)]}] * rows
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.reset_prefix_cache()
    engine.generate(ids, params, use_tqdm=False)
    engine.reset_prefix_cache()
    begun = time.perf_counter()
    engine.generate(ids, params, use_tqdm=False)
    print(time.perf_counter() - begun)
"""
"""Prints the seconds of one call, after one that warms up."""
SPEED_CASES = [  # model, rows, tokens of the prompt, tokens generated
    ("demo", 1, 8, 256),
    ("demo", 8, 8, 128),
    ("demo", 1, 400, 1),
    ("smollm2", 1, 8, 48),
    ("smollm2", 8, 8, 16),
    ("smollm2", 1, 512, 1),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        commands.add_parser(name).add_argument("file", type=Path)
    speed = commands.add_parser("speed")
    speed.add_argument("old", type=Path, help="a checkout with a .venv, or one that this Python can import")
    speed.add_argument("--rounds", type=int, default=5)
    commands.add_parser("answers").add_argument("folder", type=Path, help="where quantized directories are kept")
    given = parser.parse_args()
    if given.command == "answers":
        json.dump(answers(given.folder), sys.stdout)
        return 0
    if given.command == "speed":
        return compare_speed(given.old, given.rounds)
    found = record()
    if given.command == "record":
        given.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return 0
    lines = differences(json.loads(given.file.read_text()), found)
    print("\n".join(lines) or "no difference")
    return 1 if lines else 0


def record() -> dict[str, Any]:
    """Everything that `compare` looks at; takes a few minutes."""
    return {"answers": _answers_of_backends(), "help": _help(), "openapi": _openapi(), "errors": error_texts()}


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """One line for each leaf of two JSON documents that differs or stands in one of them alone."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = [f"{where}/{key}: gone" for key in before if key not in after]
        lines += [f"{where}/{key}: new" for key in after if key not in before]
        for key in before.keys() & after.keys():
            lines += differences(before[key], after[key], f"{where}/{key}")
        return sorted(lines)
    if before == after:
        return []
    if where.startswith("/errors"):
        return [f"{where}: no test names {text!r} any more" for text in sorted(set(before) - set(after))]
    return [f"{where}: {_short(before)} became {_short(after)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."


# -- answers -----------------------------------------------------------------------------------------------------------


def _answers_of_backends() -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for scheme in SCHEMES:
            command = ["weights", "quantize", "demo", f"{folder}/{scheme}", "--scheme", scheme]
            _run([sys.executable, "-P", "-m", "d3engine", *command], {})
        for name, variables in BACKENDS.items():
            done = _run([sys.executable, "-P", __file__, "answers", folder], variables, check=False)
            if done.returncode == 0:
                found[name] = json.loads(done.stdout)
            elif name.startswith("native"):
                print(f"{name}: does not run here", file=sys.stderr)
            else:
                raise SystemExit(f"{name}: {done.stderr}")
    return found


def answers(folder: Path) -> dict[str, Any]:
    """What this process's backend answers, by kind of weights and policy."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {"float32": ("demo", {"dtype": "float32"})}
    is_native, is_slow = os.environ["D3ENGINE_KERNELS"] == "native", os.environ["D3ENGINE_KERNELS"] == "triton"
    if not is_slow:  # Triton's interpreter takes minutes for a kind; the tests of each kernel have the others
        kinds |= {name: (str(folder / name), {}) for name in SCHEMES}
        kinds["bfloat16 weights"] = ("demo", {"dtype": "float32", "weight_dtype": "bfloat16"})
        kinds["fp8 cache"] = ("demo", {"kv_cache_dtype": "fp8"})
    if is_native:
        kinds["12 bits"] = ("demo", {"weight_dtype": "bfloat16", "pack_weights": True})
    return {name: _answers_of(model, options, few=is_slow) for name, (model, options) in kinds.items()}


def _answers_of(model: str, options: dict[str, Any], *, few: bool) -> dict[str, Any]:
    from d3engine import Engine, SamplingParams

    length = 2 if few else 32
    found = {}
    with Engine(model, kv_cache_memory_bytes=2**26, **options) as engine:
        for name, depth in _policies().items():
            if few and name != "d3":
                continue
            sampled = [
                SamplingParams(temperature=t, seed=7, max_tokens=length, logprobs=20, ignore_eos=True, depth=depth)
                for t in (0.0, 0.9)
            ]
            prompts = [[1, 40, 41, 42]] if few else PROMPTS
            outputs = [engine.generate(prompts, params, use_tqdm=False) for params in sampled[: 1 if few else 2]]
            found[name] = [_answer(one.outputs[0]) for some in outputs for one in some]
    return found


def _answer(output: Any) -> dict[str, Any]:
    logprobs = [sorted((i, one.logprob.hex()) for i, one in step.items()) for step in output.logprobs]
    digest = hashlib.sha256(json.dumps(logprobs).encode()).hexdigest()[:16]
    return {"token_ids": list(output.token_ids), "depths": list(output.depths), "logprobs": digest}


def _policies() -> dict[str, Any]:
    import d3engine as d3

    return {
        "full": d3.FullDepth(),
        "d3": d3.D3(alpha=0.9, start=0.6),
        "skip_decode": d3.SkipDecode(max_tokens=32, min_layers=8),
        "unified_skip": d3.UnifiedSkip(speedup=1.5),
        "tail_skip": d3.TailSkip(mean_layers=12, max_tokens=32),
        "early_exit": d3.EarlyExit(threshold=0.9, min_layer=8),
        "lossless": d3.Lossless(d3.D3(alpha=0.8, start=0.6)),
        "self_speculative": d3.SelfSpeculative(d3.D3(alpha=0.8, start=0.6)),
    }


# -- the interface -----------------------------------------------------------------------------------------------------


def _help() -> dict[str, str]:
    """The help of every command, by its words."""
    found: dict[str, str] = {}
    waiting = [()]
    while waiting:
        words: tuple[str, ...] = waiting.pop()
        done = _run([sys.executable, "-P", "-m", "d3engine", *words, "--help"], {"COLUMNS": "120", "NO_COLOR": "1"})
        found[" ".join(("d3engine", *words))] = done.stdout
        _, _, commands = done.stdout.partition("\nCommands:\n")
        waiting += [(*words, match[1]) for match in re.finditer(r"^  ([a-z][a-z0-9-]*)  ", commands, re.MULTILINE)]
    return found


def _openapi() -> Any:
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-P", "-m", "d3engine", "serve", "demo", "--port", "0"]
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(1200):
                log.seek(0)
                if (found := re.search(r"http://127\.0\.0\.1:\d+", log.read())) is not None:
                    break
                time.sleep(0.1)
            else:
                raise SystemExit("the server has not started")
            for _ in range(100):
                try:
                    return json.load(urllib.request.urlopen(f"{found[0]}/openapi.json", timeout=10))
                except OSError:
                    time.sleep(0.1)
            raise SystemExit("the server does not answer")
        finally:
            server.terminate()
            server.wait()


def error_texts(folder: Path = ROOT / "tests") -> list[str]:
    """The texts that tests ask an error to match."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "match":
                found.add(ast.unparse(node.value))
    return sorted(found)


# -- speed -------------------------------------------------------------------------------------------------------------


def compare_speed(old: Path, rounds: int) -> int:
    """Print the median ratio of each case, this checkout's time over the other's, in turns."""
    for case in SPEED_CASES:
        ratios = []
        for number in range(rounds):
            order = (ROOT, old) if number % 2 else (old, ROOT)
            seconds = {place: _seconds(place, case) for place in order}
            ratios.append(seconds[ROOT] / seconds[old])
        model, rows, prompt, tokens = case
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{model}, {rows} rows, prompt {prompt}, {tokens} tokens: {median:.3f} ({low:.3f} to {high:.3f})")
    return 0


def _seconds(checkout: Path, case: tuple[str, int, int, int]) -> float:
    own = checkout / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    done = _run([python, "-P", "-c", SPEED, *map(str, case)], {"PYTHONPATH": str(checkout.resolve())})
    return float(done.stdout)


def _run(command: list[str], variables: dict[str, str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return done


if __name__ == "__main__":
    raise SystemExit(main())

"""One round on a GPU: ceilings, choices, tests, kernels, the engine by depth, its peers, and arrivals, in one command.

Time on a GPU is short, so nothing that goes wrong may cost the rest: parts run in processes of their own in order of
importance, each with its share of what is left, and the file is written after each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu import arrivals, compiled, device, end_to_end, kernels, peers, switches, tests, tools
from benchmarks.gpu.common import MODES, DeviceLost, Round
from benchmarks.gpu.tables import show
from benchmarks.report import environment, write_json


@dataclass(frozen=True)
class Part:
    """One part of the round: what it does, its share of the time, and what it has found once it has any figures."""

    run: Callable[[dict[str, Any], Round], None]
    share: float  # of the time, in proportion to the other parts'
    figures: str | None = None  # what holds figures where an engine was run, in whatever mode
    quiet_s: float = math.inf  # it hangs where it keeps nothing new for this time
    goes_on: bool = False  # whether its rows are one by one, and another process goes on behind one that died


PARTS: dict[str, Part] = {
    "device": Part(device.run, 45),
    "compiled": Part(compiled.run, 60),
    "first_light": Part(end_to_end.first_light, 240, "models", quiet_s=90),
    "decode": Part(end_to_end.decode, 190, "models", quiet_s=90),
    "peers": Part(peers.run, 270, "cases"),
    "tests": Part(tests.run, 230),
    "sanitized": Part(tools.sanitized, 90),
    "profiled": Part(tools.profiled, 40),
    "switches": Part(switches.run, 200, quiet_s=60, goes_on=True),
    "kernels": Part(kernels.run, 230, quiet_s=60, goes_on=True),
    "batches": Part(end_to_end.batches, 90, "models", quiet_s=90),
    "quantized": Part(end_to_end.quantization, 150, "models", quiet_s=90),
    "cache": Part(end_to_end.cache, 90, "models", quiet_s=90),
    "llama3": Part(end_to_end.llama3, 140, "models", quiet_s=90),
    "arrivals": Part(arrivals.run, 180, "rows"),
}
ROOT = Path(__file__).parents[1]
BUDGET_S, REHEARSAL_S = 840.0, 1e6
"""For all parts together, unless one says otherwise: a rehearsal's shares of a GPU's time would be those of an
interpreter, which takes a minute for what takes a device a moment."""
LEAST_S = 15.0
"""A part is not begun with less than this."""
GRACE_S = 15.0
"""A part that goes on for this after its time hangs, and is ended."""


def run_here(name: str, current: Round) -> dict[str, Any]:
    """Run one part in this process: what it found, with `status`, and `traceback` where it failed."""
    found: dict[str, Any] = current.kept() | {"status": "running"}
    try:
        PARTS[name].run(found, current)
        found["status"] = "skipped" if "skipped" in found else "done"
    except DeviceLost:
        found.update(status="lost", traceback=traceback.format_exc())
    except Exception:
        found.update(status="failed", traceback=traceback.format_exc())
    current.keep(found)
    return found


def run_apart(name: str, current: Round) -> dict[str, Any]:
    """Run one part in a separate process: a kernel that faults or hangs takes no other part with it.

    A part that goes on does so in another process, behind the row at which the one before ended.
    """
    deaths: list[str] = []
    with tempfile.TemporaryDirectory() as folder, device.sampled() as load:
        own = replace(current, file=Path(folder) / "found.json")
        while True:
            before = _progress(own.kept())
            how = _watch(name, own)
            found = own.kept()
            if found.get("status", "running") == "running":
                text = f"the part's process {how}; what it had found until then is kept"
                found.update(status="lost", traceback=text)
            may_go_on = PARTS[name].goes_on and current.left() >= LEAST_S and _progress(found) != before
            if found["status"] != "lost" or not may_go_on:
                break
            deaths.append(found.pop("traceback"))
            own.keep(found)
    if found["status"] == "lost":
        found["status"] = "failed"
    return found | ({"deaths": deaths} if deaths else {}) | ({"load": load} if load else {})


def _progress(found: dict[str, Any]) -> tuple[int, int]:
    return len(found.keys() - {"traceback"}), len(found.get("rows", ()))


def _watch(name: str, own: Round) -> str:
    """Run a part's process to its end, or end it where it hangs; what became of it."""
    assert own.file is not None
    os.environ["PYTHONSAFEPATH"] = "1"  # a spawned process searches the working directory first without it
    process = get_context("spawn").Process(target=_run_and_leave, args=(name, own))
    process.start()
    begun = news = time.monotonic()
    limit, quiet, seen = max(LEAST_S, own.left()) + GRACE_S, PARTS[name].quiet_s, own.kept()
    if math.isfinite(quiet):  # half of the time at most, so that another mode or process has the rest
        quiet = min(quiet, max(LEAST_S, own.left() / 2))
    while process.is_alive():
        now = time.monotonic()
        if (found := own.kept()) != seen:
            seen, news = found, now
        if now - begun >= limit or now - news >= quiet:
            process.kill()
            process.join()
            return f"was stopped after {now - begun:.0f} s"
        process.join(min(1.0, limit))
    return f"died with exit code {process.exitcode}"


def _run_and_leave(name: str, current: Round) -> None:
    """Run a part and end its process at once: nothing that libraries do on their way out may fail or wait."""
    run_here(name, current)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_modes(
    name: str, current: Round, start: Callable[[str, Round], dict[str, Any]], console: Console
) -> dict[str, Any]:
    """Run one part; where its engine fails without a figure, again in the next mode. Earlier failures are kept."""
    earlier: list[dict[str, Any]] = []
    modes = MODES[MODES.index(current.mode) :] if PARTS[name].figures else (current.mode,)
    for mode in modes:
        found = start(name, replace(current, mode=mode))
        is_last = mode == modes[-1] or current.left() < LEAST_S
        if found["status"] != "failed" or has_figures(found.get(PARTS[name].figures or "")) or is_last:
            break
        console.print(f"{name} has failed in mode {mode!r}:\n{found.get('traceback', '')}", markup=False)
        earlier.append({"mode": mode, "traceback": found.get("traceback")})
    if earlier:
        found["earlier_modes"] = earlier
    return found


def has_figures(found: Any) -> bool:
    """Whether a time was measured anywhere in here."""
    if isinstance(found, dict):
        return any(found.get(key) for key in ("calls_s", "call_s", "tokens_per_s")) or any(
            has_figures(value) for value in found.values()
        )
    return isinstance(found, list) and any(has_figures(value) for value in found)


def run_parts(
    report: dict[str, Any],
    names: Sequence[str],
    current: Round,
    start: Callable[[str, Round], dict[str, Any]],
    save: Callable[[], None],
    console: Console,
) -> None:
    """Run the parts in turn by `start`; each leaves what it found in `report["parts"]`, saved at once.

    Of the time left, a part may take its share among those still to come; what it leaves goes to them.
    """
    for place, name in enumerate(names):
        begun = time.monotonic()
        allowed = current.left() * PARTS[name].share / sum(PARTS[other].share for other in names[place:])
        if allowed < min(LEAST_S, PARTS[name].share):
            found: dict[str, Any] = {"status": "skipped", "skipped": f"budget: {max(allowed, 0):.0f} s were left"}
        else:
            console.print(f"{name}: {allowed:.0f} of {current.left():.0f} s")
            budget = current.budget - current.left() + allowed
            found = run_modes(name, replace(current, budget=budget), start, console)
        found["part_seconds"] = time.monotonic() - begun
        report["parts"][name] = found
        if name == "first_light" and found["status"] == "done":
            current = replace(current, mode=found["models"][-1]["mode"])  # later parts need not fail anew
        for ceiling, row in found.get("ceilings", {}).items():
            current.ceilings[ceiling] = max(row["rates"])
        if "traceback" in found:
            console.print(found["traceback"], markup=False, highlight=False)
        save()


def join(files: Sequence[str]) -> dict[str, Any]:
    """One report of several: every part from the first file that has figures of it, with the command it came from.

    Raises `ValueError` for files of different commits, trees, versions, devices or kinds.
    """
    reports = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    for report in reports[1:]:
        for key in ("commit", "tree", "versions"):
            if report["environment"].get(key) != reports[0]["environment"].get(key):
                raise ValueError(f"the files are of different {key}: {report['environment'].get(key)}")
        if report["rehearsal"] != reports[0]["rehearsal"] or _device(report) != _device(reports[0]):
            raise ValueError(f"the files are of different devices: {_device(report)} and {_device(reports[0])}")
    parts: dict[str, Any] = {}
    for name in PARTS:
        found = [
            (report["environment"]["command"], report["parts"][name]) for report in reports if name in report["parts"]
        ]
        found.sort(key=lambda pair: ["done", "failed", "skipped"].index(pair[1]["status"]))
        if found:
            parts[name] = {"command": found[0][0]} | found[0][1]
    first: dict[str, Any] = reports[0]
    return first | {"budget_s": sum(report["budget_s"] for report in reports), "parts": parts}


def tree_hash(folder: Path) -> str:
    """A hash of the sources that were measured, which a copy without git has too; nothing that was built counts."""
    found = sha256()
    for top in ("d3engine", "kernels"):
        for file in sorted((folder / top).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h", ".inc"):
                for part in (file.relative_to(folder).as_posix().encode(), file.read_bytes()):
                    found.update(sha256(part).digest())
    return found.hexdigest()[:16]


def _device(report: dict[str, Any]) -> str | None:
    name: str | None = report["parts"].get("device", {}).get("facts", {}).get("name")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the round; 1 if a part has failed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options, names = _parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=132)
    if options.join:
        report = join(options.join)
        write_json(report, options.out)
        show(report, console)
        return 0
    if options.smoke and find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"  # before any part's process imports Triton
    current = Round(torch.device("cpu" if options.smoke else "cuda"), options.smoke, options.budget, mode=options.mode)
    report = {
        "benchmark": "gpu_round",
        "environment": environment("benchmarks.gpu_round", arguments) | {"tree": tree_hash(ROOT)},
        "rehearsal": options.smoke,
        "budget_s": options.budget,
        "parts": {},
    }
    run_parts(report, names, current, run_apart, lambda: write_json(report, options.out), console)
    show(report, console)
    return int(any(found["status"] == "failed" for found in report["parts"].values()))


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_round", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"of all parts together: {BUDGET_S:.0f}, or as long as it takes with --smoke",
    )
    parser.add_argument("--out", default="gpu_round.json", metavar="FILE", help="where all figures go")
    parser.add_argument("--smoke", action="store_true", help="rehearse on the CPU with tiny shapes")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAMES", help="some of these, with commas")
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help="how engines are run at first")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="run nothing: make one file of these")
    options = parser.parse_args(arguments)
    if options.budget is None:
        options.budget = REHEARSAL_S if options.smoke else BUDGET_S
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.smoke and not options.join and not torch.cuda.is_available():
        parser.error("there is no GPU; --smoke rehearses without one")
    return options, names


if __name__ == "__main__":
    sys.exit(main())

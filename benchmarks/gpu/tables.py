"""The round on a terminal: what was found as tables, the least important first, as a short log keeps the end."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.end_to_end import LEAST_REALISATION

REACHED, MISSED = "[green]reached[/]", "[red]missed[/]"


def show(report: dict[str, Any], console: Console) -> None:
    """One table for each part that has figures, and the table of all parts at the end."""
    parts = report["parts"]
    if rows := parts.get("kernels", {}).get("rows"):
        console.print(kernel_table(rows))
    for name in ("llama3", "cache", "quantized", "batches", "decode", "first_light"):
        if models := parts.get(name, {}).get("models"):
            console.print(depth_table(name, models))
            console.print(verdict_table(name, models))
    if rows := parts.get("switches", {}).get("rows"):
        console.print(reading_table(parts["switches"]["reading"] or []))
        console.print(switch_table(rows))
    if cases := parts.get("peers", {}).get("cases"):
        console.print(peer_table(cases))
    if rows := parts.get("arrivals", {}).get("rows"):
        console.print(arrival_table(rows))
    console.print(part_table(parts))
    if report["rehearsal"]:
        console.print("A rehearsal: these times say nothing of any device.")


def part_table(parts: dict[str, Any]) -> Table:
    """What became of each part."""
    rows = []
    for name, found in parts.items():
        modes = "".join(f"[red]mode {earlier['mode']} failed; [/]" for earlier in found.get("earlier_modes", []))
        status = f"[red]{found['status']}[/]" if found["status"] == "failed" else found["status"]
        rows.append((name, status, f"{found['part_seconds']:.1f}", modes + _summary(name, found)))
    return _table(("part", "status", "seconds", "what"), rows)


def _summary(name: str, found: dict[str, Any]) -> str:
    if name == "device" and "ceilings" in found:
        rates = {key: max(row["rates"]) / 1e12 for key, row in found["ceilings"].items()}
        noise = max(row["noise"] for row in found["ceilings"].values())
        return (
            f"copy {rates['copy']:.3g} TB/s, read {rates['read']:.3g} TB/s, matmul {rates['matmul']:.3g} TFLOP/s;"
            f" noise {noise:.1%}; programmatic launch: {found['programmatic_launch']}"
        )
    if "skipped" in found:
        return str(found["skipped"])
    said = [f"stopped: {found['stopped']}"] if "stopped" in found else []
    if name == "tests":
        said.append(", ".join(f"{number} {outcome}" for outcome, number in found.get("counts", {}).items()))
    if name == "switches" and "rows" in found:
        failed = sum(any("error" in w for w in (row, *row.get("variants", {}).values())) for row in found["rows"])
        said.append(f"{len(found['rows'])} choices, {failed} with a way that failed")
    if found.get("launching"):
        by_recipe, anew = (found["launching"][way] * 1e6 for way in ("by_recipe", "anew"))
        said.append(f"a layer launched by the host in {by_recipe:.0f} us, {anew:.0f} us described anew")
    if name == "kernels" and "rows" in found:
        failed = sum("error" in row or bool(row.get("is_far")) for row in found["rows"])
        said.append(f"{len(found['rows'])} cases, {failed} failed; Triton {found['triton']}")
    if ratios := [f"{row['over_wide_entries']:.2f}" for row in found.get("ratios", [])]:
        said.append(f"8 bits over wide entries: {', '.join(ratios)}")
    for model in found.get("models", []):
        graphs = model.get("graphs", {})
        said.append(f"{model['name']} {model['scheme']} ({model['mode']})")
        if "check" in model:
            check = model["check"]
            said.append(
                f"{check['tokens_that_differ']} of {check['tokens']} tokens differ from plain PyTorch's,"
                f" by {check['largest_gap']:.3f} at most"
            )
        if graphs.get("graphs_captured"):
            said.append(f"{graphs['graphs_captured']} graphs captured in {graphs['graph_capture_seconds']:.1f} s")
    return "; ".join(text for text in said if text)


def kernel_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Microseconds and the share of the copy rate of each operation, by rows."""
    counts = sorted({row["rows"] for row in rows})
    titles = (
        "shape",
        "operation",
        "error",
        *(title for n in counts for title in (f"{n} rows: us", "of copy", "torch")),
    )
    lines = []
    for shape, operation in dict.fromkeys((row["shape"], row["operation"]) for row in rows):
        own = {row["rows"]: row for row in rows if (row["shape"], row["operation"]) == (shape, operation)}
        failed = any("error" in row or row.get("is_far") for row in own.values())
        cells = []
        for count in counts:
            row = own.get(count, {})
            triton = row.get("triton", {})
            peer = row.get("by_torch") or row.get("cublas") or row.get("reference", {})
            cells += [_microseconds(triton), _percent(triton.get("share_of_copy")), _microseconds(peer)]
        errors = [_error(row["triton"]) for row in own.values() if "triton" in row]
        lines.append((shape, operation + (" [red]failed[/]" if failed else ""), max(errors, default="-"), *cells))
    return _table(titles, lines)


def depth_table(name: str, models: Sequence[dict[str, Any]]) -> Table:
    """A decode step at each depth and under each schedule, and how it lies to its line."""
    titles = (name, "batch", "context", "layers", "ms per step", "tok/s", "of copy", "over the line", "realised")
    lines = []
    for about, setting in _settings(models):
        over = iter(setting.get("fit", {}).get("over_the_line", []))
        for row in [*setting.get("depths", []), *setting.get("schedules", [])]:
            is_depth = row in setting["depths"]
            line = next(over, None) if is_depth else None
            layers = str(row["depth"]) if is_depth else f"{row['mean_layers']:.1f} D3"
            rate = f"{row['tokens_per_s']:,.1f}" if row["tokens_per_s"] else "-"
            share, realised = _percent(row["share_of_copy"]), row.get("realisation")
            cells = (layers, f"{row['step_s'] * 1e3:.3f}", rate, share, _three_digits(line), _three_digits(realised))
            lines.append((*about, *cells))
    return _table(titles, lines)


def _settings(models: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Every setting with its first cells: model, batch and context."""
    for model in models:
        for setting in model["settings"]:
            yield (f"{model['name']} {model['scheme']}", str(setting["batch"]), str(setting["context"])), setting


def verdict_table(name: str, models: Sequence[dict[str, Any]]) -> Table:
    """Each setting's line, and which of its targets it has reached."""
    titles = (name, "batch", "context", "us per layer", "fixed us", "noise", "line within 5 %")
    titles += ("two depths within 5 %", "realisation", "first target")
    lines = []
    for about, setting in _settings(models):
        fit, goal = setting.get("fit"), setting.get("target")
        realised = [row["realisation"] for row in setting.get("schedules", []) if "speedup" in row]
        share = setting["depths"][0]["share_of_copy"] if setting.get("depths") else None
        lines.append(
            (
                *about,
                *(f"{fit[one] * 1e6:.1f}" if fit else "-" for one in ("layer_s", "fixed_s")),
                _percent(setting.get("noise")),
                (REACHED if fit["within_the_gate"] else MISSED) if fit else "-",
                _mixture(setting.get("mixed")),
                f"{min(realised):.3f} {REACHED if min(realised) >= LEAST_REALISATION else MISSED}" if realised else "-",
                f"{share:.2f} of {goal:.2f} {REACHED if share >= goal else MISSED}" if goal and share else "-",
            )
        )
    return _table(titles, lines)


def reading_table(rows: Sequence[dict[str, float]]) -> Table:
    """What a kernel that only reads reaches, by the bytes that it keeps under way."""
    units = {"in_flight": 1 / 1024, "bytes_per_s": 1e-9, "latency_s": 1e9}
    lines = [[f"{row[one] * unit:.0f}" for one, unit in units.items()] for row in rows]
    return _table(("KiB in flight per processor", "GB/s", "latency ns"), lines)


def switch_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Each choice: what the code takes today, and the fastest way of all, with what each keeps in flight."""
    lines = []
    for row in rows:
        ways = row.get("variants", {})
        failed = "error" in row or any("error" in way or way.get("is_far") for way in ways.values())
        timed = {name: _seconds(way) for name, way in ways.items() if _seconds(way) and not way.get("is_far")}
        best = min(timed, key=lambda name: timed[name], default="-")
        first = row.get("today", "-")
        gain = f"{timed[first] / timed[best] - 1:.1%}" if first in timed else "-"
        cells = [(name, _microseconds(ways.get(name, {})), _bandwidth(ways.get(name, {}))) for name in (first, best)]
        lines.append(
            (row["shape"], row["question"] + (" [red]failed[/]" if failed else ""), *cells[0], *cells[1], gain)
        )
    titles = ("shape", "choice", "today", "us", "GB/s (KiB in flight)", "fastest", "us", "GB/s", "gain")
    return _table(titles, lines)


def peer_table(cases: Sequence[dict[str, Any]]) -> Table:
    """Every system at each batch size and context; whole calls, and a decode step."""
    titles = ("batch", "context", "system", "tok/s, whole call", "ms per step", "engine faster by", "equal rows")
    lines = []
    for case in cases:
        for name, found in case["systems"].items():
            is_measured = "tokens_per_s" in found
            lines.append(
                (
                    *(str(case["batch"]), str(case["context"]), name + (" [red]failed[/]" if "error" in found else "")),
                    f"{found['tokens_per_s']:,.1f}" if is_measured else "-",
                    f"{found['step_s'] * 1e3:.3f}" if is_measured else "-",
                    f"{found['engine_is_faster_by']:.2f}" if "engine_is_faster_by" in found else "-",
                    str(found.get("rows_with_equal_tokens", "-")),
                    f"{found['warm_up_s']:.1f}" if "warm_up_s" in found else "-",
                )
            )
    return _table((*titles, "warm-up s"), lines)


def arrival_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Throughput and waits, one row a strategy."""
    titles = ("load", "admission", "depth", "tok/s", "first token ms (p95)", "a token ms (p95)", "layers", "KV saved")
    lines = [
        (
            *(f"{row['load']:.0%}", row["admission"], row["policy"]["policy"], f"{row['tokens_per_s']:,.0f}"),
            *(_spread(row["first_token_s"]), _spread(row["a_token_s"])),
            *(f"{row['mean_layers']:.1f}" if row["mean_layers"] else "-", _percent(row["kv_saved"])),
            f"{row['unfinished']} of {row['arrived']}",
        )
        for row in rows
    ]
    return _table((*titles, "unfinished"), lines)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    return table


def _error(found: dict[str, Any]) -> str:
    if "tokens_that_differ" in found:
        return f"{statistics.fmean(found['tokens_that_differ']):.0%} differ"
    return f"{max(found['relative_error']):.1e}" if "relative_error" in found else "-"


def _microseconds(found: dict[str, Any]) -> str:
    """The device's time; in brackets the eager one where there is no other."""
    if found.get("device_s"):
        return f"{found['device_s'] * 1e6:.1f}"
    return f"({found['eager_s'] * 1e6:.1f})" if "eager_s" in found else "-"


def _seconds(found: dict[str, Any]) -> float:
    return float(found.get("device_s") or found.get("eager_s") or 0.0)


def _bandwidth(found: dict[str, Any]) -> str:
    """Its rate, and what each of its kernels that read weights or the cache keeps in flight."""
    if "gb_per_s" not in found:
        return "-"
    in_flight = [f"{kernel['in_flight'] / 1024:.0f}" for kernel in found.get("kernels", []) if "in_flight" in kernel]
    return f"{found['gb_per_s']:.0f}" + (f" ({', '.join(in_flight)})" if in_flight else "")


def _three_digits(value: float | None) -> str:
    return f"{value:.3f}" if value else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _mixture(found: dict[str, Any] | None) -> str:
    """How far a batch of two depths lies above what uniform batches promise it."""
    if found is None:
        return "-"
    over = "-" if found["over_the_promise"] is None else f"{found['over_the_promise']:.3f}"
    return f"{over} {REACHED if found['within_the_gate'] else MISSED}"


def _spread(found: dict[str, float] | None) -> str:
    return f"{found['median'] * 1e3:.1f} ({found['p95'] * 1e3:.1f})" if found else "-"

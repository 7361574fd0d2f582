"""The round on a terminal: what was found as tables, the least important first, as a short log keeps the end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
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
    table = _table("part", "status", "seconds", "what")
    for name, found in parts.items():
        modes = "".join(f"[red]mode {earlier['mode']} failed; [/]" for earlier in found.get("earlier_modes", []))
        status = f"[red]{found['status']}[/]" if found["status"] == "failed" else found["status"]
        table.add_row(name, status, f"{found['part_seconds']:.1f}", modes + _summary(name, found))
    return table


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
    table = _table(
        "shape", "operation", "error", *(title for n in counts for title in (f"{n} rows: us", "of copy", "torch"))
    )
    for shape, operation in dict.fromkeys((row["shape"], row["operation"]) for row in rows):
        own = {row["rows"]: row for row in rows if (row["shape"], row["operation"]) == (shape, operation)}
        failed = any("error" in row or row.get("is_far") for row in own.values())
        cells = []
        for count in counts:
            row = own.get(count, {})
            triton = row.get("triton", {})
            cells += [
                _microseconds(triton),
                _percent(triton.get("share_of_copy")),
                _microseconds(row.get("by_torch") or row.get("cublas") or row.get("reference", {})),
            ]
        errors = [_error(row["triton"]) for row in own.values() if "triton" in row]
        table.add_row(shape, operation + (" [red]failed[/]" if failed else ""), max(errors, default="-"), *cells)
    return table


def depth_table(name: str, models: Sequence[dict[str, Any]]) -> Table:
    """A decode step at each depth and under each schedule, and how it lies to its line."""
    table = _table(name, "batch", "context", "layers", "ms per step", "tok/s", "of copy", "over the line", "realised")
    for model in models:
        for setting in model["settings"]:
            over = iter(setting.get("fit", {}).get("over_the_line", []))
            for row in [*setting.get("depths", []), *setting.get("schedules", [])]:
                is_depth = row in setting["depths"]
                line = next(over, None) if is_depth else None
                table.add_row(
                    f"{model['name']} {model['scheme']}",
                    str(setting["batch"]),
                    str(setting["context"]),
                    str(row["depth"]) if is_depth else f"{row['mean_layers']:.1f} D3",
                    f"{row['step_s'] * 1e3:.3f}",
                    f"{row['tokens_per_s']:,.1f}" if row["tokens_per_s"] else "-",
                    _percent(row["share_of_copy"]),
                    f"{line:.3f}" if line else "-",
                    f"{row['realisation']:.3f}" if "realisation" in row else "-",
                )
    return table


def verdict_table(name: str, models: Sequence[dict[str, Any]]) -> Table:
    """Each setting's line, and which of its targets it has reached."""
    table = _table(
        name,
        "batch",
        "context",
        "us per layer",
        "fixed us",
        "noise",
        "line within 5 %",
        "two depths within 5 %",
        "realisation",
        "first target",
    )
    for model in models:
        for setting in model["settings"]:
            fit, realised = (
                setting.get("fit"),
                [r["realisation"] for r in setting.get("schedules", []) if "speedup" in r],
            )
            share = setting["depths"][0]["share_of_copy"] if setting.get("depths") else None
            goal = setting.get("target")
            table.add_row(
                f"{model['name']} {model['scheme']}",
                str(setting["batch"]),
                str(setting["context"]),
                f"{fit['layer_s'] * 1e6:.1f}" if fit else "-",
                f"{fit['fixed_s'] * 1e6:.1f}" if fit else "-",
                _percent(setting.get("noise")),
                (REACHED if fit["within_the_gate"] else MISSED) if fit else "-",
                _mixture(setting.get("mixed")),
                f"{min(realised):.3f} {REACHED if min(realised) >= LEAST_REALISATION else MISSED}" if realised else "-",
                f"{share:.2f} of {goal:.2f} {REACHED if share >= goal else MISSED}" if goal and share else "-",
            )
    return table


def reading_table(rows: Sequence[dict[str, float]]) -> Table:
    """What a kernel that only reads reaches, by the bytes that it keeps under way."""
    table = _table("KiB in flight per processor", "GB/s", "latency ns")
    for row in rows:
        cells = (row["in_flight"] / 1024, row["bytes_per_s"] / 1e9, row["latency_s"] * 1e9)
        table.add_row(*(f"{cell:.0f}" for cell in cells))
    return table


def switch_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Each choice: what the code takes today, and the fastest way of all, with what each keeps in flight."""
    table = _table("shape", "choice", "today", "us", "GB/s (KiB in flight)", "fastest", "us", "GB/s", "gain")
    for row in rows:
        ways = row.get("variants", {})
        failed = "error" in row or any("error" in way or way.get("is_far") for way in ways.values())
        timed = {name: _seconds(way) for name, way in ways.items() if _seconds(way) and not way.get("is_far")}
        best = min(timed, key=lambda name: timed[name], default="-")
        first = row.get("today", "-")
        gain = f"{timed[first] / timed[best] - 1:.1%}" if first in timed else "-"
        table.add_row(
            row["shape"],
            row["question"] + (" [red]failed[/]" if failed else ""),
            first,
            _microseconds(ways.get(first, {})),
            _bandwidth(ways.get(first, {})),
            best,
            _microseconds(ways.get(best, {})),
            _bandwidth(ways.get(best, {})),
            gain,
        )
    return table


def peer_table(cases: Sequence[dict[str, Any]]) -> Table:
    """Every system at each batch size and context; whole calls, and a decode step."""
    table = _table(
        "batch", "context", "system", "tok/s, whole call", "ms per step", "engine faster by", "equal rows", "warm-up s"
    )
    for case in cases:
        for name, found in case["systems"].items():
            is_measured = "tokens_per_s" in found
            table.add_row(
                str(case["batch"]),
                str(case["context"]),
                name + (" [red]failed[/]" if "error" in found else ""),
                f"{found['tokens_per_s']:,.1f}" if is_measured else "-",
                f"{found['step_s'] * 1e3:.3f}" if is_measured else "-",
                f"{found['engine_is_faster_by']:.2f}" if "engine_is_faster_by" in found else "-",
                str(found.get("rows_with_equal_tokens", "-")),
                f"{found['warm_up_s']:.1f}" if "warm_up_s" in found else "-",
            )
    return table


def arrival_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Throughput and waits, one row a strategy."""
    table = _table(
        "load",
        "admission",
        "depth",
        "tok/s",
        "first token ms (p95)",
        "a token ms (p95)",
        "layers",
        "KV saved",
        "unfinished",
    )
    for row in rows:
        table.add_row(
            f"{row['load']:.0%}",
            row["admission"],
            row["policy"]["policy"],
            f"{row['tokens_per_s']:,.0f}",
            _spread(row["first_token_s"]),
            _spread(row["a_token_s"]),
            f"{row['mean_layers']:.1f}" if row["mean_layers"] else "-",
            _percent(row["kv_saved"]),
            f"{row['unfinished']} of {row['arrived']}",
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title)
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

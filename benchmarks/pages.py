"""Write the tables of figures on the pages anew from the committed runs.

    python -m benchmarks.pages            # writes them into the pages
    python -m benchmarks.pages --check    # exit status 1 and a line for each page that differs, as in `make docs`

A table stands between `<!-- figures: TABLE RUN ... -->` and `<!-- end of figures -->`: TABLE is a name of `TABLES`, RUN
a file of `benchmarks/results` without its ending, or `saturation-*`: all that begin so.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from benchmarks.cluster import COLUMNS
from benchmarks.report import interval
from d3engine.depth.labels import policy_in_words
from d3engine.depth.policy import policy_from_dict
from d3engine.research.analysis.layers import EARLY, LATE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- figures: ([\w.\-* ]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

Report = Mapping[str, Any]


def run(name: str) -> dict[str, Any]:
    """The report of a committed run."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


# -- cells ---------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        assert len(row) == len(header), row
        yield f"| {' | '.join(row)} |"


def spread(figure: Report, form: str = "", scale: float = 1.0) -> str:
    """The middle of some rounds with the least and the most: "1.43 (1.09-1.62)"; three digits without a `form`."""
    middle, low, high = (_number(value * scale, form) for value in _ends(figure))
    return f"{middle} ({low}-{high})"


def share(figure: Report) -> str:
    """A share with its interval, in percent: "97.4 % (96.7 to 98.1)"."""
    middle, low, high = (f"{100 * value:.1f}" for value in _ends(figure))
    return f"{middle} % ({low} to {high})"


def points(difference: float, bounds: Report) -> str:
    """A difference of shares with its interval, in points of 100: "-2.6 (-5.5 to +0.3)"."""
    return f"{100 * difference:+.1f} ({100 * bounds['low']:+.1f} to {100 * bounds['high']:+.1f})"


def depth(description: Report) -> str:
    """A policy in words."""
    return policy_in_words(policy_from_dict(description))


def _ends(figure: Report) -> tuple[float, float, float]:
    """The middle, the least and the most, which benchmarks name in two ways each."""
    middle = figure["median" if "median" in figure else "value"]
    return middle, figure["min" if "min" in figure else "low"], figure["max" if "max" in figure else "high"]


def _number(value: float, form: str) -> str:
    if form:
        return format(value, form)
    short = f"{value:#.3g}".rstrip(".")
    return f"{value:,.0f}" if "e" in short else short


def _prose(text: str) -> Iterator[str]:
    """A paragraph as the pages have it, an empty line before and behind."""
    yield from ("", *wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False), "")


# -- speed ---------------------------------------------------------------------------------------------------

SMALL, LARGE = ("smollm2", "SmolLM2-135M"), ("large", "24 x 1024")
LATER = ("cpu-large-lanes-zen4", "8-bit", "4-bit")
"""A run of its kinds alone, of a later version than the others of its model."""


def _rows_of(name: str, part: str) -> dict[tuple[str, int], dict[str, Any]]:
    """A part of a run of `benchmarks.cpu`, by kind of weights and by batch or length."""
    rows = {(row["kind"], row.get("batch", row.get("tokens"))): row for row in run(name)[part]}
    if name == "cpu-large-zen4":
        rows |= {key: row for key, row in _rows_of(LATER[0], part).items() if key[0] in LATER[1:]}
    return rows


def decoding() -> Iterator[str]:
    """Greedy decoding of one sequence beside transformers."""
    header: tuple[str, ...] = ("float32, batch 1", "transformers", "full depth", "D3 at two thirds of the layers")
    header += ("full depth over transformers", "D3 over full depth", "layer bound", "realisation ratio")
    header += ("peak MiB, transformers", "full depth")
    rows = []
    for name, model in (("demo", "the bundled model"), ("large", "random weights, 24 layers of width 1024")):
        found = run(f"decode-{name}-cpu")
        settings, systems = found["settings"], [found["systems"][one] for one in ("transformers", "full_depth", "d3")]
        rates = [f"{_number(one['tokens_per_second']['median'], '')} tok/s" for one in systems]
        ratios = [spread(found[one], ".2f") for one in ("full_depth_over_transformers", "d3_over_full_depth")]
        bounds = [f"{found[one]:.2f}" for one in ("layer_bound", "realisation_ratio")]
        peaks = [f"{one['memory']['peak_bytes'] / 2**20:,.0f}" for one in systems[:2]]
        title = f"{model}; {settings['tokens']} tokens, {settings['repeats']} rounds"
        rows.append((title, *rates, *ratios, *bounds, *peaks))
    yield from table(header, rows)


def skipped_layers() -> Iterator[str]:
    """What D3 gains of a step, and what its skipped layers promise."""
    rows = []
    for (name, model), kind, batch in product((SMALL, LARGE), ("16-bit", "4-bit"), (1, 8)):
        row = _rows_of(f"cpu-{name}-zen4", "depth")[kind, batch]
        ratios = spread(row["d3_over_full_depth"], ".2f"), f"{row['layer_bound']:.2f}"
        rows.append((model, kind, str(batch), *ratios, spread(row["realisation_ratio"], ".2f")))
    yield from table(("model", "weights", "rows", "D3 over full depth", "layer bound", "realisation ratio"), rows)


def steps() -> Iterator[str]:
    """Decode steps beside llama.cpp on two processors."""
    yield from _beside_llama_cpp("decode", "rows", (1, 8), "seconds_per_step")


def prompts() -> Iterator[str]:
    """Prompts beside llama.cpp on two processors."""
    yield from _beside_llama_cpp("prompt", "tokens", (512,), "seconds")


def _beside_llama_cpp(part: str, counted: str, sizes: Sequence[int], seconds: str) -> Iterator[str]:
    rows = []
    for (name, model), kind, size in product((SMALL, LARGE), ("16-bit", "8-bit", "4-bit"), sizes):
        cells = []
        for processor in ("-zen4", ""):
            row = _rows_of(f"cpu-{name}{processor}", part)[kind, size]
            ours = spread(row["systems"]["d3engine"][seconds], scale=1e3)
            cells += [ours, spread(row["over"]["llama.cpp"], ".2f")]
        rows.append((model, kind, str(size), *cells))
    ours, over = "ours, ms", "times as fast as llama.cpp"
    yield from table(("model", "weights", counted, f"Zen 4: {ours}", over, f"Xeon: {ours}", over), rows)


def bfloat16_activations() -> Iterator[str]:
    """Steps and prompts of 16-bit matrices and rounded activations beside llama.cpp."""
    rows = []
    for name, model in (SMALL, LARGE):
        decode, prompt = (_rows_of(f"cpu-{name}-bfloat16-activations", part) for part in ("decode", "prompt"))
        found = [decode["16-bit", count] for count in (1, 8)] + [prompt["16-bit", length] for length in (512, 2048)]
        rows.append((model, *(spread(row["over"]["llama.cpp"], ".2f") for row in found)))
    yield from table(("times as fast as llama.cpp", "1 row", "8 rows", "a prompt of 512", "of 2,048"), rows)


def steps_avx2() -> Iterator[str]:
    """Steps and prompts beside llama.cpp with AVX2."""
    decode, prompt = (_rows_of("cpu-smollm2-zen3", part) for part in ("decode", "prompt"))
    rows = []
    for kind in ("f32", "16-bit", "8-bit", "4-bit"):
        ours = spread(decode[kind, 1]["systems"]["d3engine"]["seconds_per_step"], scale=1e3)
        over = [row["over"]["llama.cpp"] for row in (decode[kind, 1], decode[kind, 8], prompt[kind, 512])]
        rows.append((SMALL[1], kind, ours, *(spread(one, ".2f") for one in over)))
    yield from table(("model", "weights", "one row, ms", "1 row", "8 rows", "a prompt of 512"), rows)


TWELVE_BITS = (
    "cpu-smollm2-zen3",
    "cpu-smollm2-zen4",
    "cpu-eager-smollm2-zen4",
    "cpu-large-zen4",
    "cpu-reading-large-2-threads-zen4",
)


def twelve_bits() -> Iterator[str]:
    """A step's time over matrices in 12 bits, over the time with bfloat16 in the same run."""
    rows = []
    for name in TWELVE_BITS:
        seconds = {
            key: row["systems"]["d3engine"]["seconds_per_step"]["median"]
            for key, row in _rows_of(name, "decode").items()
        }
        batches = [batch for batch in (1, 8) if ("12-bit", batch) in seconds]
        over = [f"{seconds['12-bit', batch] / seconds['16-bit', batch]:.2f}" for batch in batches]
        rows.append((f"`{name}`", *over, *["-"] * (2 - len(over))))
    yield from table(("run", "1 row", "8 rows"), rows)


def policies(name: str) -> Iterator[str]:
    """All policies at one mean depth."""
    from benchmarks.policies import markdown

    yield from markdown(run(name)).splitlines()


def gguf_file(name: str) -> Iterator[str]:
    """A GGUF file in the systems of a run."""
    found = run(name)
    settings, figures = found["settings"], found["figures"]
    measures = [
        (f"{rows} at once, tokens/s" if rows > 1 else "one answer, tokens/s", f"rows {rows}", 1.0)
        for rows in settings["rows"]
    ]
    measures += [(f"a prompt of {length:,} tokens, s", f"prompt {length}", 1.0) for length in settings["prompts"]]
    measures += [("until it can answer, s", "load", 1.0), ("memory, GB", "bytes", 1e-9)]
    rows = [
        (title, *(spread(of[key], scale=scale) if key in of else "-" for of in figures.values()))
        for title, key, scale in measures
    ]
    yield from table(("", *figures), rows)


def gguf_types(*names: str) -> Iterator[str]:
    """A model's files of other types: each system's means, "this one / that one"."""
    found = [run(name) for name in names]
    systems = list(found[0]["figures"])
    rows = []
    for one in found:

        def means(key: str, scale: float = 1.0, of: Any = one["figures"]) -> str:
            return " / ".join(_number(of[system][key]["value"] * scale, "") for system in systems)

        kind = one["settings"]["model"].removesuffix(".gguf").rpartition("-")[2]
        size = _number(one["file_bytes"] / 1e9, "")
        rows.append((kind, size, means("rows 1"), means("rows 8"), means("prompt 512"), means("bytes", 1e-9)))
    columns = "one answer, tokens/s", "8 at once, tokens/s", "a prompt of 512 tokens, s", "memory, GB"
    yield from table((" / ".join(systems), "file, GB", *columns), rows)


# -- speculative decoding --------------------------------------------------------------------------------------

NO_DRAFTS, PEER = "none", "llama.cpp"
NOTHING_AGAIN = "nothing, again"
DRAFTERS = {"none again": NOTHING_AGAIN, "auto": "", "draft": "", "lookup": "lookups", "lookup, auto": "lookups"}
"""By system who drafts; the draft model where nothing stands."""

TITLES = ("weights", "tokens", "drafts by", "tokens/s without")
KINDS = ("code", "problems", "edits", "chats")
TARGETS = {"coder-1.5b": "Q4_K_M", "q4_k_m.gguf": "Q4_K_M", "int8": "int8", "bf16": "bfloat16"}
"""Weights by the end of a target's name, the fewest bits first."""


def speculation() -> Iterator[str]:
    """What drafts gain over none by kind of prompt: a row for each drafter of each committed run, and how many answers
    were the same."""
    runs = [run(path.stem) for path in RESULTS.glob("speculation-*.json")]
    yield from gains(runs)


def gains(runs: Sequence[Report]) -> Iterator[str]:
    """Those of some runs: one answer at once first, the fewest bits a weight first, greedy ones first."""
    rows: list[tuple[str, ...]] = []
    same, answers = Counter[str](), Counter[str]()  # by what is drafted for
    for found in sorted(runs, key=_place_of):
        settings = found["settings"]
        cells = {(one["system"], one["temperature"], one["batch"], one["kind"]): one for one in found["cells"]}
        systems = [*(one for one in DRAFTERS if one in settings["systems"]), *_best_peer(cells)]
        for temperature, batch, system in product(settings["temperatures"], settings["batches"], systems):
            if (whole := cells.get((system, temperature, batch, "all"))) is None:
                continue
            base = PEER if system.startswith(PEER) else NO_DRAFTS
            if DRAFTERS.get(system) != NOTHING_AGAIN:
                same[base] += whole["equal"]
                answers[base] += whole["answers"]
            how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            how += f", {batch} at once" if batch > 1 else ""
            rate = _number(cells[base, temperature, batch, "all"]["tokens_per_second"], "")
            by_kind = [cells.get((system, temperature, batch, kind)) for kind in KINDS]
            gained = [spread(one["ratio"], ".2f") if one else "-" for one in by_kind]
            asked = f"{whole['answers']}, {settings['tokens']}"
            worst = f"{whole['worst']['ratio']:.2f}"
            rows.append((_weights_of(settings), how, _drafter(system, found), rate, *gained, worst, asked))
    yield ""
    yield from table((*TITLES, *KINDS, "worst prompt", "prompts, tokens at most"), rows)
    of_peer = f", of {PEER}'s {same[PEER]} of {answers[PEER]}" if answers[PEER] else ""
    yield from _prose(f"Token for token as without drafts: {same[NO_DRAFTS]} of {answers[NO_DRAFTS]} answers{of_peer}.")


def _place_of(found: Report) -> tuple[Any, ...]:
    settings = found["settings"]
    weights = list(TARGETS.values()).index(_weights_of(settings))
    return max(settings["batches"]), weights, min(settings["temperatures"]), -settings["tokens"]


def _weights_of(settings: Report) -> str:
    """Those of the target, which its name has at its end."""
    return next(weights for end, weights in TARGETS.items() if settings["model"].endswith(end))


def _best_peer(cells: Mapping[tuple[str, float, int, str], Report]) -> list[str]:
    """llama.cpp with the length of drafts by which it is fastest over all greedy prompts, where it was measured."""
    rates = {key[0]: one["tokens_per_second"] for key, one in cells.items() if key[1:] == (0, 1, "all")}
    lengths = [system for system in rates if system.startswith(f"{PEER}, ")]
    return [max(lengths, key=lambda system: rates[system])] if lengths else []


def _drafter(system: str, found: Report) -> str:
    if system.startswith(PEER):
        return f"{PEER} itself, {system.rpartition(' ')[2]} tokens"
    size = re.search(r"\d+(\.\d+)?[bm]\b", found["settings"]["draft"])
    drafter = DRAFTERS[system] or (f"the {size[0].upper()}" if size else "a draft model")
    length = re.search(r"'num_speculative_tokens': (\d+)", found["arguments"].get(system, ""))
    return f"{drafter}, {length[1]} tokens" if length else drafter


def routing(name: str) -> Iterator[str]:
    """What each routing between replicas saves, and how long requests wait."""
    shown = {key: what for key, what in COLUMNS.items() if key != "tokens_per_second"}
    rows = [
        (
            *(cell["arrivals"], cell["routing"]),
            *(spread(cell[key], f".{digits}f", scale) for key, (_, scale, digits) in shown.items()),
        )
        for cell in run(name)["cells"]
    ]
    yield from table(("arrivals", "routing", *(title for title, *_ in shown.values())), rows)


# -- quality ---------------------------------------------------------------------------------------------------


def activations(*names: str) -> Iterator[str]:
    """What activations of 8 bits cost each file."""
    rows = []
    for name in names:
        found, figures = run(name), run(name)["figures"]
        kl = interval(figures["kl"], ".5f")
        rows.append((f"`{found['settings']['model']}`", f"{figures['positions']:,}", kl, share(figures["same"])))
    yield from table(("file", "positions", "KL divergence, nats", "same likeliest token"), rows)


def weight_forms(name: str) -> Iterator[str]:
    """What forms of weights cost, on two kinds of texts."""
    by_form: dict[str, dict[str, Report]] = {}
    for row in run(name)["rows"]:
        by_form.setdefault(row["weights"], {})[row["texts"]] = row
    rows = []
    for form, of in by_form.items():
        bits = (f"{of['chats'][part]:.2f}" for part in ("bits_of_layers", "bits_of_all") if form != "floats")
        costs = ((interval(of[kind]["kl"], ".4f"), f"{of[kind]['perplexity']:.3f}") for kind in ("chats", "pages"))
        rows.append((form, ", ".join(bits) or "32", *chain.from_iterable(costs)))
    header = ("weights", "bits: layers, all", "KL, own answers", "perplexity", "KL, documentation", "perplexity")
    yield from table(header, rows)


def kv_cache(name: str) -> Iterator[str]:
    """What entries of the KV cache in fewer bits cost at full depth."""
    rows = []
    for row in run(name)["rows"]:
        if (row["depth"], row["texts"]) == ("full", "all") and row["cache"] != "float32":
            loss = interval(row["loss"], "+.4f")
            costs = interval(row["kl"], ".5f"), share(row["same"]), loss, f"{row['perplexity']:.3f}"
            rows.append((row["cache"], *costs))
    header = ("cache", "divergence (KL), nats", "same likeliest token", "loss of the text, nats", "perplexity")
    yield from table(header, rows)


def tool_calls(*names: str) -> Iterator[str]:
    """Calls of functions, and those that are right."""
    counted = ("calls", "calls that parse", "calls that are valid", "answers that call the right function")
    rows = []
    for found in map(run, names):
        model = found["environment"]["command"].split()[3]
        rows.append((f"`{model}`", *(str(found["counts"][one]) for one in counted)))
    yield from table(("model", "calls", "parse", "satisfy the schema", "right function"), rows)


def left_out(name: str) -> Iterator[str]:
    """What each layer costs where it is left out, in two halves side by side."""
    cells = [(str(nth), _kl(row["all"]), _agreement(row["all"])) for nth, row in enumerate(run(name)["policies"])]
    half = (len(cells) + 1) // 2
    header = ("layer", "KL, nats", "same likeliest token")
    pairs = zip_longest(cells[:half], cells[half:], fillvalue=("", "", ""))
    yield from table(header * 2, [one + other for one, other in pairs])


def students(name: str) -> Iterator[str]:
    """Policies and students against full depth."""
    found = run(name)
    rows = [
        (f"`{row['policy']}`", f"{row['layers_saved']:.3g}", _kl(row["all"]), _agreement(row["all"]))
        for row in found.get("measured", found)["policies"]
    ]
    yield from table(("generated tokens run", "layers saved", "KL, nats", "same likeliest token"), rows)


def blocks(name: str) -> Iterator[str]:
    """What stands for a window of layers."""
    rows = []
    for row in run(name)["rows"]:
        trained = f"{row['trained'] / 1e6:.1f}, {row['seconds'] / 60:.0f} min" if "trained" in row else ""
        runs = f"`{row['runs']}`" if "=" in row["runs"] else row["runs"]
        rows.append((runs, f"{row['layers_saved']:.3g}", _kl(row), _agreement(row), trained))
    header = ("generated tokens run", "layers saved", "KL, nats", "same likeliest token", "trained, millions")
    yield from table(header, rows)


def by_step(name: str) -> Iterator[str]:
    """KL divergence of the same policies by generation step."""
    rows = run(name)["measured"]["policies"]
    cells = [(f"`{row['policy']}`", *(_kl(one) for one in row["by_position"].values())) for row in rows]
    yield from table(("KL, nats, at steps", *rows[0]["by_position"]), cells)


def bridged(name: str) -> Iterator[str]:
    """What policies keep of full depth along held-out texts, their windows skipped and bridged."""
    rows = [
        (f"`{one['policy']}`", f"{one['mean_layers_with_bridges']:.2f}", f"{one['kl']:.3f}", _agreement(one))
        for one in run(name)["policies"]
    ]
    yield from table(("along a text", "layers, bridges counted", "KL, nats", "same likeliest token"), rows)


def _kl(of: Report) -> str:
    return f"{of['kl']:.3f} ± {of['kl_95']:.3f}"


def _agreement(of: Report) -> str:
    return f"{100 * of['agreement']:.1f} ± {100 * of['agreement_95']:.1f} %"


def by_generation_step(*names: str) -> Iterator[str]:
    """A figure of `d3engine analyze` by generation step; a run is named after its model and its texts."""
    found = {name: run(name) for name in names}
    groups = [one["steps"] for one in max((one["by_step"] for one in found.values()), key=len)]
    rows = []
    for name, one in found.items():
        _, model, texts = re.fullmatch(r"(\w+)-(.+)-(\w+)", name).groups()  # type: ignore[union-attr]
        cells = [f"{group['mean']:.3g} ± {group['arm_95']:.2g}" for group in one["by_step"]]
        late = one["late_less_early"]
        change = f"{late['value']:+.2f} ± {late['arm_95']:.2f}"
        rows.append((model, texts, *cells, *["-"] * (len(groups) - len(cells)), change))
    yield from table(("model", "texts", *groups, f"from {LATE} less {EARLY.start}-{EARLY.stop - 1}"), rows)


def windows(*names: str) -> Iterator[str]:
    """The window of layers that costs least, D3's at a start of 0.8 and the median, from step 1 on."""
    rows = []
    for name in names:
        found = run(name)
        layers, model = found["num_layers"], name.removeprefix("layers-")
        for width in sorted({one["layers_skipped"] for one in found["windows"]}):
            of_width = [one for one in found["windows"] if (one["from_step"], one["layers_skipped"]) == (1, width)]
            cheapest = min(of_width, key=lambda one: float(one["kl_nats"]))
            (usual,) = [one for one in of_width if one["first_layer"] == layers * 4 // 5]
            median = f"{np.median([one['kl_nats'] for one in of_width]):.2f}"
            rows.append((model, f"{width} of {layers}", *_window(cheapest), median, *_window(usual)))
    cells = ("KL, nats", "same likeliest token")
    yield from table(("model", "skipped", "cheapest", *cells, "KL, median window", "D3's, start 0.8", *cells), rows)


def _window(found: Report) -> tuple[str, str, str]:
    first, width = found["first_layer"], found["layers_skipped"]
    layers = f"{first}" if width == 1 else f"{first}-{first + width - 1}"
    kl = f"{found['kl_nats']:.2f} ± {found['kl_nats_arm_95']:.2f}"
    return layers, kl, f"{100 * found['same_first_choice']:.0f} %"


def evaluation(name: str) -> Iterator[str]:
    """What `d3engine eval --json` has found, by policy; a bridge counts as the share of a layer that it is."""
    (found,) = run(name)["benchmarks"]
    scores = found["scores"]
    counted = {"same_answers": f"same answer, of {found['problems']}", "unfinished": "cut off"}
    counted = {key: words for key, words in counted.items() if any(score.get(key) for score in scores)}
    rows = []
    for score in scores:
        less, layers = score["minus_first"], f"{score['realised_mean_layers_with_bridges']:.2f}"
        exact = f"{100 * score['exact_match']:.1f} % ({score['correct']})"
        minus = "" if less is None else points(less["difference"], less["interval"])
        counts = ("" if score[key] is None else str(score[key]) for key in counted)
        rows.append((depth(score["depth"]), exact, minus, layers, *counts))
    layers = f"layers of {scores[0]['num_layers']}, realised"
    yield from table(("depth", "exact match", "minus full depth, points", layers, *counted.values()), rows)


def learning(name: str) -> Iterator[str]:
    """The learning curve of a run of `d3engine depth train`."""
    rows = [
        (str(at["step"]), f"{at['tokens']:,}", f"{at['seconds'] / 60:.0f}", _kl(at), _agreement(at))
        for at in run(name)["curve"]
    ]
    yield from table(("steps", "tokens seen", "minutes", "KL, nats", "same likeliest token"), rows)


def by_task(name: str) -> Iterator[str]:
    """Right answers of a run of `d3engine eval --json` by task and policy."""
    found = run(name)["benchmarks"]

    def cell(score: Report, problems: int) -> str:
        low, high = (f"{100 * score['interval_95'][end]:.1f}" for end in ("low", "high"))
        return f"{score['correct']} of {problems} ({low} to {high} %)"

    rows = [(f"`{one['task']}`", *(cell(score, one["problems"]) for score in one["scores"])) for one in found]
    yield from table(("task", *(depth(score["depth"]) for score in found[0]["scores"])), rows)


def certificates(name: str) -> Iterator[str]:
    """What `d3engine calibrate --json` certified, in its order."""
    rows = [
        (
            *(depth(one["depth"]), str(one["problems"]), f"{one['realised_mean_layers']:.2f}"),
            *(f"{100 * one['exact_match']:.1f} %", points(one["difference"], one["difference_interval_95"])),
        )
        for one in run(name)["certificates"]
    ]
    yield from table(("setting", "problems", "layers per token", "exact match", "difference, points, 95 %"), rows)


def chances() -> Iterator[str]:
    """With what chance a setting without any loss is certified at two points; computed, of no run."""
    from d3engine.research.calibration.report import power_table
    from d3engine.research.calibration.statistics import Tolerance

    found = {problems: power_table(problems, Tolerance(0.02, False)) for problems in (190, 300, 500, 700, 1000, 2000)}
    differing = [f"{100 * one['differing']:g} % differ" for one in next(iter(found.values()))]
    rows = [(f"{problems:,}", *(f"{100 * one['certified']:.0f} %" for one in row)) for problems, row in found.items()]
    yield from table(("problems (`--limit`)", "no answer differs", *differing[1:]), rows)


# -- all runs --------------------------------------------------------------------------------------------------


def runs() -> Iterator[str]:
    """The committed runs of each benchmark: what it measures, and by which command and where they were made."""
    by_module: dict[str, list[tuple[str, str, str]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        ran = run(path.stem).get("environment")
        if ran is not None:
            command = re.search(r"-m benchmarks\.(\w+)", ran["command"])
            assert command is not None, path
            row = f"`{path.stem}`", f"`{ran['command']}`", f"{ran['cpu']}, {ran['commit']}"
            by_module.setdefault(command[1], []).append(row)
    for module, rows in sorted(by_module.items()):
        file = ROOT / "benchmarks" / module
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        says = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        yield from ("", f"### benchmarks.{module}", *_prose(says))
        yield from table(("run", "command", "processor, commit"), rows)


TABLES = {
    one.__name__: one
    for one in (
        decoding,
        skipped_layers,
        steps,
        prompts,
        steps_avx2,
        twelve_bits,
        policies,
        gguf_file,
        gguf_types,
        speculation,
        routing,
        activations,
        bfloat16_activations,
        weight_forms,
        kv_cache,
        tool_calls,
        left_out,
        students,
        blocks,
        by_step,
        by_generation_step,
        windows,
        bridged,
        evaluation,
        learning,
        by_task,
        certificates,
        chances,
        runs,
    )
}


def written(text: str) -> str:
    """A page with its tables as the committed runs have them."""

    def filled(mark: re.Match[str]) -> str:
        name, *given = mark[2].split()
        found = (sorted(path.stem for path in RESULTS.glob(f"{one}.json")) or [one] for one in given)
        names = list(chain.from_iterable(found))
        lines = re.sub(r"\n{3,}", "\n\n", "\n".join(TABLES[name](*names)).strip("\n"))
        return f"{mark[1]}\n{lines}\n\n{mark[3]}"

    return MARK.sub(filled, text)


def pages() -> list[Path]:
    """The pages that have tables of figures."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if MARK.search(page.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of all pages, or compare them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a page differs")
    is_check, differing = parser.parse_args(arguments).check, 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (anew := written(text)) != text:
            differing += 1
            done = "differs from the committed runs: python -m benchmarks.pages writes it" if is_check else "is written"
            print(f"{page.relative_to(ROOT).as_posix()} {done}")
            if not is_check:
                page.write_text(anew, encoding="utf-8")
    return int(is_check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())

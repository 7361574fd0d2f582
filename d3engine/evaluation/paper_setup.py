"""The D3 paper's Tables 1 to 5: what it compares, on which models, and over which settings.

The one idea: what these tables print stands beside what can be counted, which are the shapes of Llama-2, the lengths of
the reference answers, and the space that is searched here. What does not agree is said in a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from d3engine.depth.statistics import LLAMA2_BY_LAYERS, flops_ratio
from d3engine.evaluation.paper import FLOPS_RATIO_TOLERANCE, flops_ratios, policy_of
from d3engine.evaluation.paper_tables import (
    BENCHMARKS,
    D3_ROW,
    EARLY_EXIT,
    LAYERS,
    SIZES,
    TABLE_2,
    TABLE_4,
    TABLE_5_ALPHAS,
    TABLE_5_STARTS,
    TABLE_6,
    TABLE_9,
    TABLE_9_FULL_DEPTH,
    TABLE_9_STARTS,
)
from d3engine.evaluation.report import Table


@dataclass(frozen=True)
class Reference:
    """Reference answers in tokens, and the FLOPs ratio of the paper's setting over answers of these lengths, by size.

    Counted by `reference` with Llama-2's tokenizer, over the test questions, from the files as published.
    """

    fewest: int
    most: int
    mean: float
    ratios: tuple[float, ...]


REFERENCES = {
    "bbh": Reference(1, 56, 3.448, (1.2205, 1.2413, 1.2081)),
    "gsm8k": Reference(29, 428, 131.826, (1.0314, 1.0254, 1.0151)),
}
"""`d3engine paper --data DATA --tokenizer LLAMA2_7B` counts them again."""


def reference(benchmark: str, lengths: Sequence[int]) -> Reference:
    """What the paper's setting is worth over answers of these numbers of tokens, if no more is generated."""
    ratios = []
    for size in SIZES:
        shape = LLAMA2_BY_LAYERS[LAYERS[size]]
        layers = policy_of(size, benchmark).schedule(shape.num_layers).depths(max(lengths)).cumsum()
        mean = sum(int(layers[length - 1]) for length in lengths) / sum(lengths)
        ratios.append(flops_ratio(mean, shape.num_layers, shape.layer_parameters, shape.head_parameters))
    return Reference(min(lengths), max(lengths), fmean(lengths), tuple(ratios))


def setup_tables(references: dict[str, Reference] | None = None) -> list[Table]:
    """Tables 1 to 5 with their notes; `references` are those of `REFERENCES` unless others were counted."""
    return [_table_1(), _table_2(), _table_3(), _table_4(references or REFERENCES), _table_5()]


def _table_1() -> Table:
    yes, no = "yes", "no"
    return Table(
        "Table 1, what the methods can do, as they run in this engine",
        ("method", "here", "generation", "KV cache", "batching", "no extra draft", "task-adaptive"),
        [
            ("Early-EE", "not built: trained classifiers", "-", "-", "-", "-", "-"),
            ("CALM", "early-exit", yes, yes, yes, yes, "yes, by the token"),
            ("SkipDecode", "skipdecode", yes, yes, yes, yes, yes),
            ("SD", "speculative", yes, yes, yes, no, "no: the second model decides"),
            ("Self-SD", "draft-and-verify", yes, yes, yes, yes, yes),
            ("D3", "d3", yes, yes, yes, yes, yes),
        ],
        (
            "The marks that the paper prints were lost in the text that this was checked against; docs/policies.md",
            "names the test behind each of ours.",
        ),
    )


def _table_2() -> Table:
    rows = [
        (size, f"{row.layers}", f"{row.depth}", f"{row.depth / row.layers:.0%}", f"{row.confidence}")
        for size, row in TABLE_2.items()
    ]
    return Table(
        "Table 2, oracle saturation depth on word sorting, as printed",
        ("Llama-2", "layers", "saturation depth", "of all", "confidence"),
        rows,
        ("The confidences are presets of early exit here: EarlyExit.preset(32), (40) and (80).",),
    )


def _table_3() -> Table:
    rows = []
    for size in SIZES:
        shape = LLAMA2_BY_LAYERS[LAYERS[size]]
        total = shape.num_layers * shape.layer_parameters + 2 * shape.head_parameters
        grouped = "yes" if shape.num_kv_heads < shape.num_heads else "no"
        rows.append((size, f"{total / 1e9:.2f} billion", f"{shape.num_layers}", grouped))
    return Table("Table 3, the models", ("Llama-2", "parameters", "layers", "GQA"), rows)


def _table_4(references: dict[str, Reference]) -> Table:
    rows = []
    for name in BENCHMARKS:
        found, printed = references[name], TABLE_4[name]
        ratios = [row.flops_ratio for size in SIZES for row in TABLE_6[size, name] if row.method == D3_ROW]
        rows.append(
            (
                name,
                f"{printed.fewest} to {printed.most}",
                f"{found.fewest} to {found.most}",
                f"{found.mean:.1f}",
                " / ".join(f"{ratio:.2f}x" for ratio in ratios),
                " / ".join(f"{ratio:.3f}x" for ratio in found.ratios),
            )
        )
    return Table(
        "Table 4, lengths of the reference answers, and what D3's settings are worth on them",
        ("benchmark", "printed", "tokens", "mean", "printed ratios, 7B / 13B / 70B", "on the answers"),
        rows,
        (
            "What Table 4 calls tokens are characters. The printed ratios are over the maximum length (Table 6);",
            "in the last column every answer is as long as its reference, counted with Llama-2's tokenizer.",
        ),
    )


def _table_5() -> Table:
    return Table(
        "Table 5, the search space",
        ("parameter", "values"),
        [
            ("start", ", ".join(f"{start:g}" for start in TABLE_5_STARTS)),
            ("alpha", ", ".join(f"{alpha:g}" for alpha in TABLE_5_ALPHAS)),
        ],
        (
            "d3engine calibrate --grid paper tries these 28; without it alpha 0.99 as well, which the paper has not.",
            f"Table 9 has alpha {' and '.join(f'{row.alpha:g}' for row in TABLE_9['7B'])} alone.",
        ),
    )


def further_notes() -> list[str]:
    """What does not agree within the paper's own tables, in sentences."""
    printed = [row.flops_ratio for rows in TABLE_6.values() for row in rows if row.method == D3_ROW and row.flops_ratio]
    compared = flops_ratios()
    as_printed = sum(round(one.ours, 2) == one.papers for one in compared)
    within = sum(one.agrees for one in compared)
    early = {key: next(row.exact_match for row in rows if row.method == EARLY_EXIT) for key, rows in TABLE_6.items()}
    chosen = TABLE_9["7B"][1].validation[TABLE_9_STARTS.index(policy_of("7B", "gsm8k").start)]
    full = TABLE_9_FULL_DEPTH["7B"].validation
    return [
        f"The six printed ratios of D3 average {fmean(printed):.2f}x; the abstract says 1.5x.",
        f"Early Exit of 70B on GSM8K is printed as {early['70B', 'gsm8k']}, which is the number of 13B "
        f"({early['13B', 'gsm8k']}); full depth has 52.91 there.",
        f"In Table 9, 7B at full depth has {full} on validation and the setting that was chosen {chosen}: below it.",
        f"Of the {len(compared)} printed FLOPs ratios {as_printed} are ours to both digits, "
        f"{within} to within {FLOPS_RATIO_TOLERANCE}.",
    ]

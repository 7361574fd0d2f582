"""The D3 paper's Tables 1 to 5 next to what can be counted: shapes of Llama-2, lengths of
reference answers, the space that is searched here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from math import sqrt
from statistics import fmean

from d3engine.depth import D3
from d3engine.depth.statistics import LLAMA2_BY_LAYERS, PRESETS, ModelShape, flops_ratio, layer_bound, mean_depth
from d3engine.research.analysis.report import Table
from d3engine.research.evaluation import paper_tables as printed
from d3engine.research.evaluation.paper_tables import BENCHMARKS, D3_ROW, LAYERS, SIZES, TABLE_6, TABLE_8, TABLE_9


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
        layers = policy_of(size, benchmark).schedule(LAYERS[size]).depths(max(lengths)).cumsum()
        ratios.append(_flops_ratio(size, sum(int(layers[length - 1]) for length in lengths) / sum(lengths)))
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
            "The marks that the paper prints were lost in the text that this was checked against;",
            "docs/reference/policies.md names the test behind each of ours.",
        ),
    )


def _table_2() -> Table:
    return Table(
        "Table 2, oracle saturation depth on word sorting, as printed",
        ("Llama-2", "layers", "saturation depth", "of all", "confidence"),
        [
            (size, f"{layers}", f"{depth}", f"{depth / layers:.0%}", f"{confidence}")
            for size, (layers, depth, confidence) in printed.TABLE_2.items()
        ],
        ("The confidences are presets of early exit here: EarlyExit.preset(32), (40) and (80).",),
    )


def _table_3() -> Table:
    rows = []
    for size in SIZES:
        shape = _shape(size)
        total = shape.num_layers * shape.layer_parameters + 2 * shape.head_parameters
        grouped = "yes" if shape.num_kv_heads < shape.num_heads else "no"
        rows.append((size, f"{total / 1e9:.2f} billion", f"{shape.num_layers}", grouped))
    return Table("Table 3, the models", ("Llama-2", "parameters", "layers", "GQA"), rows)


def _table_4(references: dict[str, Reference]) -> Table:
    rows = []
    for name in BENCHMARKS:
        found, (fewest, most) = references[name], printed.TABLE_4[name]
        rows.append(
            (
                name,
                f"{fewest} to {most}",
                f"{found.fewest} to {found.most}",
                f"{found.mean:.1f}",
                " / ".join(f"{_row(size, name, D3_ROW).flops_ratio:.2f}x" for size in SIZES),
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
            ("start", ", ".join(f"{start:g}" for start in printed.TABLE_5_STARTS)),
            ("alpha", ", ".join(f"{alpha:g}" for alpha in printed.TABLE_5_ALPHAS)),
        ],
        (
            "d3engine calibrate --grid paper tries these 28; without it alpha 0.99 as well, which the paper has not.",
            f"Table 9 has alpha {' and '.join(f'{row.alpha:g}' for row in TABLE_9['7B'])} alone.",
        ),
    )


def further_notes() -> list[str]:
    """What does not agree within the paper's own tables, in sentences."""
    ratios = [row.flops_ratio for rows in TABLE_6.values() for row in rows if row.method == D3_ROW and row.flops_ratio]
    compared = flops_ratios()
    as_printed = sum(round(one.ours, 2) == one.papers for one in compared)
    within = sum(one.agrees for one in compared)
    early = {size: _row(size, "gsm8k", printed.EARLY_EXIT).exact_match for size in SIZES}
    chosen = TABLE_9["7B"][1].validation[printed.TABLE_9_STARTS.index(policy_of("7B", "gsm8k").start)]
    full, _ = printed.TABLE_9_FULL_DEPTH["7B"]
    return [
        f"The six printed ratios of D3 average {fmean(ratios):.2f}x; the abstract says 1.5x.",
        f"Early Exit of 70B on GSM8K is printed as {early['70B']}, which is the number of 13B "
        f"({early['13B']}); full depth has 52.91 there.",
        f"In Table 9, 7B at full depth has {full} on validation and the setting that was chosen {chosen}: below it.",
        f"Of the {len(compared)} printed FLOPs ratios {as_printed} are ours to both digits, "
        f"{within} to within {FLOPS_RATIO_TOLERANCE}.",
        f"The introduction promises 1.07x to 1.94x; the least ratio of D3 in Table 6 is {min(ratios):.2f}x "
        "(70B, GSM8K).",
        f"Section 4 counts 23 tasks of BBH and Table 8 averages {len(TABLE_8)} rows: logical deduction and tracking "
        "have three sizes each.",
        'The two rows that Table 8 prints as "(2 objects)" are three_objects; BBH has three, five and seven.',
        *_middle_starts(),
        "Figure 5 is cited with Table 6 for exact match; its data are in no table. Table 6's differences "
        f"are {' '.join(f'{gain.points:+.2f}' for gain in gains())} points (7B, 13B, 70B on BBH, then on GSM8K).",
        "Figure 3 runs over pre-training steps; Llama-2's checkpoints of these are not public, so d3engine analyze "
        "flow shows its layers at the end of training alone.",
    ]


def _middle_starts() -> list[str]:
    """Where Table 9's lowest test scores stand, against section 4.3: "start the decay from the middle"."""
    found = []
    for size, rows in TABLE_9.items():
        row = next(row for row in rows if row.alpha == 0.9999)
        worst = printed.TABLE_9_STARTS[row.test.index(min(row.test))]
        found.append(
            f"In Table 9, {size}, alpha {row.alpha}, the start {worst} near the middle has the lowest test score "
            f"({', '.join(f'{score:.2f}' for score in row.test)} from 0.2 to 0.8), against section 4.3."
        )
    return found


MEAN_LAYERS_TOLERANCE = 0.0051
"""Half of the last digit that the paper prints; two of its BBH means are rounded from float32."""

FLOPS_RATIO_TOLERANCE = 0.01
"""The paper's ratios are partly rounded, partly cut."""

AVERAGE_TOLERANCE = 0.0051


@dataclass(frozen=True)
class Compared:
    """One figure of ours beside the paper's."""

    table: str
    size: str
    benchmark: str
    setting: str
    papers: float
    ours: float
    tolerance: float

    @property
    def difference(self) -> float:
        return self.ours - self.papers

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.tolerance


@dataclass(frozen=True)
class WallClock:
    """A column of Table 7: the printed speed-up, the one its seconds give, and the most that its layers allow."""

    size: str
    full_depth: float
    d3: float
    printed_speedup: float
    layer_bound: float

    @property
    def speedup(self) -> float:
        return self.full_depth / self.d3


@dataclass(frozen=True)
class Average:
    """The last row of Table 8 for one column, and what its 27 rows give, each weighted by its items or all alike."""

    size: str
    method: str
    papers: float
    by_items: float
    unweighted: float

    @property
    def agrees(self) -> bool:
        return abs(self.by_items - self.papers) <= AVERAGE_TOLERANCE


@dataclass(frozen=True)
class Misprint:
    """A cell of Table 8 whose printed change is not the difference of its two scores."""

    size: str
    task: str
    full: float
    d3: float
    printed_change: float


@dataclass(frozen=True)
class Gain:
    """D3 minus full depth in points, and in standard errors of such a difference without pairs.

    The paper prints no answers, so pairs cannot be formed; a paired standard error would be smaller.
    """

    size: str
    benchmark: str
    points: float
    standard_error: float

    @property
    def in_standard_errors(self) -> float:
        return self.points / self.standard_error


@dataclass(frozen=True)
class GridCell:
    """The setting in Table 9 whose test score is the one that Table 6 reports, and the best on the validation split."""

    size: str
    alpha: float
    start: float
    validation: float
    test: float
    best_alpha: float
    best_start: float
    best_validation: float


@dataclass(frozen=True)
class Reproduction:
    """What a command of ours shows of the paper, for those who have the weights."""

    shows: str
    command: str


@dataclass(frozen=True)
class PaperReport:
    """Everything that `d3engine paper` says."""

    mean_layers: list[Compared]
    flops_ratios: list[Compared]
    wall_clock: list[WallClock]
    averages: list[Average]
    misprints: list[Misprint]
    gains: list[Gain]
    grid: list[GridCell]
    reproduce: tuple[Reproduction, ...]


_BBH, _GSM8K = '--depth "d3 alpha=0.9 start=0.6"', '--depth "d3 alpha=0.9999 start=0.8"'
_SORTING = "LLAMA2_7B --task bbh/word_sorting --data DATA"
_STARTS = " ".join(f'--depth "d3 alpha=0.9999 start={start}"' for start in printed.TABLE_9_STARTS)

_REPRODUCE = f"""\
Tables 6 and 8, BBH: exact match, mean layers, FLOPs ratio, each of the 27 tasks
d3engine eval LLAMA2_7B --tasks bbh --data DATA --compare-full {_BBH} --baselines
the same with SkipDecode at the depth that Table 6 prints, which is above D3's
d3engine eval LLAMA2_7B --tasks bbh --data DATA --compare-full {_BBH} \
--depth "skipdecode mean-layers=24.68 decay-steps=200"
Table 6, GSM8K, and Table 7: the wall clock is in the same table; Early Exit at D3's depth is a baseline
d3engine eval LLAMA2_7B --tasks gsm8k --data DATA --compare-full {_GSM8K} --baselines
Table 6, Early Exit at the confidence of Table 2
d3engine eval LLAMA2_7B --tasks bbh --data DATA --compare-full {_BBH} --depth "early-exit threshold=0.8"
the same through lm-evaluation-harness, whose scores the paper reports
d3engine eval LLAMA2_7B --tasks gsm8k --num-fewshot 3 --compare-full {_GSM8K}
the same for BBH
d3engine eval LLAMA2_7B --tasks bbh_fewshot --compare-full {_BBH}
Table 7 against transformers: its side, by the harness's own backend
lm_eval --model hf --model_args pretrained=LLAMA2_7B --tasks gsm8k --num_fewshot 3 --batch_size 4 \
--gen_kwargs max_gen_toks=1024
Table 9 and Figure 6: one start and decay a policy
d3engine eval LLAMA2_7B --tasks gsm8k --data DATA --split validation --compare-full {_STARTS}
Table 5: all 28 settings by successive halving, and a setting that is safe or none
d3engine calibrate LLAMA2_7B --task gsm8k --data DATA --grid paper --plot grid.png --out d3.json
section 4.1, transfer: 7B's setting, checked on a larger model and nothing else
d3engine calibrate LLAMA2_13B --task gsm8k --data DATA --check "d3 alpha=0.9999 start=0.8" --out d3.json
Table 2: the layer after which a prediction is settled, and how sure the model is there
d3engine analyze saturation {_SORTING} --png saturation.png
section 3.2: every token leaves there, with copied and with recomputed entries
d3engine analyze oracle {_SORTING}
Figure 2a: the last layers copied at one step, with copied and with recomputed entries
d3engine analyze perturb {_SORTING} --png perturb.png
the same from a step on, for the rest of the answer
d3engine analyze copy {_SORTING} --png copy.png
Figure 2b: perplexity by position
d3engine analyze perplexity LLAMA2_7B --task gsm8k --data DATA --png perplexity.png
Figure 3, at the end of training: what each layer changes, its attention and its MLP
d3engine analyze flow LLAMA2_7B --task gsm8k --data DATA --png flow.png
the limitation that section 6 names: what special tokens need and lose, by kind
d3engine analyze kinds LLAMA2_7B --task gsm8k --data DATA --reference-answers {_GSM8K} --png kinds.png
Figure 5: exact match beside full depth, drawn on a page
d3engine eval LLAMA2_7B --tasks gsm8k --data DATA --compare-full {_GSM8K} --html figure5.html
Figure 4: the schedules
d3engine analyze schedule LLAMA2_7B --start 0.6 --steps 200 --png schedule.png
Figure 7: an answer coloured by the layers that its tokens used
d3engine analyze sample LLAMA2_7B --task gsm8k --data DATA --depth "d3 alpha=0.9 start=0.6" --html sample.html
Table 4 in tokens, counted again
d3engine paper --data DATA --tokenizer LLAMA2_7B
"""
_LINES = _REPRODUCE.splitlines()

REPRODUCE = tuple(starmap(Reproduction, zip(_LINES[::2], _LINES[1::2], strict=True)))
"""Directory and data sets are the reader's. 13B takes start 0.5 on BBH, 0.7 on GSM8K."""


def report() -> PaperReport:
    """Compute everything; takes a fraction of a second."""
    return PaperReport(
        mean_layers=mean_layers(),
        flops_ratios=flops_ratios(),
        wall_clock=wall_clock(),
        averages=averages(),
        misprints=misprints(),
        gains=gains(),
        grid=grid_cells(),
        reproduce=REPRODUCE,
    )


def policy_of(size: str, benchmark: str) -> D3:
    """The paper's setting. Of 70B on GSM8K it names no start: 7B's is taken, and the mean depth is that of any."""
    by_layers = PRESETS[benchmark]
    alpha, start = by_layers.get(LAYERS[size], by_layers[LAYERS["7B"]])
    return D3(alpha, start)


def mean_layers() -> list[Compared]:
    """Table 6, #Avg.Layer of D3: over the maximum length."""
    found = []
    for size, benchmark in _columns():
        policy, papers = policy_of(size, benchmark), _row(size, benchmark, D3_ROW).mean_layers
        ours = mean_depth(policy.schedule(LAYERS[size]), printed.MAX_TOKENS[benchmark])
        setting = f"alpha {policy.alpha}, start {policy.start}"
        found.append(Compared("6", size, benchmark, setting, papers, ours, MEAN_LAYERS_TOLERANCE))
    return found


def flops_ratios() -> list[Compared]:
    """Table 6, FLOPs r., LM head included: D3's from our schedules, the other methods' from their printed means."""
    means = {(c.size, c.benchmark): c.ours for c in mean_layers()}
    found = []
    for size, benchmark in _columns():
        for row in TABLE_6[size, benchmark]:
            if row.flops_ratio is not None:
                ours = _flops_ratio(size, means[size, benchmark] if row.method == D3_ROW else row.mean_layers)
                found.append(Compared("6", size, benchmark, row.method, row.flops_ratio, ours, FLOPS_RATIO_TOLERANCE))
    return found


def wall_clock() -> list[WallClock]:
    """Table 7 beside the layer bound of GSM8K's setting, if every answer had all 1024 tokens."""
    found = []
    for size in SIZES:
        shape = _shape(size)
        depths = policy_of(size, "gsm8k").schedule(shape.num_layers).depths(printed.MAX_TOKENS["gsm8k"]).tolist()
        sizes = {"layer_size": shape.layer_parameters, "head_size": shape.head_parameters}
        bound = layer_bound(depths, num_layers=shape.num_layers, **sizes)
        found.append(WallClock(size, *printed.TABLE_7[size], bound))
    return found


def averages() -> list[Average]:
    """Table 8's last row, from its other rows."""
    items = sum(row.items for row in TABLE_8)
    found = []
    for place, size in enumerate(SIZES):
        for method in ("full", "d3"):
            scores = [getattr(row.scores[place], method) for row in TABLE_8]
            by_items = sum(score * row.items for score, row in zip(scores, TABLE_8, strict=True)) / items
            papers = getattr(printed.TABLE_8_AVERAGE[place], method)
            found.append(Average(size, method, papers, by_items, sum(scores) / len(scores)))
    return found


def misprints() -> list[Misprint]:
    """Cells of Table 8 that contradict themselves."""
    return [
        Misprint(size, row.task, *pair)
        for row in TABLE_8
        for size, pair in zip(SIZES, row.scores, strict=True)
        if abs(abs(pair.d3 - pair.full) - pair.printed_change) > AVERAGE_TOLERANCE
    ]


def gains() -> list[Gain]:
    """Table 6, exact match of D3 minus full depth."""
    found = []
    for size, benchmark in _columns():
        full, d3 = (_row(size, benchmark, method).exact_match / 100 for method in (printed.FULL_DEPTH, D3_ROW))
        error = sqrt((full * (1 - full) + d3 * (1 - d3)) / printed.ITEMS[benchmark])
        found.append(Gain(size, benchmark, 100 * (d3 - full), 100 * error))
    return found


def grid_cells() -> list[GridCell]:
    """Where Table 6's GSM8K scores stand in Table 9."""
    found = []
    for size, rows in TABLE_9.items():
        reported = _row(size, "gsm8k", D3_ROW).exact_match
        cells = [
            (validation, test, row.alpha, start)
            for row in rows
            for validation, test, start in zip(row.validation, row.test, printed.TABLE_9_STARTS, strict=True)
        ]
        best_validation, _, best_alpha, best_start = max(cells)
        for validation, test, alpha, start in cells:
            if test == reported:
                found.append(GridCell(size, alpha, start, validation, test, best_alpha, best_start, best_validation))
    return found


def _columns() -> list[tuple[str, str]]:
    return [(size, benchmark) for benchmark in BENCHMARKS for size in SIZES]


def _row(size: str, benchmark: str, method: str) -> printed.Table6Row:
    return next(row for row in TABLE_6[size, benchmark] if row.method == method)


def _shape(size: str) -> ModelShape:
    return LLAMA2_BY_LAYERS[LAYERS[size]]


def _flops_ratio(size: str, mean: float) -> float:
    shape = _shape(size)
    return flops_ratio(mean, shape.num_layers, shape.layer_parameters, shape.head_parameters)

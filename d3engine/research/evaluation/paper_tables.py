"""The D3 paper's Tables 2 and 4 to 9 as printed, misprints too, which `paper` points out.
Llama-2 of 32, 40 and 80 layers are its 7B, 13B and 70B."""

from __future__ import annotations

from typing import NamedTuple

SIZES = ("7B", "13B", "70B")
LAYERS = {"7B": 32, "13B": 40, "70B": 80}

BENCHMARKS = ("bbh", "gsm8k")
MAX_TOKENS = {"bbh": 200, "gsm8k": 1024}
"""Table 6: "maximum length"; the mean layers are over this number of tokens, whatever was really generated."""

ITEMS = {"bbh": 6511, "gsm8k": 1319}
"""Of the public data sets, not printed; every score of Table 8 is a whole number of such items."""

FULL_DEPTH, EARLY_EXIT, SKIP_DECODE, D3_ROW = "Full Depth", "Early Exit", "SkipDecode", "Ours: D3"


class Table2Row(NamedTuple):
    """The oracle of section 3.2 on word sorting: layers of the model, saturation depth, and the confidence there."""

    layers: int
    depth: int
    confidence: float


TABLE_2 = {"7B": Table2Row(32, 21, 0.8), "13B": Table2Row(40, 23, 0.7), "70B": Table2Row(80, 53, 0.8)}


class Lengths(NamedTuple):
    """What Table 4 prints of the reference answers."""

    fewest: int
    most: int


TABLE_4 = {"bbh": Lengths(2, 182), "gsm8k": Lengths(50, 1230)}

TABLE_5_STARTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
TABLE_5_ALPHAS = (0.8, 0.9, 0.999, 0.9999)


class Table6Row(NamedTuple):
    """One method at one size on one benchmark; `flops_ratio` is None where the paper prints a dash."""

    method: str
    exact_match: float
    mean_layers: float
    flops_ratio: float | None


TABLE_6: dict[tuple[str, str], tuple[Table6Row, ...]] = {
    ("7B", "bbh"): (
        Table6Row(FULL_DEPTH, 31.22, 32.00, None),
        Table6Row(EARLY_EXIT, 31.22, 19.73, 1.60),
        Table6Row(SKIP_DECODE, 31.65, 24.68, 1.28),
        Table6Row(D3_ROW, 31.88, 19.17, 1.64),
    ),
    ("7B", "gsm8k"): (
        Table6Row(FULL_DEPTH, 10.61, 32.00, None),
        Table6Row(EARLY_EXIT, 10.61, 29.90, 1.07),
        Table6Row(SKIP_DECODE, 0.00, 29.90, 1.07),
        Table6Row(D3_ROW, 12.05, 29.90, 1.07),
    ),
    ("13B", "bbh"): (
        Table6Row(FULL_DEPTH, 37.77, 40.00, None),
        Table6Row(EARLY_EXIT, 37.72, 33.50, 1.19),
        Table6Row(SKIP_DECODE, 38.98, 30.99, 1.29),
        Table6Row(D3_ROW, 39.07, 20.33, 1.94),
    ),
    ("13B", "gsm8k"): (
        Table6Row(FULL_DEPTH, 22.67, 40.00, None),
        Table6Row(EARLY_EXIT, 22.74, 37.51, 1.06),
        Table6Row(SKIP_DECODE, 9.32, 37.51, 1.06),
        Table6Row(D3_ROW, 23.43, 37.51, 1.06),
    ),
    ("70B", "bbh"): (
        Table6Row(FULL_DEPTH, 50.90, 80.00, None),
        Table6Row(EARLY_EXIT, 50.02, 50.14, 1.59),
        Table6Row(SKIP_DECODE, 51.87, 62.48, 1.27),
        Table6Row(D3_ROW, 51.42, 48.43, 1.65),
    ),
    ("70B", "gsm8k"): (
        Table6Row(FULL_DEPTH, 52.91, 80.00, None),
        Table6Row(EARLY_EXIT, 22.74, 75.53, 1.05),
        Table6Row(SKIP_DECODE, 26.68, 75.53, 1.05),
        Table6Row(D3_ROW, 54.51, 75.53, 1.05),
    ),
}
"""(size, benchmark) -> rows. Exact match in percent."""


class Table7Column(NamedTuple):
    """Wall clock of all of GSM8K, at full depth in transformers and with D3, and the speed-up as printed."""

    full_depth: float
    d3: float
    speedup: float


TABLE_7 = {
    "7B": Table7Column(6218, 5559, 1.12),
    "13B": Table7Column(10428, 8427, 1.23),
    "70B": Table7Column(12893, 11294, 1.14),
}


class Pair(NamedTuple):
    """Exact match at full depth and with D3, and the printed size of their difference (0 where none is printed)."""

    full: float
    d3: float
    printed_change: float = 0.0


class Table8Row(NamedTuple):
    """One BBH task: its file's name, the items of that file, and a pair for 7B, 13B and 70B."""

    task: str
    items: int
    scores: tuple[Pair, Pair, Pair]


TABLE_8 = (
    Table8Row("boolean_expressions", 250, (Pair(68.40, 68.40), Pair(72.80, 72.80), Pair(82.00, 82.00))),
    Table8Row("causal_judgement", 187, (Pair(50.27, 50.27), Pair(54.55, 54.55), Pair(62.57, 62.57))),
    Table8Row("date_understanding", 250, (Pair(36.80, 37.60, 0.8), Pair(51.20, 51.60, 0.4), Pair(61.60, 61.60))),
    Table8Row("disambiguation_qa", 250, (Pair(53.60, 49.20, 4.4), Pair(32.80, 36.40, 3.6), Pair(57.20, 58.00, 0.8))),
    Table8Row("dyck_languages", 250, (Pair(8.00, 19.60, 11.6), Pair(6.00, 7.60, 1.6), Pair(20.00, 22.80, 2.8))),
    Table8Row("formal_fallacies", 250, (Pair(43.60, 43.60), Pair(52.40, 52.40), Pair(52.00, 51.60, 0.4))),
    Table8Row("geometric_shapes", 250, (Pair(9.20, 9.60, 0.4), Pair(31.60, 34.00, 2.4), Pair(47.60, 46.80, 0.8))),
    Table8Row("hyperbaton", 250, (Pair(48.40, 48.40), Pair(61.20, 61.20), Pair(74.00, 72.80, 1.2))),
    Table8Row(
        "logical_deduction_five_objects",
        250,
        (Pair(25.60, 24.00, 1.6), Pair(21.20, 25.60, 4.4), Pair(35.20, 36.00, 0.8)),
    ),
    Table8Row(
        "logical_deduction_seven_objects",
        250,
        (Pair(14.80, 15.20, 0.4), Pair(18.40, 24.00, 5.6), Pair(42.00, 41.20, 0.8)),
    ),
    Table8Row(  # printed as "2 objects"; BBH has three, five and seven
        "logical_deduction_three_objects",
        250,
        (Pair(32.40, 36.00, 3.6), Pair(39.60, 41.60, 2), Pair(59.20, 63.60, 4.4)),
    ),
    Table8Row("movie_recommendation", 250, (Pair(38.40, 41.60, 3.2), Pair(74.40, 76.00, 1.6), Pair(92.00, 92.80, 0.8))),
    Table8Row("multistep_arithmetic_two", 250, (Pair(0.40, 0.80, 0.4), Pair(1.20, 1.20), Pair(1.20, 1.60, 0.4))),
    Table8Row("navigate", 250, (Pair(41.60, 41.60), Pair(59.20, 59.20), Pair(59.60, 58.80, 0.8))),
    Table8Row("object_counting", 250, (Pair(35.60, 28.80, 6.8), Pair(50.00, 48.40, 1.6), Pair(51.60, 53.20, 1.6))),
    Table8Row(
        "penguins_in_a_table", 146, (Pair(24.66, 27.40, 2.74), Pair(29.45, 30.14, 0.69), Pair(39.04, 41.10, 2.06))
    ),
    Table8Row(
        "reasoning_about_colored_objects",
        250,
        (Pair(21.60, 21.20, 0.4), Pair(27.20, 26.80, 0.4), Pair(45.60, 49.20, 3.6)),
    ),
    Table8Row("ruin_names", 250, (Pair(26.40, 27.60, 1.2), Pair(40.00, 43.60, 3.6), Pair(82.80, 84.80, 2))),
    Table8Row(
        "salient_translation_error_detection",
        250,
        (Pair(23.60, 22.00, 1.6), Pair(35.20, 34.00, 1.2), Pair(50.40, 50.40)),
    ),
    Table8Row("snarks", 178, (Pair(46.63, 48.88, 2.25), Pair(52.81, 53.37, 0.56), Pair(80.34, 80.90, 0.56))),
    Table8Row("word_sorting", 250, (Pair(12.00, 20.00, 10), Pair(16.00, 31.60, 15.6), Pair(32.40, 27.20, 5.2))),
    Table8Row("sports_understanding", 250, (Pair(66.40, 66.40), Pair(64.80, 64.80), Pair(80.40, 80.40))),
    Table8Row("temporal_sequences", 250, (Pair(7.60, 10.00, 2.4), Pair(18.80, 12.00, 6.8), Pair(62.40, 66.80, 4.4))),
    Table8Row(
        "tracking_shuffled_objects_five_objects",
        250,
        (Pair(15.60, 16.8, 1.2), Pair(17.20, 16.40, 0.8), Pair(16.40, 15.60, 0.8)),
    ),
    Table8Row(
        "tracking_shuffled_objects_seven_objects",
        250,
        (Pair(16.80, 11.60, 5.2), Pair(12.80, 14.80, 2), Pair(14.00, 15.60, 1.6)),
    ),
    Table8Row(  # printed as "2 objects"
        "tracking_shuffled_objects_three_objects",
        250,
        (Pair(33.20, 33.20), Pair(32.00, 33.20, 1.2), Pair(30.40, 29.20, 1.2)),
    ),
    Table8Row("web_of_lies", 250, (Pair(48.80, 48.80), Pair(52.00, 52.00), Pair(48.80, 48.80))),
)

TABLE_8_AVERAGE = (Pair(31.22, 31.88, 0.66), Pair(37.77, 39.07, 1.3), Pair(50.90, 51.42, 0.52))
"""The last row, "Avg. 27 Tasks", for 7B, 13B and 70B."""

TABLE_9_STARTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class Table9Row(NamedTuple):
    """GSM8K, one decay: exact match for each start of `TABLE_9_STARTS`."""

    alpha: float
    validation: tuple[float, ...]
    test: tuple[float, ...]


TABLE_9 = {
    "7B": (
        Table9Row(0.999, (6.68, 5.61, 3.34, 4.41, 5.35, 6.68, 6.68), (7.42, 4.85, 3.63, 5.00, 5.46, 6.22, 8.34)),
        Table9Row(0.9999, (11.63, 9.36, 8.16, 8.02, 7.62, 10.69, 11.36), (10.46, 8.49, 6.44, 7.66, 8.42, 9.70, 12.05)),
    ),
    "13B": (
        Table9Row(
            0.999, (12.70, 8.42, 3.88, 9.36, 14.71, 16.58, 16.44), (13.19, 9.02, 4.70, 9.40, 13.04, 16.30, 16.30)
        ),
        Table9Row(
            0.9999, (21.52, 18.72, 10.30, 19.65, 22.72, 24.60, 23.54), (20.55, 19.94, 9.33, 18.04, 21.53, 23.43, 22.44)
        ),
    ),
}
"""Size -> rows."""


class FullDepthRow(NamedTuple):
    """Table 9's rows of full depth, "Dense Implementation"."""

    validation: float
    test: float


TABLE_9_FULL_DEPTH = {"7B": FullDepthRow(11.76, 10.61), "13B": FullDepthRow(23.32, 22.67)}

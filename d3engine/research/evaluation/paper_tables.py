"""The D3 paper's Tables 2 and 4 to 9 as printed, misprints too, which `paper` points out.
Llama-2 of 32, 40 and 80 layers are its 7B, 13B and 70B."""

from __future__ import annotations

import json
from typing import NamedTuple

SIZES = ("7B", "13B", "70B")
LAYERS = {"7B": 32, "13B": 40, "70B": 80}

BENCHMARKS = ("bbh", "gsm8k")
MAX_TOKENS = {"bbh": 200, "gsm8k": 1024}
"""Table 6: "maximum length"; the mean layers are over this number of tokens, whatever was really generated."""

ITEMS = {"bbh": 6511, "gsm8k": 1319}
"""Of the public data sets, not printed; every score of Table 8 is a whole number of such items."""

TABLE_2 = {"7B": (32, 21, 0.8), "13B": (40, 23, 0.7), "70B": (80, 53, 0.8)}
"""The oracle of section 3.2 on word sorting: layers of the model, saturation depth, and the confidence there."""

TABLE_4 = {"bbh": (2, 182), "gsm8k": (50, 1230)}
"""Lengths of the shortest and the longest reference answer."""

TABLE_5_STARTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
TABLE_5_ALPHAS = (0.8, 0.9, 0.999, 0.9999)


class Table6Row(NamedTuple):
    """One method at one size on one benchmark; `flops_ratio` is None where the paper prints a dash."""

    method: str
    exact_match: float
    mean_layers: float
    flops_ratio: float | None


FULL_DEPTH, EARLY_EXIT, SKIP_DECODE, D3_ROW = METHODS = ("Full Depth", "Early Exit", "SkipDecode", "Ours: D3")

# Of each method: exact match in percent, mean layers, FLOPs ratio.
_TABLE_6 = """
7B  bbh    31.22 32.00 -  31.22 19.73 1.60  31.65 24.68 1.28  31.88 19.17 1.64
7B  gsm8k  10.61 32.00 -  10.61 29.90 1.07   0.00 29.90 1.07  12.05 29.90 1.07
13B bbh    37.77 40.00 -  37.72 33.50 1.19  38.98 30.99 1.29  39.07 20.33 1.94
13B gsm8k  22.67 40.00 -  22.74 37.51 1.06   9.32 37.51 1.06  23.43 37.51 1.06
70B bbh    50.90 80.00 -  50.02 50.14 1.59  51.87 62.48 1.27  51.42 48.43 1.65
70B gsm8k  52.91 80.00 -  22.74 75.53 1.05  26.68 75.53 1.05  54.51 75.53 1.05
"""


def _rows_of_methods(cells: list[str]) -> tuple[Table6Row, ...]:
    columns = zip(METHODS, cells[::3], cells[1::3], cells[2::3], strict=True)
    return tuple(
        Table6Row(method, float(exact), float(layers), None if ratio == "-" else float(ratio))
        for method, exact, layers, ratio in columns
    )


TABLE_6 = {(line[0], line[1]): _rows_of_methods(line[2:]) for line in map(str.split, _TABLE_6.strip().splitlines())}
"""(size, benchmark) -> rows."""

TABLE_7 = {"7B": (6218, 5559, 1.12), "13B": (10428, 8427, 1.23), "70B": (12893, 11294, 1.14)}
"""Wall clock of all of GSM8K, at full depth in transformers and with D3, and the speed-up as printed."""


class Pair(NamedTuple):
    """Exact match at full depth and with D3, and the printed size of their difference (0 where none is printed)."""

    full: float
    d3: float
    printed_change: float


class Table8Row(NamedTuple):
    """One BBH task: its file's name, the items of that file, and a pair for 7B, 13B and 70B."""

    task: str
    items: int
    scores: tuple[Pair, ...]


# The three_objects are printed as "2 objects"; BBH has three, five and seven.
_TABLE_8 = """
boolean_expressions                     250  68.40 68.40    0  72.80 72.80    0  82.00 82.00    0
causal_judgement                        187  50.27 50.27    0  54.55 54.55    0  62.57 62.57    0
date_understanding                      250  36.80 37.60  0.8  51.20 51.60  0.4  61.60 61.60    0
disambiguation_qa                       250  53.60 49.20  4.4  32.80 36.40  3.6  57.20 58.00  0.8
dyck_languages                          250   8.00 19.60 11.6   6.00  7.60  1.6  20.00 22.80  2.8
formal_fallacies                        250  43.60 43.60    0  52.40 52.40    0  52.00 51.60  0.4
geometric_shapes                        250   9.20  9.60  0.4  31.60 34.00  2.4  47.60 46.80  0.8
hyperbaton                              250  48.40 48.40    0  61.20 61.20    0  74.00 72.80  1.2
logical_deduction_five_objects          250  25.60 24.00  1.6  21.20 25.60  4.4  35.20 36.00  0.8
logical_deduction_seven_objects         250  14.80 15.20  0.4  18.40 24.00  5.6  42.00 41.20  0.8
logical_deduction_three_objects         250  32.40 36.00  3.6  39.60 41.60    2  59.20 63.60  4.4
movie_recommendation                    250  38.40 41.60  3.2  74.40 76.00  1.6  92.00 92.80  0.8
multistep_arithmetic_two                250   0.40  0.80  0.4   1.20  1.20    0   1.20  1.60  0.4
navigate                                250  41.60 41.60    0  59.20 59.20    0  59.60 58.80  0.8
object_counting                         250  35.60 28.80  6.8  50.00 48.40  1.6  51.60 53.20  1.6
penguins_in_a_table                     146  24.66 27.40 2.74  29.45 30.14 0.69  39.04 41.10 2.06
reasoning_about_colored_objects         250  21.60 21.20  0.4  27.20 26.80  0.4  45.60 49.20  3.6
ruin_names                              250  26.40 27.60  1.2  40.00 43.60  3.6  82.80 84.80    2
salient_translation_error_detection     250  23.60 22.00  1.6  35.20 34.00  1.2  50.40 50.40    0
snarks                                  178  46.63 48.88 2.25  52.81 53.37 0.56  80.34 80.90 0.56
word_sorting                            250  12.00 20.00   10  16.00 31.60 15.6  32.40 27.20  5.2
sports_understanding                    250  66.40 66.40    0  64.80 64.80    0  80.40 80.40    0
temporal_sequences                      250   7.60 10.00  2.4  18.80 12.00  6.8  62.40 66.80  4.4
tracking_shuffled_objects_five_objects  250  15.60 16.80  1.2  17.20 16.40  0.8  16.40 15.60  0.8
tracking_shuffled_objects_seven_objects 250  16.80 11.60  5.2  12.80 14.80    2  14.00 15.60  1.6
tracking_shuffled_objects_three_objects 250  33.20 33.20    0  32.00 33.20  1.2  30.40 29.20  1.2
web_of_lies                             250  48.80 48.80    0  52.00 52.00    0  48.80 48.80    0
"""


def _pairs(cells: list[str]) -> tuple[Pair, ...]:
    # Read as JSON, so that a printed change of 10 stays a whole number.
    return tuple(Pair(*map(json.loads, cells[at : at + 3])) for at in range(0, len(cells), 3))


TABLE_8 = tuple(
    Table8Row(line[0], int(line[1]), _pairs(line[2:])) for line in map(str.split, _TABLE_8.strip().splitlines())
)

TABLE_8_AVERAGE = (Pair(31.22, 31.88, 0.66), Pair(37.77, 39.07, 1.3), Pair(50.90, 51.42, 0.52))
"""The last row, "Avg. 27 Tasks", for 7B, 13B and 70B."""

TABLE_9_STARTS = TABLE_5_STARTS


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

TABLE_9_FULL_DEPTH = {"7B": (11.76, 10.61), "13B": (23.32, 22.67)}
"""Table 9's rows of full depth, "Dense Implementation": validation and test."""

"""What the pictures show: nothing is dropped by an axis, no mark stands where nothing was tried."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d3engine import D3, FullDepth
from d3engine.errors import InvalidValueError
from d3engine.research import plots
from d3engine.research.analysis import plots as pictures
from d3engine.research.analysis.copying import Copying, Outcome
from d3engine.research.analysis.sample import Sample, SampleAnswer, SampleToken
from d3engine.research.analysis.saturation import Flow, Perplexity
from d3engine.research.calibration import report as picture
from d3engine.research.calibration.scoring import Answers
from d3engine.research.calibration.search import Budget, Calibration, Check, Fate, Trial, make_candidates
from d3engine.research.calibration.statistics import Tolerance
from d3engine.research.plots import check_picture, plot_schedule

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was drawn, laid out, and not written."""
    drawn: list[Any] = []

    def keep(figure: Any, path: str | Path, title: str) -> None:
        figure.suptitle(title, fontsize="medium")
        figure.draw_without_rendering()
        drawn.append(figure)

    for module in (pictures, picture, plots):
        monkeypatch.setattr(module, "save_figure", keep)
    return drawn


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


# -- where a picture can be written ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("a.foo", "png"), ("a", "png"), ("none/a.png", "directory that exists"), (".", "png"), ("d.png", "written")],
)
def test_unwritable_picture_is_refused_by_its_option(name: str, allowed: str, tmp_path: Path) -> None:
    """A picture that could not be written is refused by its option."""
    (tmp_path / "d.png").mkdir()
    with pytest.raises(InvalidValueError, match=rf"--plot must be .*{allowed}"):
        check_picture("--plot", tmp_path / name)


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.svg", "a.pdf"])
def test_a_picture_that_can_be_written_is_not_refused(name: str, tmp_path: Path) -> None:
    check_picture("--plot", tmp_path / name)
    assert not list(tmp_path.iterdir())


# -- on what page a picture may stand ----------------------------------------------------------------------------------


def test_picture_is_transparent_and_has_nothing_in_black(tmp_path: Path) -> None:
    """A picture has no ground and nothing in black, so that a dark page can show it."""
    from matplotlib.image import imread

    plot_schedule(D3(alpha=0.9, start=0.6).schedule(16), 30, tmp_path / "a.png", "title")
    pixels = imread(tmp_path / "a.png")
    alpha, darkest = pixels[..., 3], pixels[..., :3].max(axis=2)
    assert alpha[0, 0] == 0
    assert (alpha == 0).mean() > 0.3
    assert darkest[alpha > 0.5].min() > 0.4  # INK is 0x76 / 255 = 0.46


def test_the_mean_of_a_schedule_says_how_much_fewer_that_is(figures: list[Any], tmp_path: Path) -> None:
    plot_schedule(D3(alpha=0.98, start=0.5).schedule(32), 128, tmp_path / "a.png")
    labels = [line.get_label() for line in figures[0].axes[0].lines]
    assert labels == ["mean 17.8 of 32: 44% fewer"]


# -- analyses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [[0.0], [0.0, -1e-7, -1e-3, 0.0], [-0.5, -3.0], [-2.0]])
def test_every_step_of_the_perplexity_is_in_the_picture(logprobs: list[float], figures: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures.plot_perplexity(Perplexity([logprobs]), "a.png", "")
    axes = figures[0].axes[0]
    points = axes.lines[0]
    assert points.get_xdata().tolist() == list(range(len(logprobs)))
    assert points.get_ydata().tolist() == [-value for value in logprobs]
    places = axes.transAxes.inverted().transform(axes.transData.transform(points.get_xydata()))
    assert np.isfinite(places).all()
    assert ((places > 0.005) & (places < 0.995)).all()  # inside, and off the border


def test_flow_legend_has_a_column_for_each_part(figures: list[Any]) -> None:
    """The legend of the flow is one block with a column for each part."""
    values = np.linspace(0.1, 1, 2 * 3 * 4).reshape(2, 3, 4)
    pictures.plot_flow(Flow(values, values, (3, 4)), "a.png", "")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{part}, {rows} tokens" for part in ("block", "attention", "MLP") for rows in ("answer", "prompt")
    ]
    left = [round(text.get_window_extent().x0) for text in legend.get_texts()]
    assert left[0] == left[1] < left[2] == left[3] < left[4] == left[5]


def test_copied_layers_have_intervals_and_answers_that_reach(figures: list[Any]) -> None:
    """Copied layers are drawn with intervals, and with the answers that reach the step."""
    outcomes = [[Outcome(20, right, 0) for right in (2, 20)], [Outcome(20, right, 3) for right in (2, 20)]]
    lengths = (4,) * 15 + (9,) * 5
    pictures.plot_copying(Copying("exact match", 9, lengths, (4, 8), (1, 8), outcomes, Outcome(20, 20, 1)), "a.png", "")
    (axes,) = figures[0].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1\n20", "8\n5"]
    assert "cut off at 9 tokens: 1 at full depth, at most 3" in axes.get_title()
    bars = [bar.lines[2][0].get_segments() for bar in axes.containers]
    assert bars[0][0][:, 1] == pytest.approx([2.8, 30.1], abs=0.1)  # 2 of 20
    assert bars[0][1][:, 1] == pytest.approx([83.9, 100], abs=0.1)
    assert bars[0][0][0, 0] != bars[1][0][0, 0]  # equal results do not hide each other


def test_sample_has_prompt_ends_and_depths_where_they_change(figures: list[Any]) -> None:
    """A sample is drawn with the end of each prompt, and depths where they change."""
    pieces = (("Adding", 16), (" 2", 15), (" is", 15), ("\nx", 15))
    tokens = tuple(SampleToken(text, depth, ()) for text, depth in pieces)
    prompts = ["Solve. " * 30 + f"How many {what}?\nAnswer:" for what in ("pens", "apples")]
    policies = (FullDepth(), D3(alpha=0.9, start=0.6))
    answers = [SampleAnswer(policy, prompt, tokens) for prompt in prompts for policy in policies]
    pictures.plot_sample(Sample(16, answers), "a.png", "", ["one", "two"] * 2)
    found = texts(figures[0].axes[0])
    ends = [text for text in found if text.startswith("Prompt:")]
    assert [text.split("How many ")[1] for text in ends] == ["pens?\u21b5Answer:", "apples?\u21b5Answer:"]
    assert all(len(text) <= pictures.COLUMNS for text in ends)
    assert (found.count("16"), found.count("15")) == (4, 8)  # where the depth changes, and where a line begins


# -- calibration -------------------------------------------------------------------------------------------------------


def answers(share: float, problems: int, layers: int) -> Answers:
    right = round(share * problems)
    return Answers((True,) * right + (False,) * (problems - right), problems, problems * layers, 1.0)


@pytest.fixture
def calibration() -> Calibration:
    """Three settings that answered 100, 200 and 400 problems; the best of few is no match for those of many."""
    candidates = make_candidates(16, 8, starts=(0.6, 0.8), alphas=(0.8, 0.9999), tails=(0, 1))
    trials = [Trial(one, answers(0.5, 100, 9), 1, Fate.BEATEN) for one in candidates]
    alike = next(trial for trial in trials if len({policy.tail for policy in trial.candidate.alike}) == 2)
    alike.screened, alike.rounds, alike.fate = answers(0.99, 400, 12), 3, Fate.CHOSEN
    others = [trial for trial in trials if trial is not alike]
    others[0].screened, others[0].rounds, others[0].fate = answers(0.985, 400, 14), 3, Fate.CERTIFIED
    others[1].screened, others[1].rounds, others[1].fate = answers(0.995, 200, 15), 2, Fate.BEATEN
    full = answers(0.99, 400, 16)
    check = Check(alike.policy, full, full, 0.0)
    return Calibration(16, Tolerance(0.02), Budget(100, 400, 4000), full, 0.0, True, full, trials, certificates=[check])


def test_only_the_setting_that_was_tried_is_marked(calibration: Calibration, figures: list[Any]) -> None:
    picture.plot_calibration(calibration, "", "a.png")
    grids = [axes for axes in figures[0].axes if axes.get_images()]
    cells = [text for axes in grids for text in texts(axes)]
    assert len(grids) == 2
    assert sum("\u2605" in cell for cell in cells) == 1
    assert sum("\u2713" in cell for cell in cells) == 1
    assert sum("=" in cell for cell in cells) == len(cells) - len(calibration.trials)
    assert "99.0 \u2605\n12.0" in cells
    for axes in grids:  # as the printed grid has it
        assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0.8", "0.9999"]
        assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_the_line_of_the_best_joins_those_of_one_set_of_problems(calibration: Calibration, figures: list[Any]) -> None:
    picture.plot_calibration(calibration, "", "a.png")
    whole, near = figures[0].axes[-2:]
    for axes in (whole, near):
        (line,) = (line for line in axes.lines if str(line.get_label()).startswith("best at each speed"))
        assert line.get_xydata().tolist() == [[12, 99]]  # 14 layers did worse, and 15 answered half as many problems
    assert near.get_ylim()[0] == pytest.approx(93)
    assert near.get_ylim()[1] > 100
    below = sum(trial.screened.exact_match < 0.93 for trial in calibration.trials)
    assert f"{below} of {len(calibration.trials)} settings are below" in near.get_title()


def test_no_marker_is_filled_over_a_bar_or_a_neighbour(calibration: Calibration, figures: list[Any]) -> None:
    picture.plot_calibration(calibration, "", "a.png")
    bars = figures[0].axes[-1].containers
    assert len(bars) == len(calibration.trials) + 1
    assert {bar.lines[0].get_markerfacecolor() for bar in bars} == {"none"}


@pytest.mark.parametrize("tails", [(0,), (0, 1, 2)])
def test_a_calibration_of_many_tails_is_as_wide_as_one_of_one(tails: tuple[int, ...], figures: list[Any]) -> None:
    candidates = make_candidates(16, 64, starts=(0.6, 0.8), alphas=(0.8, 0.9), tails=tails)
    trials = [Trial(one, answers(0.9, 100, 9), 1, Fate.REFUTED) for one in candidates]
    full = answers(1, 100, 16)
    result = Calibration(16, Tolerance(0.02), Budget(100, 400, 4000), full, 0.0, True, full, trials)
    picture.plot_calibration(result, "", "a.png")
    assert figures[0].get_size_inches()[0] == 11
    assert sum(bool(axes.get_images()) for axes in figures[0].axes) == len(tails)

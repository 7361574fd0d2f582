"""The page over the bundled model's server: depths, tokens and schedules are the engine's."""

from typing import Any

from browsed_page import Open, at_once, compare, depths, letters, pane, run_whole, style
from written_streams import Scripted

from d3engine import D3, FullDepth, SamplingParams


def test_panes_show_the_engines_tokens_and_depths(open_page: Open, url: str, demo: Any, question: str) -> None:
    """A prompt runs at the server's own and at full depth at once, tokens coloured by their layers."""
    page = open_page(url)
    page.click("text=Completion")
    compare(page)
    run_whole(page, question)
    for number, depth in enumerate((None, FullDepth())):
        answer = demo.generate([question], SamplingParams(temperature=0, max_tokens=128, depth=depth), use_tqdm=False)[
            0
        ].outputs[0]
        assert letters(page, number) == answer.text
        assert depths(page, number) == answer.depths
        assert pane(page, number).locator(".count").text_content() == str(len(answer.depths))
        mean = sum(answer.depths) / len(answer.depths)
        assert pane(page, number).locator(".layers").text_content() == f"{mean:.2f} of 16"
    assert pane(page, 1).locator(".cache").text_content() == "all"
    assert pane(page, 0).locator(".cache").text_content().endswith("KiB less")
    assert "Both answers are the same." in page.text_content("#status")
    assert page.text_content("#difference") == "Both answers are the same."
    assert style(page, "#difference", "borderLeftColor") == style(page, "header", "borderBottomColor")


def test_sliders_draw_the_schedule_that_the_run_keeps(open_page: Open, url: str) -> None:
    """Sliders draw the engine's schedule before anything runs, and the run keeps to it."""
    page = open_page(url)
    compare(page)
    right = pane(page, 1)
    right.locator(".depth").select_option("d3")
    right.locator(".alpha").fill("0.9")
    right.locator(".start").fill("0.3")
    page.click("text=Sampling")
    page.fill("#max-tokens", "20")
    expected = D3(0.9, 0.3).schedule(16).depths(20).tolist()
    mean = sum(expected) / 20
    said = right.locator(".schedule-words").text_content()
    assert f"{expected[-1]} from token {expected.index(expected[-1]) + 1} on, {mean:.1f} on average" in said
    run_whole(page, "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?")
    assert depths(page, 1) == expected[: len(depths(page, 1))]
    marked = page.locator(".differs").all_text_contents()
    assert len(marked) == 2
    assert marked[0] != marked[1]
    assert "differ first at token" in page.text_content("#difference")
    assert style(page, "#difference", "borderLeftColor") in style(page, ".differs", "boxShadow")


def test_page_schedule_equals_the_engines(open_page: Open, url: str) -> None:
    """The page's schedule is the engine's for any alpha and start."""
    page = open_page(url)
    cases = [
        (layers, alpha, start)
        for layers in (1, 6, 16, 32)
        for alpha in (0.5, 0.9, 0.985, 1)
        for start in (0.07, 0.29, 0.7)
    ]
    found = page.evaluate(
        """async (cases) => {
            const { d3Depths, firstLayer } = await import("/page/schedule.js");
            return cases.map(([n, alpha, start]) => [firstLayer(start, n), d3Depths({ alpha, start }, n, 64)]);
        }""",
        cases,
    )
    for (layers, alpha, start), (first, of_page) in zip(cases, found, strict=True):
        policy = D3(alpha, start)
        assert first == policy.first_layer(layers)
        assert of_page == policy.schedule(layers).depths(64).tolist()


def test_page_opens_with_two_depths_and_can_show_one_pane(open_page: Open, url: str) -> None:
    """The page opens with the server's own depth and another, and one pane may stand alone."""
    page = open_page(url, compares=True)
    assert page.locator(".pane:visible").count() == 2
    assert pane(page, 0).locator(".depth").input_value() == "auto"
    assert pane(page, 1).locator(".depth").input_value() == "full"
    compare(page, compares=False)
    assert page.locator(".pane:visible").count() == 1
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    compare(page)
    pane(page, 0).locator(".depth").select_option("d3")
    compare(page, compares=False)
    assert page.locator(".pane:visible").count() == 1
    assert pane(page, 0).locator(".depth").input_value() == "d3"
    assert pane(page, 0).locator(".turn").count() == 1


def test_speed_is_shown_where_depths_run_in_turn_alone(open_page: Open, url: str) -> None:
    """Speed is shown where depths run in turn, and not where they run at once."""
    page = open_page(url, compares=True)
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    assert [page.locator(".rate").nth(number).is_visible() for number in (0, 1)] == [True, True]
    at_once(page)
    assert page.locator(".rate:visible").count() == 0
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    assert page.locator(".turn").count() == 4
    assert page.locator(".rate:visible").count() == 0


def test_a_pane_says_that_its_depth_was_never_certified(open_page: Open, url: str) -> None:
    page = open_page(url)
    compare(page)
    own, other = (pane(page, number).locator(".uncertified") for number in (0, 1))
    assert not own.is_visible()
    assert not other.is_visible()
    pane(page, 1).locator(".depth").select_option("d3")
    assert not other.is_visible()  # the sliders begin at the model's own setting
    assert not pane(page, 1).locator(".uncalibrated").is_visible()
    for alpha, is_told in (("0.9", True), ("1", False), ("0.95", True), ("0.8", False)):
        pane(page, 1).locator(".alpha").fill(alpha)
        assert other.is_visible() == is_told, alpha


def test_sliders_begin_at_the_certified_under_full_depth(open_page: Open, full_depth_url: str) -> None:
    """On a server of full depth the sliders begin at the certified setting."""
    page = open_page(full_depth_url)
    compare(page)
    right = pane(page, 1)
    assert right.locator(".depth").input_value() == "d3"
    assert [right.locator(name).input_value() for name in (".alpha", ".start")] == ["0.8", "0.6"]
    assert not right.locator(".uncertified").is_visible()
    assert not right.locator(".uncalibrated").is_visible()
    right.locator(".alpha").fill("0.9")
    assert right.locator(".uncertified").is_visible()


def test_sliders_skip_nothing_where_no_setting_is_certified(open_page: Open, scripted: Scripted) -> None:
    """Where no setting is certified, the sliders skip no layer and say that none is known."""
    address, script = scripted
    script.d3ext = {"num_layers": 8, "depth": {"policy": "full"}, "certified": True, "certified_depth": None}
    page = open_page(address, compares=True)
    right = pane(page, 1)
    assert right.locator(".depth").input_value() == "d3"
    assert right.locator(".schedule-words").text_content() == "All 8 layers for each token."
    assert right.locator(".uncalibrated").is_visible()
    assert not right.locator(".uncertified").is_visible()
    right.locator(".alpha").fill("0.9")
    assert right.locator(".uncertified").is_visible()


def test_token_focus_shows_layers_probability_and_alternatives(open_page: Open, url: str) -> None:
    """Focus on a token shows its layers, probability and alternatives, and arrow keys move on."""
    page = open_page(url)
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    tokens = pane(page, 0).locator(".token")
    tokens.nth(0).focus()
    assert "Token 1: Adding" in page.text_content("#details")
    page.keyboard.press("ArrowRight")
    details = page.locator("#details")
    assert "Token 2" in details.text_content()
    assert f"Layers: {depths(page, 0)[1]} of 16" in details.text_content()
    assert "Probability" in details.text_content()
    assert details.locator(".alternative").count() >= 5
    page.keyboard.press("Escape")
    assert not details.is_visible()

"""How the page looks: it fits its screen, and every depth can be seen."""

import pytest
from axe import check_with_axe
from browsed_page import Open, depths, pane, run_whole, style
from contrast import contrast, luminance


def test_dark_pane_depths_stand_out_after_a_change_of_scheme(open_page: Open, url: str) -> None:
    """Every depth stands out from a dark pane, also where the scheme changes under the answers."""
    page = open_page(url, compares=True, color_scheme="light")
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    deepest, shallowest = (f".depth-{depth}" for depth in (max(depths(page, 0)), min(depths(page, 0))))
    light = style(page, deepest, "backgroundColor")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "([one, colour]) => getComputedStyle(document.querySelector(one)).backgroundColor !== colour",
        arg=[deepest, light],
    )
    ground = style(page, ".pane", "backgroundColor")
    deep, shallow = (style(page, token, "backgroundColor") for token in (deepest, shallowest))
    assert contrast(deep, ground) >= 3
    assert luminance(shallow) > luminance(deep)
    for token, back in ((deepest, deep), (shallowest, shallow)):
        assert contrast(style(page, token, "color"), back) >= 4.5
    page.emulate_media(color_scheme="light")
    page.wait_for_function(
        "([one, colour]) => getComputedStyle(document.querySelector(one)).backgroundColor === colour",
        arg=[deepest, light],
    )


@pytest.mark.parametrize("width", [390, 820, 1100])
def test_no_map_of_layers_leaves_its_pane(open_page: Open, url: str, width: int) -> None:
    page = open_page(url, compares=True, viewport={"width": width, "height": 800})
    box = pane(page, 1).bounding_box()
    drawn = pane(page, 1).locator(".schedule").bounding_box()
    assert drawn["x"] + drawn["width"] < box["x"] + box["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: Open, url: str, scheme: str) -> None:
    page = open_page(url, compares=True, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    run_whole(page, "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    check_with_axe(page)
    left, right = (pane(page, number).bounding_box() for number in (0, 1))
    assert left["x"] == right["x"]
    assert right["y"] >= left["y"] + left["height"]


def test_phone_panes_without_answers_follow_closely(open_page: Open, url: str) -> None:
    """On a phone, panes without answers follow each other closely."""
    page = open_page(url, compares=True, viewport={"width": 390, "height": 1200})
    upper, lower = (pane(page, number).bounding_box() for number in (0, 1))
    assert 0 < lower["y"] - (upper["y"] + upper["height"]) < 32


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_map_of_layers_shows_which_were_skipped(open_page: Open, url: str, scheme: str) -> None:
    page = open_page(url, compares=True, color_scheme=scheme)
    last, first = (
        page.locator(".schedule").first.evaluate(
            """(canvas, fromTop) => {
                const [x, y] = [canvas.width - 5, fromTop ? 1 : canvas.height - 2];
                return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3).join(", ");
            }""",
            from_top,
        )
        for from_top in (True, False)
    )
    assert f"rgb({last})" == style(page, ".schedule", "color")
    assert f"rgb({first})" != style(page, ".schedule", "color")

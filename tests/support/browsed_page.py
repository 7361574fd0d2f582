"""What tests do with the server's pages in a browser, and what they read off them."""

from collections.abc import Callable
from typing import Any

Open = Callable[..., Any]


def run(page: Any, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.click("#run")


def run_whole(page: Any, prompt: str) -> None:
    """Run it until both answers have ended."""
    run(page, prompt)
    page.wait_for_selector("#retry:enabled")


def compare(page: Any, *, compares: bool = True) -> None:
    """Show a second depth beside the first, or the first alone."""
    page.set_checked("#compare", compares)


def at_once(page: Any) -> None:
    """Let both depths run at the same time."""
    page.set_checked("#in-turn", False)


def pane(page: Any, number: int) -> Any:
    return page.locator(".pane").nth(number)


def letters(page: Any, number: int) -> str:
    """All that the tokens of an answer read as."""
    return "".join(pane(page, number).locator(".token").all_text_contents())


def style(page: Any, selector: str, name: str) -> str:
    """A computed style of the first element that the selector finds."""
    found: str = page.locator(selector).first.evaluate("(one, name) => getComputedStyle(one)[name]", name)
    return found


def depths(page: Any, number: int) -> list[int]:
    names = pane(page, number).locator(".token").evaluate_all("all => all.map(one => one.className)")
    return [int(word.removeprefix("depth-")) for name in names for word in name.split() if word.startswith("depth-")]

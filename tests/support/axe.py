"""Accessibility by axe, of which Deque's rules are the field's own."""

from typing import Any


def check_with_axe(page: Any) -> None:
    """What is shown violates no rule of axe; nothing is checked where axe is not installed."""
    try:
        from axe_playwright_python import base
    except ImportError:
        return
    page.evaluate(base.AXE_SCRIPT)
    moving = "document.getAnimations().filter((one) => one.effect.getTiming().iterations < 9)"
    page.evaluate(f"Promise.all({moving}.map((one) => one.finished))")
    found = page.evaluate("axe.run().then(({ violations }) => violations)")
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []

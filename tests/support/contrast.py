"""The contrast of two colours as WCAG 2 counts it: 3 for what a picture is made of, 4.5 for text."""

import re


def contrast(one: str, other: str) -> float:
    """From 1 to 21, of "#rrggbb" or "rgb(1, 2, 3)"."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance, from 0 to 1."""
    digits = re.findall("[0-9a-f]{2}", colour) if colour.startswith("#") else re.findall(r"\d+", colour)
    parts = [int(part, 16 if colour.startswith("#") else 10) / 255 for part in digits[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

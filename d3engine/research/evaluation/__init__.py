"""Tasks and measures that say how well a model answers under a depth policy."""

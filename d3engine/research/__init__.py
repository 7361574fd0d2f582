"""Research on depth: analysis, calibration, evaluation and bridges. The engine imports none of it."""

"""From the engine's outputs to answers, whole or as streams."""

"""From the engine's outputs to answers, whole or as streams, as far as interfaces share it."""

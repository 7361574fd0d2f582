"""Who runs in a step, which rows of which layers, which blocks: numpy only."""

"""Who runs in a step, which rows of which layers, which blocks of the KV cache: numpy only."""

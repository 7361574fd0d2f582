"""How callers reach the engine: one at a time, between steps, and each gets its own outputs."""

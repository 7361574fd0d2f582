"""Finds a depth setting that is safe for one model and one task, or says that none could be shown to be safe."""

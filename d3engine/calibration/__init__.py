"""Finds a depth setting that is safe for one model and one task, or says that there is none."""

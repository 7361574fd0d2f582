"""Bridges over skipped layers: fitted to a model and a text, and measured on other text."""

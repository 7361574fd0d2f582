"""Choosing tokens from logits, and judging drafted ones."""

"""Runs a plan and returns logits; chooses tokens from logits, and judges drafted ones."""

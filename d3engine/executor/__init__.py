"""Runs a plan and returns logits."""

"""Adapters to serving stacks and libraries; each module needs an optional package."""

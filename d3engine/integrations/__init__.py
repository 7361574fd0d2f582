"""Adapters to serving stacks and libraries, and files of requests; each module needs an optional package."""

"""Batch inference from files of requests, in OpenAI's batch format."""

"""Serving: throughput and waiting times over HTTP, beside llama.cpp's server and the same engine without one, in turns.

A server is measured from outside; the processor time of its process stands beside the clock.
"""

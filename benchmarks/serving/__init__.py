"""Serving: throughput and waiting times over HTTP, beside llama.cpp's server and the same engine without one, in turns.

A server is measured from outside, as its users see it: a process of its own, and a client that keeps so
many streams going, or sends requests at random times or in bursts. Clocks depend on who else wants the machine, so
the processor time of the server stands beside them.
"""

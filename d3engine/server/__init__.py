"""OpenAI's HTTP interface to an engine: what a client sends becomes requests, what comes back becomes answers."""

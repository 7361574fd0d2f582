"""The edge where text exists: tokenizers, templates, prompts and outputs."""

"""The KV cache: blocks of one layer each, who holds them, and what stands for skipped entries."""

"""The Llama model: configuration, weights, rope and the forward pass over a plan."""

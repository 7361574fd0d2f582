"""Students: a model's layers for generated tokens, narrowed or left out, distilled from its own answers."""

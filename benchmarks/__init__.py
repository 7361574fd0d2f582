"""What the engine costs, measured; README.md says what each file measures and how to read it."""

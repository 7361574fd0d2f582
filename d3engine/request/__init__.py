"""What a user asks for and gets, and the sequences that it becomes in the core."""

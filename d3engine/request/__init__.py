"""What a user asks for and gets."""

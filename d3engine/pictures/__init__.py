"""What all pictures share: figures, colours, and the pictures of schedules."""

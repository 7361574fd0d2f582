"""Tools around model directories: convert, inspect, verify, and train the demo model."""

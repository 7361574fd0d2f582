"""Tools around model directories: convert, quantize, inspect, verify, and train the demo model."""

"""Tools for model directories: convert, quantize, inspect, verify; demo training."""

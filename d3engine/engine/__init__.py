"""The engine: made from what a user names, called by one or many, counted; one step is a few lines of engine.py."""

"""One file for each family of routes: what one interface has of its own to read requests, and to write answers."""

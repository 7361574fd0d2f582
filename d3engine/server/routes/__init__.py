"""One file for each family of routes: how one interface reads requests and writes answers."""

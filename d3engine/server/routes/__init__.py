"""One file for each family of routes; each is a function from a request and `Served` to a response."""

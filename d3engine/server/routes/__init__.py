"""One file for each family of routes; each is a function from a request and `AppState` to a response."""

"""What requests and answers look like: the shapes that are read, written, and described in /openapi.json."""

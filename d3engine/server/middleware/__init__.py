"""What stands around the routes: each guard is an ASGI app around another, and lets a request through or answers it."""

"""The engine in other people's programs; each module needs an optional package."""

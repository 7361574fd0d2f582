"""Answers that must have a form: JSON by a schema, a regular expression, a choice, a grammar."""

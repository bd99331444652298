"""Stores the result of every execution."""

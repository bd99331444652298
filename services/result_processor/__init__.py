"""Keeps the result of every execution."""
